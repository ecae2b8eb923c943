"""Two GPUs and the link between them: migration, reads in place, and where replicating starts to pay.

    python bench/two_gpus.py [--json FILE]

The limit of migration is a plain peer copy of 1 GiB in the same run, beside which stand plain copies of as many bytes page by
page; that of reading in place is the same decode over local pages.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from core import Row, daemon, run, say

from kvtier_client import AttentionLayout, Client
from kvtier_kernels.addressing import entries
from kvtier_kernels.decode import decode

GIB = 1 << 30
PAGES = ((256, 16), (2048, 16), (10240, 256), (65536, 256))
"""KiB and tokens of those that are migrated."""
_WARM_UP = 4
"""Turns that do not count: slabs are grown in them, and on a fresh machine both sides touch their memory for the first time."""
LLAMA_70B_TP8 = AttentionLayout(layers=80, kv_heads=1, head_dim=128, dtype="bfloat16")
LLAMA_8B = AttentionLayout(layers=4, kv_heads=8, head_dim=128, dtype="bfloat16")


def hbm(capacity: str, *more: str) -> tuple[str, ...]:
    return (
        *("tiers.hbm.medium=cuda", "tiers.hbm.device=all", f"tiers.hbm.capacity={capacity}", "tiers.hbm.slab=512MiB"),
        *more,
    )


def peer_limits() -> dict[str, float]:
    """GB/s of plain copies between the GPUs, one way, and both ways at once (the sum): of 1 GiB, and page by page."""
    cupy: Any = importlib.import_module("cupy")
    cuda = cupy.cuda.runtime
    parts = []
    for gpu in (0, 1):
        with cupy.cuda.Device(gpu):
            cuda.deviceEnablePeerAccess(1 - gpu)
            parts.append(([cupy.zeros(GIB, cupy.uint8) for _ in range(2)], cupy.cuda.Stream(non_blocking=True)))

    def start(source: int, offset: int, nbytes: int) -> None:
        """From GPU `source` to the other, on a stream of the source's own."""
        buffers, stream = parts[source]
        target = parts[1 - source][0][1].data.ptr + offset
        with cupy.cuda.Device(source):
            cuda.memcpyPeerAsync(target, 1 - source, buffers[0].data.ptr + offset, source, nbytes, stream.ptr)

    def timed(nbytes: int, *sources: int) -> float:
        best = 0.0
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(8):
                for offset in range(0, GIB - nbytes + 1, nbytes):
                    for source in sources:
                        start(source, offset, nbytes)
            for source in sources:
                parts[source][1].synchronize()
            moved = 8 * len(sources) * (GIB // nbytes) * nbytes
            best = max(best, moved / (time.perf_counter() - started) / 1e9)
        return best

    limit = {"one way": timed(GIB, 0), "both ways": timed(GIB, 0, 1)}
    for kib, _ in PAGES:
        limit |= {f"{kib} one way": timed(kib << 10, 0), f"{kib} both ways": timed(kib << 10, 0, 1)}
    return limit


def write(space: Any, keys: list[bytes], tier: str) -> None:
    for start in range(0, len(keys), 512):
        with space.reserve(keys[: start + 512], start=start, tier=tier, timeout=60) as reservation:
            for page in reservation:
                page.torch().fill_(0.5)
            torch.cuda.synchronize()
            reservation.commit()


def migration(directory: Path, limit: dict[str, float]) -> list[Row]:
    rows = []
    for kib, tokens in PAGES:
        say(f"migration of pages of {kib} KiB")
        units = tokens // 16
        layers = kib * 1024 // units // (2 * 16 * 128 * 2)
        layout = AttentionLayout(layers=layers, kv_heads=1, head_dim=128, dtype="bfloat16")
        size = layout.unit_stride * units
        pages = max(32, min(8192, 16 * GIB // size))
        with daemon(directory, "tiers.host.write_queue=1", host="1GiB", first=hbm("48GiB")) as running:
            first, second = (Client(running.endpoint, device=gpu) for gpu in (0, 1))
            spaces = [client.namespace(layout, model="m", cap_tokens=tokens) for client in (first, second)]
            chain = spaces[0].schedule
            skip = 0 if tokens == 16 else 80
            length = chain.span(skip + pages - 1).stop
            one, both = [], []
            for turn in range(_WARM_UP + 4):
                keys = spaces[0].keys([turn] * length)
                other = spaces[1].keys([100 + turn] * length)
                write(spaces[0], keys, "hbm:0")
                with torch.cuda.device(1):
                    write(spaces[1], other, "hbm:1")
                total = sum(spaces[0].spec.page_bytes(span.order) for span in chain.spans(length))
                started = time.perf_counter()
                assert spaces[0].migrate(keys, "hbm:1") == len(keys)
                one.append(total / (time.perf_counter() - started) / 1e9)
                spaces[0].evict(keys[:1])
                keys = spaces[0].keys([200 + turn] * length)
                write(spaces[0], keys, "hbm:0")
                started = time.perf_counter()
                pending = spaces[1].submit_borrow(keys, tier="hbm:1", timeout=60)
                reverse = spaces[0].submit_borrow(other, tier="hbm:0", timeout=60)
                leases = [pending.result(), reverse.result()]
                both.append(2 * total / (time.perf_counter() - started) / 1e9)
                for lease in leases:
                    assert len(lease) == len(keys)
                    lease.release()
                spaces[0].evict()
        for name, values in (("one way", one), ("both ways", both)):
            mine = statistics.median(values[_WARM_UP:])
            goal = ">= 0.95" if kib >= 2048 else ""
            met = mine >= 0.95 * limit[name] or not goal
            rows.append(
                Row(f"migrate {kib} KiB pages, {name}", mine, limit[name], "GB/s (limit: peer copy)", goal, met)
            )
            plain = limit[f"{kib} {name}"]
            rows.append(Row("  plain copies page by page", plain, limit[name], "GB/s (as above)", "", True))
    return rows


def staged(directory: Path) -> list[Row]:
    say("migration with peer access refused")
    layout, pages = LLAMA_70B_TP8, 256
    with daemon(
        directory,
        "tiers.host.slab=512MiB",
        "tiers.host.write_queue=1",
        host="8GiB",
        first=hbm("8GiB", "tiers.hbm.peers=false"),
    ) as running:
        space = Client(running.endpoint, device=0).namespace(layout, model="m")
        length = space.schedule.span(79 + pages).stop
        times = []
        for turn in range(3):
            keys = space.keys([turn] * length)
            write(space, keys, "hbm:0")
            total = sum(space.spec.page_bytes(span.order) for span in space.schedule.spans(length))
            started = time.perf_counter()
            assert space.migrate(keys, "hbm:1") == len(keys)
            times.append(total / (time.perf_counter() - started) / 1e9)
            space.evict()
    return [Row("migrate through pinned memory", max(times), 0, "GB/s", "", True)]


def in_place(directory: Path, limit: dict[str, float]) -> list[Row]:
    """Decode on GPU 0 over a context of which a share lies on GPU 1; and the steps after which a replica has paid."""
    say("decode over pages of which some lie on the other GPU")
    layout, batch, tokens = LLAMA_8B, 8, 32768
    rows, times = [], {}
    with daemon(directory, "tiers.host.write_queue=1", host="1GiB", first=hbm("8GiB")) as running:
        space = Client(running.endpoint, device=0).namespace(layout, model="m")
        for share in (0, 10, 50, 100):
            leases = []
            tables = []
            for sequence in range(batch):
                keys = space.keys([sequence + 10 * share] * tokens)
                remote = len(keys) * share // 100
                write(space, keys[: len(keys) - remote], "hbm:0")
                if remote:
                    with space.reserve(keys, start=len(keys) - remote, tier="hbm:1", timeout=60) as reservation:
                        for page in reservation:
                            page.torch().fill_(0.5)
                        torch.cuda.synchronize()
                        reservation.commit()
                lease = space.borrow(keys, tier="any")
                assert len(lease) == len(keys)
                leases.append(lease)
                tables.append(lease.table())
            table = entries(torch.stack(tables), layout.dtype)
            lengths = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
            q = torch.randn(batch, 64, layout.head_dim, dtype=torch.bfloat16, device="cuda")
            decode(q, table, lengths, layout, 0)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for layer in range(layout.layers):
                    decode(q, table, lengths, layout, layer)
            spent = []
            for _ in range(20):
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                stop.record()
                torch.cuda.synchronize()
                spent.append(start.elapsed_time(stop) / 1e3)
            read = batch * tokens * 2 * layout.kv_heads * layout.head_dim * 2 * layout.layers
            times[share] = statistics.median(spent)
            for lease in leases:
                lease.release()
            space.evict()
            rows.append(
                Row(
                    f"decode 8x32k, {share}% on the other GPU",
                    read / times[share] / 1e9,
                    read / times[0] / 1e9,
                    "GB/s (limit: all local)",
                    "",
                    True,
                )
            )
    replica = read / limit["one way"] / 1e9
    steps = replica / (times[100] - times[0])
    rows.append(Row("decode steps after which a replica has paid", steps, 0, "steps", "", True))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    given = parser.parse_args()
    if torch.cuda.device_count() < 2:
        print("this bench needs two GPUs")
        return 2
    place = Path(tempfile.mkdtemp(prefix="kvb-"))
    try:
        limit = peer_limits()
        return run([lambda: migration(place, limit), lambda: staged(place), lambda: in_place(place, limit)], given.json)
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
