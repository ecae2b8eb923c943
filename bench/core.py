"""What the core costs, beside its limits, on this machine and in this run.

    python bench/core.py [--json FILE] [--only NAME ...] [--directory DIR]

Every figure is a ratio to a limit measured beside it: a borrow to a bare ZeroMQ and msgpack echo, page writes to
memcpy, the SSD tier to a bare O_DIRECT loop of the same block size and depth.
"""

from __future__ import annotations

import argparse
import functools
import json
import mmap
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgpack
import numpy as np
import zmq

from kvtier import wire
from kvtier_client import AttentionLayout, Client, NamespaceClient
from kvtier_client.local import LocalDaemon

PAGE = AttentionLayout(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16")  # a unit of 2 MiB
TINY = AttentionLayout(layers=1, kv_heads=1, head_dim=64, dtype="float16")  # a unit of 4 KiB
MIB = 1 << 20
DEPTH = 8


class Row:
    """One line of the table: `ratio` of `value` to `limit`, and what is asked of it."""

    def __init__(self, name: str, value: float, limit: float, unit: str, goal: str, met: bool) -> None:
        self.name, self.value, self.limit, self.unit, self.goal, self.met = name, value, limit, unit, goal, met

    @property
    def ratio(self) -> float:
        return self.value / self.limit if self.limit else 0.0

    def __str__(self) -> str:
        limit, ratio = (f"{self.limit:10.2f}", f"{self.ratio:7.2f}") if self.limit else (f"{'':10}", f"{'':7}")
        mark = "" if not self.goal else ("met" if self.met else "NOT MET")
        return f"{self.name:44} {self.value:10.2f} {limit} {ratio}  {self.goal} {mark}  {self.unit}"


def run(benches: Iterable[Callable[[], list[Row]]], file: str | None) -> int:
    """Run them, each row printed when it is measured; exit status 1 if a goal was not met."""
    print(f"{'':44} {'kvtier':>10} {'limit':>10} {'ratio':>7}  goal", flush=True)
    rows: list[Row] = []
    for bench in benches:
        for row in bench():
            rows.append(row)
            print(row, flush=True)
    if file:
        Path(file).write_text(json.dumps([vars(row) | {"ratio": row.ratio} for row in rows], indent=2))
    return 0 if all(row.met for row in rows) else 1


def say(text: str) -> None:
    print(f"  {text} ...", file=sys.stderr, flush=True)


@contextmanager
def daemon(
    directory: Path, *settings: str, host: str = "2GiB", ssd: str | None = None, first: Sequence[str] = ()
) -> Iterator[LocalDaemon]:
    """A private kvtierd with slabs of 64 MiB."""
    running = LocalDaemon(host=host, ssd=ssd, directory=str(directory), settings=settings, first=first)
    try:
        yield running
    finally:
        running.stop()


def fill(space: NamespaceClient, keys: list[bytes], data: np.ndarray) -> float:
    """Reserve, write and commit `keys`; seconds spent writing alone."""
    writing = 0.0
    for start in range(0, len(keys), 64):
        part = keys[: start + 64]
        with space.reserve(part, start=start, timeout=60) as reservation:
            views = [np.frombuffer(page.view, np.uint8) for page in reservation]
            started = time.perf_counter()
            for view in views:
                np.copyto(view, data)
            writing += time.perf_counter() - started
            reservation.commit()
    return writing


def echo(path: str) -> None:
    """A process that answers what it is sent, decoded and encoded again."""
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(path)
    while True:
        identity, data = router.recv_multipart()
        router.send_multipart([identity, msgpack.packb(msgpack.unpackb(data))])


def borrow(directory: Path) -> list[Row]:
    say("borrow of a resident page against a bare echo")
    path = f"ipc://{directory}/echo"
    server = multiprocessing.get_context("spawn").Process(target=echo, args=(path,), daemon=True)
    server.start()
    dealer = zmq.Context().socket(zmq.DEALER)
    dealer.connect(path)
    message = [1, 1, "borrow", 5.0, [b"k" * 16, "any"]]
    with daemon(directory) as running:
        space = running.client().namespace(TINY, model="bench")
        keys = space.keys(range(16 * 16))
        fill(space, keys, np.zeros(4096, np.uint8))
        one = keys[:1]
        times: dict[str, list[float]] = {"echo": [], "borrow": [], "release": []}
        for _ in range(200):
            dealer.send(msgpack.packb(message))
            dealer.recv()
            space.borrow(one).release()
        for _ in range(20):  # turn about, so that both see the same machine
            for _ in range(200):
                started = time.perf_counter()
                dealer.send(msgpack.packb(message))
                msgpack.unpackb(dealer.recv())
                times["echo"].append(time.perf_counter() - started)
            for _ in range(200):
                started = time.perf_counter()
                lease = space.borrow(one)
                middle = time.perf_counter()
                lease.release()
                times["borrow"].append(middle - started)
                times["release"].append(time.perf_counter() - middle)
    server.kill()
    bare, mine, back = (statistics.median(times[name]) * 1e6 for name in ("echo", "borrow", "release"))
    return [
        Row("borrow one resident page, p50", mine, bare, "us", "<= 1.5x echo", mine <= 1.5 * bare),
        Row("release, p50", back, bare, "us", "", True),
    ]


def lookup(directory: Path) -> list[Row]:
    say("lookups of single keys and of chains of 1,000")
    with daemon(directory) as running:
        space = running.client().namespace(TINY, model="bench", cap_tokens=16)
        keys = space.keys(range(16 * 1000))
        fill(space, keys, np.zeros(4096, np.uint8))

        def rate(look: Callable[[], int], rounds: int, found: int) -> float:
            """Keys a second, after two to begin with."""
            assert (look(), look()) == (found, found)
            started = time.perf_counter()
            for _ in range(rounds):
                look()
            return rounds * found / (time.perf_counter() - started)

        table = dict.fromkeys(keys)

        def loop() -> int:
            for number, key in enumerate(keys):
                if key not in table:
                    return number
            return len(keys)

        one, request = keys[:1], wire.Lookup(b"".join(keys))
        single = rate(lambda: space.lookup(one), 100_000, 1) / 1e3
        trip = rate(lambda: space.client.call("lookup", wire.Lookup(one[0]), wire.Found).pages, 5000, 1) / 1e3
        many = rate(lambda: space.lookup(keys), 5000, 1000) / 1e6
        asked = rate(lambda: space.client.call("lookup", request, wire.Found).pages, 2000, 1000) / 1e6
        limit = rate(loop, 2000, 1000) / 1e6
    return [
        Row("lookups of one key", single, trip, "k/s (limit: a round trip each)", ">= 100", single >= 100),
        Row("lookups of chains of 1,000 keys", many, limit, "M keys/s (limit: loop over a dict)", ">= 3", many >= 3),
        Row("the same, asked of the daemon", asked, limit, "M keys/s", ">= 3", asked >= 3),
    ]


def memory(directory: Path) -> list[Row]:
    say("writing and reading pages of 2 MiB in host memory")
    pages = 256
    data = np.random.default_rng(1).integers(0, 256, PAGE.unit_stride, np.uint8)
    plain = np.zeros((pages, PAGE.unit_stride), np.uint8)
    plain[:] = 1
    with daemon(directory) as running:
        space = running.client().namespace(PAGE, model="bench", cap_tokens=16)
        best, limit = [], []
        for attempt in range(5):
            started = time.perf_counter()
            for row in plain:
                np.copyto(row, data)
            limit.append(plain.nbytes / (time.perf_counter() - started) / 1e9)
            keys = space.keys([attempt] * 16 * pages)
            best.append(plain.nbytes / fill(space, keys, data) / 1e9)
            started = time.perf_counter()
            with space.borrow(keys) as lease:
                views = [page.view for page in lease]
                reading = time.perf_counter() - started
                assert len(views) == pages and views[7][:64] == data[:64].tobytes()
            del views
            space.evict()
    mine, bare = statistics.median(best), statistics.median(limit)
    return [
        Row("write 2 MiB pages into host frames", mine, bare, "GB/s (limit: memcpy)", ">= 0.9x", mine >= 0.9 * bare),
        Row("read them back: borrow 256 pages, no copy", reading * 1e3, 0, "ms", "", True),
    ]


def bare_disk(path: Path, nbytes: int, block: int) -> tuple[float, float]:
    """GB/s of writing and reading a preallocated file with O_DIRECT from DEPTH threads."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, nbytes)
    buffer = mmap.mmap(-1, block * DEPTH)
    buffer.write(os.urandom(block) * DEPTH)

    def run(move: Callable[[memoryview, int], object]) -> float:
        offsets = iter(range(0, nbytes, block))
        lock = threading.Lock()

        def work(thread: int) -> None:
            view = memoryview(buffer)[thread * block : (thread + 1) * block]
            while True:
                with lock:
                    offset = next(offsets, None)
                if offset is None:
                    return
                move(view, offset)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(DEPTH)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.fdatasync(fd)
        return nbytes / (time.perf_counter() - started) / 1e9

    run(lambda view, offset: os.pwritev(fd, [view], offset))
    written = run(lambda view, offset: os.pwritev(fd, [view], offset))
    read = run(lambda view, offset: os.preadv(fd, [view], offset))
    os.close(fd)
    path.unlink()
    return written, read


def saved(client: Client, pages: int) -> None:
    """Wait until the SSD tier holds so many pages."""
    while client.stats()["tiers"][1]["pages"] < pages:
        time.sleep(0.002)


def disk(directory: Path) -> list[Row]:
    say("the SSD tier against a bare O_DIRECT loop")
    pages = 384
    total = pages * PAGE.unit_stride
    data = np.random.default_rng(1).integers(0, 256, PAGE.unit_stride, np.uint8)
    figures: dict[str, list[float]] = {name: [] for name in ("write", "read", "bare write", "bare read")}
    for attempt in range(3):
        place = directory / f"disk{attempt}"
        place.mkdir()
        with daemon(place, "tiers.ssd.queue_depth=8", "tiers.ssd.slab=64MiB", ssd="2GiB") as running:
            client = running.client()
            space = client.namespace(PAGE, model="bench", cap_tokens=16)
            # slabs of both tiers are made, and the files' blocks written once, before the clock runs; so below
            fill(space, space.keys([1] * 16 * pages), data)
            saved(client, pages)
            space.evict()
            keys = space.keys([2] * 16 * pages)
            started = time.perf_counter()
            fill(space, keys, data)
            saved(client, pages)
            figures["write"].append(total / (time.perf_counter() - started) / 1e9)
            assert space.migrate(keys, "ssd", move=True) == pages
            assert set(space.locate(keys)) == {"ssd"}
            started = time.perf_counter()
            with space.borrow(keys, timeout=120) as lease:
                figures["read"].append(total / (time.perf_counter() - started) / 1e9)
                assert len(lease) == pages
        written, read = bare_disk(place / "bare", total, PAGE.unit_stride)
        figures["bare write"].append(written)
        figures["bare read"].append(read)
        shutil.rmtree(place)
    middle = {name: statistics.median(values) for name, values in figures.items()}
    return [
        Row(
            f"SSD {way}",
            middle[way],
            middle[f"bare {way}"],
            "GB/s (limit: bare O_DIRECT)",
            ">= 0.9x",
            middle[way] >= 0.9 * middle[f"bare {way}"],
        )
        for way in ("write", "read")
    ]


def start(directory: Path) -> list[Row]:
    say("start with 100,000 pages in the index, and memory a page")
    pages = 100_000
    place = directory / "start"
    place.mkdir()
    with daemon(place, ssd="1GiB", host="512MiB") as running:
        client = running.client()
        space = client.namespace(TINY, model="bench", cap_tokens=16)
        empty = resident(running.process.pid)
        started = time.perf_counter()
        for branch in range(10):
            fill(space, space.keys([branch] * 16 * (pages // 10)), np.full(4096, branch, np.uint8))
        saved(client, pages)
        filling = pages / (time.perf_counter() - started)
        wait_for_table(client)
        both = (resident(running.process.pid) - empty) / pages
    begun = time.perf_counter()
    with daemon(place, ssd="1GiB", host="512MiB") as running:
        seconds = time.perf_counter() - begun
        client = running.client()
        held = client.stats()["daemon"]["pages"]
        assert held == pages, held
        wait_for_table(client)
        grown = (resident(running.process.pid) - empty) / pages
        space = client.namespace(TINY, model="bench", cap_tokens=16)
        keys = space.keys([7] * 16 * (pages // 10))
        with space.borrow(keys, timeout=60) as lease:
            assert len(lease) == len(keys) and lease[77].view[5] == 7
    shutil.rmtree(place)
    return [
        Row("start with 100,000 pages", seconds, 0, "s", "<= 3", seconds <= 3),
        Row("pages of 4 KiB through host to SSD", filling / 1e3, 0, "k pages/s", "", True),
        Row("daemon memory a page, on SSD", grown, 0, "bytes", "<= 1024", grown <= 1024),
        Row("daemon memory a page, in host and on SSD", both, 0, "bytes", "", True),
    ]


def wait_for_table(client: Client) -> None:
    """Have the presence table made, as any worker's first lookup does."""
    while client.present([]) is None:
        client.ping()


def resident(pid: int) -> int:
    """Bytes of anonymous memory, which leaves the slabs out, and of presence tables."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    tables = [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if "kvtier-presence" in os.readlink(fd)]
    return int(status["RssAnon"].split()[0]) * 1024 + sum(table.stat().st_blocks * 512 for table in tables)


BENCHES = {"borrow": borrow, "lookup": lookup, "memory": memory, "disk": disk, "start": start}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=list(BENCHES))
    parser.add_argument("--directory", help="where the SSD tier's files go (default: a temporary directory)")
    given = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="kvb-", dir=given.directory))
    try:
        return run([functools.partial(BENCHES[name], place) for name in given.only], given.json)
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
