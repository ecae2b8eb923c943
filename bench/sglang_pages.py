"""SGLang's storage interface through kvtierd: GB/s of batches of 128 pages, beside memcpy and SGLang's own file backend.

    .ci/sglang                                                    # puts SGLang where its tests look for it, once
    PYTHONPATH=.:kernels:daemon:client:$(python -m tests.sglang.place) python bench/sglang_pages.py

Pages are those of an 8B model (32 layers, 8 KV heads of 128, bfloat16, 16 tokens: 2 MiB), in SGLang's own host pool, in each
layout. A round stores 128 pages under new keys and loads them to another place of the pool; every byte is compared. The
contenders take turns, and the best round of each counts. memcpy copies the same pieces to and from one block of memory, with
as many threads. The file backend works as SGLang's controller works with it, which copies each page through a tensor; its
files are in /dev/shm, so that no disk slows it. kvtierd has host memory only, for the same reason.
Not here: transfers between the host pool and a GPU, which are SGLang's.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

PAGES = 128
PAGE_TOKENS = 16
LAYERS, HEADS, DIM = 32, 8, 128
PAGE_BYTES = 2 * LAYERS * HEADS * DIM * 2 * PAGE_TOKENS
BATCH = PAGES * PAGE_BYTES
THREADS = 2
Batch = Callable[[list[str], Any], bool]
LAYOUTS = ("page_first", "page_first_direct", "layer_first")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10, help="that count, after two that do not (default: 10)")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    given = parser.parse_args()
    if importlib.util.find_spec("sglang") is None:
        print("skipped: SGLang is not on the path; .ci/sglang installs it, and the head of this file says how to go on")
        return 0
    from tests.sglang.real import stand_in

    stand_in.install()
    print("| layout | who | store GB/s | of memcpy | load GB/s | of memcpy | 128 pages known ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for layout in given.layouts.split(","):
        measure(layout, given.rounds)
    return 0


@dataclass
class Contender:
    """One way to store and load a batch, and what it reached: seconds of each round that counts."""

    who: str
    store: Batch
    load: Batch
    limit: Contender | None = None
    known: Callable[[list[str]], int] | None = None
    clear: Callable[[], object] | None = None
    stored: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)

    def row(self, layout: str) -> str:
        store, load = (BATCH / min(times) / 1e9 for times in (self.stored, self.loaded))
        cells = [layout, self.who, f"{store:.1f}", "", f"{load:.1f}", "", ""]
        if self.limit is not None:
            cells[3] = f"{min(self.limit.stored) / min(self.stored):.2f}"
            cells[5] = f"{min(self.limit.loaded) / min(self.loaded):.2f}"
            cells[6] = f"{min(self.asked) * 1e3:.2f}"
        return f"| {' | '.join(cells)} |"


def measure(layout: str, rounds: int) -> None:
    """All take turns, so that what else the machine does meets them alike."""
    from kvtier_client import local

    pool = host_pool(layout)
    source, target = pool.alloc(PAGES * PAGE_TOKENS), pool.alloc(PAGES * PAGE_TOKENS)
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir="/dev/shm") as place,
        local(host="1GiB") as daemon,
        Copies(1) as one,
        Copies(THREADS) as some,
    ):
        contenders = [Contender("memcpy", *one.ways(pool)), Contender(f"memcpy, {THREADS} threads", *some.ways(pool))]
        backends = [kvtier_backend(pool, daemon.endpoint, threads) for threads in (1, THREADS)]
        for backend, limit, text in zip(backends, contenders[:2], ("1 thread", f"{THREADS} threads"), strict=True):
            contenders.append(Contender(f"kvtier, {text}", *v1(backend), limit, backend.batch_exists, backend.clear))
        files = file_backend(Path(place))
        contenders.append(
            Contender("SGLang's file backend", *generic(files, pool), contenders[0], files.batch_exists, files.clear)
        )
        for turn in range(-2, rounds):
            for contender in contenders:
                play(contender, pool, source, target, turn)
        for backend in backends:
            backend.close()
    for contender in contenders:
        print(contender.row(layout), flush=True)


def play(contender: Contender, pool: Any, source: Any, target: Any, turn: int) -> None:
    import torch

    keys = [f"{turn + 2:032x}{page:032x}" for page in range(PAGES)]
    for at in range(PAGES):
        page_of(pool, source, at).view(torch.int16).fill_((turn + 3) * 131 + at)
        page_of(pool, target, at).zero_()
    started = time.perf_counter()
    assert contender.store(keys, source), "not all was stored"
    between = time.perf_counter()
    assert contender.known is None or contender.known(keys) == PAGES
    asking = time.perf_counter()
    assert contender.load(keys, target), "not all was loaded"
    ended = time.perf_counter()
    for at in range(PAGES):
        assert torch.equal(page_of(pool, source, at).view(torch.int16), page_of(pool, target, at).view(torch.int16))
    if contender.clear is not None:
        contender.clear()
    if turn >= 0:
        contender.stored.append(between - started)
        contender.loaded.append(ended - asking)
        contender.asked.append(asking - between)


class Copies:
    """The limit: the pieces of each page to and from a block of memory, with no one to ask."""

    def __init__(self, threads: int) -> None:
        import torch

        self.block = torch.empty(BATCH, dtype=torch.uint8)
        self.block.fill_(1)
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()

    def ways(self, pool: Any) -> tuple[Batch, Batch]:
        """To the block, and from it."""
        return (
            lambda keys, indices: self._copy(pool, indices, out=False),
            lambda keys, indices: self._copy(pool, indices, out=True),
        )

    def _copy(self, pool: Any, indices: Any, *, out: bool) -> bool:
        addresses, sizes = pool.get_page_buffer_meta(indices)
        base, each = self.block.data_ptr(), len(addresses) // PAGES

        def part(first: int) -> None:
            for page in range(first, PAGES, self.threads):
                at = base + page * PAGE_BYTES
                for address, nbytes in zip(
                    addresses[page * each : (page + 1) * each], sizes[page * each : (page + 1) * each], strict=True
                ):
                    ctypes.memmove(address if out else at, at if out else address, nbytes)
                    at += nbytes

        if self.threads == 1:
            part(0)
        else:
            list(self.pool.map(part, range(self.threads)))
        return True


def host_pool(layout: str) -> Any:
    """SGLang's own, of two batches and a page."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    device = MHATokenToKVPool(
        size=PAGE_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    with host_memory_budget_scope(4 << 30):
        return MHATokenToKVPoolHost(
            device.get_device_pool_infos()[0].buffer_info,
            2 * PAGES,
            0,
            PAGE_TOKENS,
            layout,
            pin_memory=False,
            device_capacity_tokens=PAGE_TOKENS,
            start_layer=0,
            end_layer=LAYERS,
        )


def page_of(pool: Any, indices: Any, at: int) -> Any:
    return pool.get_data_page(int(indices[at * PAGE_TOKENS]), flat=False)


def config(extra: dict[str, Any]) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="bench",
        extra_config=extra,
    )


def kvtier_backend(pool: Any, endpoint: str, threads: int) -> Any:
    from kvtier_client.sglang import KVTierStorage

    extra = {"interface_v1": 1, "kvtier_endpoint": endpoint, "kvtier_copy_threads": threads, "kvtier_timeout": 30.0}
    backend = KVTierStorage(config(extra))
    backend.register_mem_pool_host(pool)
    return backend


def v1(backend: Any) -> tuple[Batch, Batch]:
    return (
        lambda keys, indices: all(backend.batch_set_v1(keys, indices)),
        lambda keys, indices: all(backend.batch_get_v1(keys, indices)),
    )


def file_backend(place: Path) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    return HiCacheFile(config({}), file_path=str(place))


def generic(backend: Any, pool: Any) -> tuple[Batch, Batch]:
    """As SGLang's controller does for backends without the zero-copy interface."""

    def starts(indices: Any) -> Any:
        return indices[::PAGE_TOKENS]

    def store(keys: list[str], indices: Any) -> bool:
        return bool(backend.batch_set(keys, [pool.get_data_page(start) for start in starts(indices)]))

    def load(keys: list[str], indices: Any) -> bool:
        pages = backend.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
        for start, page in zip(starts(indices), pages, strict=True):
            if page is None:
                return False
            pool.set_from_flat_data_page(start, page)
        return True

    return store, load


if __name__ == "__main__":
    sys.exit(main())
