"""What the GPU tier gives, beside the link's own limits, on this machine and in this run.

    python bench/gpu.py [--json FILE] [--directory DIR]

The limits are one large pinned copy a direction (and both at once), and a bare O_DIRECT loop for the disk; the peer of
a borrow is the copy of the same bytes that a cache without shared memory makes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from core import PAGE, Row, bare_disk, daemon, run, say

from kvtier_client import AttentionLayout, Client, NamespaceClient, Reservation

GIB = 1 << 30
LLAMA_70B_TP8 = AttentionLayout(layers=80, kv_heads=1, head_dim=128, dtype="bfloat16")
LLAMA_70B = AttentionLayout(layers=80, kv_heads=8, head_dim=128, dtype="bfloat16")
SETTINGS = ("tiers.host.slab=512MiB", "tiers.host.write_queue=64GiB")


def gpu(capacity: str) -> tuple[str, ...]:
    """The settings of a first tier in the memory of GPU 0."""
    return ("tiers.hbm.medium=cuda", "tiers.hbm.device=0", f"tiers.hbm.capacity={capacity}", "tiers.hbm.slab=512MiB")


def limits() -> dict[str, float]:
    """GB/s of plain pinned copies of 1 GiB: up, down, and both at once (the sum)."""
    host = [torch.empty(GIB, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    gpu = [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def timed(*copies: tuple[Any, Any, Any]) -> float:
        best = 0.0
        for _ in range(4):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(4):
                for target, source, stream in copies:
                    with torch.cuda.stream(stream):
                        target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            best = max(best, 4 * len(copies) * GIB / (time.perf_counter() - started) / 1e9)
        return best

    up, down = (gpu[0], host[0], streams[0]), (host[1], gpu[1], streams[1])
    return {"up": timed(up), "down": timed(down), "both": timed(up, down)}


def store(space: NamespaceClient, keys: list[bytes], tier: str) -> None:
    for start in range(0, len(keys), 256):
        with space.reserve(keys[: start + 256], start=start, tier=tier, timeout=60) as reservation:
            for page in reservation:
                page.torch().view(torch.uint8).fill_(start % 251)
            reservation.commit(after=torch.cuda.current_stream())


def wait(client: Client, tier: int, pages: int) -> None:
    while client.stats()["tiers"][tier]["pages"] < pages:
        time.sleep(0.0005)


def moves(directory: Path, limit: dict[str, float], layout: AttentionLayout, pages: int) -> list[Row]:
    """Promotion and demotion of 16 chains of `pages` pages together, one way and both at once, asked for as several
    workers do: with all requests under way at a time. And one way by a single request for as many."""
    size = layout.unit_stride
    name = f"{size >> 20} MiB pages"
    say(f"moves of {pages} {name}")
    total = pages * size
    each = pages // 16
    hbm = 3 * total // GIB + 2
    with daemon(directory, *SETTINGS, host=f"{hbm + 2}GiB", first=gpu(f"{hbm}GiB")) as running:
        client = Client(running.endpoint, device=0)
        space = client.namespace(layout, model="bench", cap_tokens=16)

        def chains(seed: int) -> list[list[bytes]]:
            return [space.keys([seed, number] * (8 * each)) for number in range(16)]

        def write(chain: list[bytes]) -> Reservation:
            reservation = space.reserve(chain, tier="hbm", timeout=60)
            assert len(reservation) == each
            for page in reservation:
                page.torch().view(torch.uint8).fill_(7)
            return reservation

        def ask(chains: list[list[bytes]], tier: str) -> list[Any]:
            return [space.submit_borrow(chain, tier=tier, timeout=60) for chain in chains]

        def seconds(started: float, pending: list[Any]) -> float:
            """Until all that was asked for was there."""
            leases = [borrow.result() for borrow in pending]
            spent = time.perf_counter() - started
            assert all(len(lease) == each for lease in leases)
            for lease in leases:
                lease.release()
            return spent

        figures: dict[str, list[float]] = {"up": [], "down": [], "both": [], "one": []}
        for turn in range(4):
            first, second, whole = chains(10 + turn), chains(50 + turn), space.keys([90 + turn] * 16 * pages)
            for chain in first:
                store(space, chain, "host")
            started = time.perf_counter()
            up = total / seconds(started, ask(first, "cuda")) / 1e9
            reservations = [write(chain) for chain in second]
            torch.cuda.synchronize()
            started = time.perf_counter()
            for reservation in reservations:
                reservation.commit()
            down = total / seconds(started, ask(second, "host")) / 1e9
            space.evict()
            for chain in first:
                store(space, chain, "host")
            reservations = [write(chain) for chain in second]
            torch.cuda.synchronize()
            started = time.perf_counter()
            pending = []
            for chain, reservation in zip(first, reservations, strict=True):
                pending += ask([chain], "cuda")
                reservation.commit()
            both = 2 * total / seconds(started, pending + ask(second, "host")) / 1e9
            space.evict()
            store(space, whole, "host")
            started = time.perf_counter()
            space.borrow(whole, tier="cuda", timeout=60).release()
            one = total / (time.perf_counter() - started) / 1e9
            space.evict()
            if turn:  # the first makes the slabs
                for key, value in (("up", up), ("down", down), ("both", both), ("one", one)):
                    figures[key].append(value)
    middle = {key: statistics.median(values) for key, values in figures.items()}
    asked = {"up": 0.95, "down": 0.95, "both": 0.93}
    rows = [
        Row(
            f"{text}, {name}",
            middle[key],
            limit[key],
            "GB/s (limit: pinned copy)",
            f">= {asked[key]}",
            middle[key] >= asked[key] * limit[key],
        )
        for key, text in (("up", "host -> HBM"), ("down", "HBM -> host"), ("both", "both at once"))
    ]
    return [
        *rows,
        Row(f"one borrow of {pages} pages, host -> HBM", middle["one"], limit["up"], "GB/s (as above)", "", True),
    ]


def borrows(directory: Path) -> list[Row]:
    say("borrow of a page in HBM, and of one in host memory")
    with daemon(directory, *SETTINGS, first=gpu("1GiB")) as running:
        space = Client(running.endpoint, device=0).namespace(PAGE, model="bench", cap_tokens=16)
        hbm, host = space.keys([1] * 64), space.keys([2] * 64)
        store(space, hbm, "hbm")
        store(space, host, "host")
        times: dict[str, list[float]] = {"cuda": [], "host": []}
        for _ in range(10):
            for tier, keys in (("cuda", hbm), ("host", host)):
                for _ in range(200):
                    started = time.perf_counter()
                    lease = space.borrow(keys[:1], tier=tier)
                    times[tier].append(time.perf_counter() - started)
                    lease.release()
    mine, peer = (statistics.median(times[tier]) * 1e6 for tier in ("cuda", "host"))
    return [
        Row("borrow one page in HBM, p50", mine, peer, "us (limit: one in host memory)", "<= 1.1", mine <= 1.1 * peer)
    ]


def second_process(endpoint: str, tokens: int, pipe: Any) -> None:
    """Borrow a prefix that another process wrote; how long the first and a later time took, and the copy's time."""
    client = Client(endpoint, device=0)
    space = client.namespace(LLAMA_70B_TP8, model="llama")
    keys = space.keys([7] * tokens)
    torch.zeros(1, device="cuda")
    results: list[float] = []
    for _ in range(2):
        started = time.perf_counter()
        with space.borrow(keys, tier="cuda") as lease:
            table = lease.table()
            torch.cuda.synchronize()
            results.append(time.perf_counter() - started)
            assert len(table) == tokens // 16
    nbytes = sum(space.spec.page_bytes(span.order) for span in space.schedule.spans(tokens))
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    own = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    own.copy_(host)
    torch.cuda.synchronize()
    started = time.perf_counter()
    own.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    results.append(time.perf_counter() - started)
    pipe.send((results, nbytes))


def prefix(directory: Path) -> list[Row]:
    tokens = 32768
    say(f"a prefix of {tokens} tokens of Llama-3-70B TP8, borrowed by a second process")
    with daemon(directory, *SETTINGS, host="8GiB", first=gpu("4GiB")) as running:
        space = Client(running.endpoint, device=0).namespace(LLAMA_70B_TP8, model="llama")
        store(space, space.keys([7] * tokens), "hbm")
        ours, theirs = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=second_process, args=(running.endpoint, tokens, theirs))
        process.start()
        (first, later, copied), nbytes = ours.recv()
        process.join()
    return [
        Row(
            f"32k prefix ({nbytes / 1e9:.2f} GB), first borrow",
            first * 1e3,
            copied * 1e3,
            "ms (limit: its copy from pinned memory)",
            "",
            True,
        ),
        Row(
            "the same, slabs mapped already", later * 1e3, copied * 1e3, "ms (limit: as above)", "< 10 ms", later < 0.01
        ),
    ]


def disk(directory: Path) -> list[Row]:
    say("SSD -> HBM against a bare O_DIRECT loop")
    pages = 512
    total = pages * PAGE.unit_stride
    found, bare = [], []
    for turn in range(3):
        with daemon(
            directory,
            "tiers.host.slab=256MiB",
            "tiers.ssd.slab=256MiB",
            "tiers.ssd.queue_depth=16",
            host="4GiB",
            ssd="4GiB",
            first=gpu("4GiB"),
        ) as running:
            client = Client(running.endpoint, device=0)
            space = client.namespace(PAGE, model="bench", cap_tokens=16)
            keys = space.keys([turn] * 16 * pages)
            store(space, keys, "hbm")
            wait(client, 2, pages)
            assert space.migrate(keys, "ssd", move=True) == pages
            started = time.perf_counter()
            with space.borrow(keys, tier="cuda", timeout=120) as lease:
                found.append(total / (time.perf_counter() - started) / 1e9)
                assert len(lease) == pages
            space.evict()
        bare.append(bare_disk(directory / "bare", total, PAGE.unit_stride)[1])
        shutil.rmtree(directory / "ssd")
    mine, limit = statistics.median(found), statistics.median(bare)
    return [Row("SSD -> HBM, 2 MiB pages", mine, limit, "GB/s (limit: bare O_DIRECT)", ">= 0.9", mine >= 0.9 * limit)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--directory", help="where the SSD tier's files go (default: a temporary directory)")
    given = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="kvb-", dir=given.directory))
    try:
        limit = limits()
        benches: list[Callable[[], list[Row]]] = [
            lambda: borrows(place),
            lambda: prefix(place),
            lambda: moves(place, limit, PAGE, 2048),
            lambda: moves(place, limit, LLAMA_70B, 800),
            lambda: disk(place),
        ]
        return run(benches, given.json)
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
