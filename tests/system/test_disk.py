"""A disk that errs, lies, fills up, crawls or hangs: misses, numbers and log lines; never wrong bytes, never a stop."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import OutOfPages
from kvtier.keys import Namespace
from kvtier.keys import chain as keys_of
from kvtier_client import NamespaceClient
from tests.system.conftest import MakeDaemon, eventually
from tests.system.pages import LAYOUT, UNIT, chain, put, read, wrong


def counters(space: NamespaceClient) -> Any:
    return space.client.stats()["counters"]


def saved(space: NamespaceClient) -> bool:
    """Whether nothing waits to be written."""
    tiers = space.client.stats()["tiers"]
    return not any(tier["unsaved"] or tier["filling_bytes"] for tier in tiers)


@pytest.fixture
def keys() -> list[bytes]:
    return keys_of(Namespace(layout=LAYOUT, model="model"), range(700))


def test_a_failed_write_publishes_nothing(make: MakeDaemon, keys: list[bytes]) -> None:
    # The second fault counts what the first lets pass: nine, and then the second try, for which the second use, below, is
    # the occasion.
    daemon = make(ssd="64MiB").start([{"point": "stored", "nth": nth, "do": "fail"} for nth in (2, 10)])
    space = daemon.space()

    def written() -> list[tuple[int, int]]:
        moves = [move for move in space.client.stats()["moves"] if move["to"] == "ssd"]
        return [(move["pages"], move["failed"]) for move in moves]

    put(space, keys[:10])
    eventually(lambda: saved(space), "all is written that can be")
    assert written() == [(9, 1)]
    assert read(space, keys[:10]) == 10, "host memory has it"
    eventually(lambda: written() == [(9, 2)], "it is tried again")
    daemon.kill()
    daemon.start()
    space = daemon.space()
    found = space.lookup(keys[:10])
    assert found < 10, "what was not written is not found"
    assert read(space, keys) == found
    put(space, keys)  # and can be written again
    daemon.stop()
    daemon.start()
    assert read(daemon.space(), keys) == len(keys)


@pytest.mark.parametrize("fault", ["fail", "flip", "cut", "swap"])
def test_a_page_that_cannot_be_read_is_a_miss(make: MakeDaemon, keys: list[bytes], fault: str) -> None:
    daemon = make(ssd="64MiB")
    bad = 5
    put(daemon.start().space(), keys)
    daemon.stop()
    offset = damage(daemon.ssd, keys, bad, fault)
    daemon.start([{"point": "load", "offset": offset, "do": "fail", "lasting": True}] if fault == "fail" else [])
    space = daemon.space()
    first = read(space, keys)
    assert first <= bad
    if fault != "cut":  # a short file is seen at the start
        assert first == bad
        assert counters(space)["lost"] == 1
        assert {"fail": "Input/output error"}.get(fault, "checksum") in daemon.log
    assert space.lookup(keys) == first, "it is gone, and what follows it"
    put(space, keys)
    assert read(space, keys) == len(keys), "it can be written again"


def damage(directory: Path, keys: list[bytes], bad: int, fault: str) -> int:
    """Do `fault` to page `bad` on disk; its offset in its slab."""
    for path in directory.glob("slab-*.kv"):
        data = path.read_bytes()
        at = data.find(keys[bad] * 4)
        if at < 0:
            continue
        with path.open("r+b") as file:
            if fault == "flip":
                file.seek(at + UNIT - 1)
                file.write(bytes([data[at + UNIT - 1] ^ 1]))
            elif fault == "cut":
                file.truncate(at + 512)
            elif fault == "swap":  # a whole page, but another's
                other = data.find(keys[bad + 1] * 4)
                file.seek(at)
                file.write(data[other : other + UNIT])
        return at
    raise AssertionError("the page is not on disk")


@pytest.mark.parametrize("point", ["grow", "store"])
def test_a_full_disk_takes_no_page_and_stops_nobody(make: MakeDaemon, point: str) -> None:
    daemon = make(host="1MiB", ssd="64MiB").start([{"point": point, "do": "fail", "errno": 28, "lasting": True}])
    space = daemon.space()
    started = time.monotonic()
    for seed in range(40):  # many times what host memory holds
        keys = chain(space, seed, 40)
        put(space, keys, timeout=5)
        assert read(space, keys) == 40
    assert time.monotonic() - started < 25
    assert "No space left" in daemon.log
    if point == "grow":
        assert counters(space)["grow_failures"] >= 1
    assert counters(space)["out_of_pages"] == 0


@pytest.mark.parametrize("point", ["record", "erase"])
def test_an_index_that_cannot_be_written_stops_nobody(make: MakeDaemon, point: str) -> None:
    daemon = make(host="1MiB", ssd="2MiB").start([{"point": point, "nth": 3, "do": "fail", "lasting": True}])
    space = daemon.space()
    for seed in range(80):
        keys = chain(space, seed, 40)
        put(space, keys, timeout=5)
        assert read(space, keys) == 40
    assert "the index could not be written" in daemon.log
    daemon.kill()
    daemon.start()
    space = daemon.space()
    for seed in range(80):
        read(space, chain(space, seed, 40))


def test_a_hung_read_costs_the_pages_behind_it_and_no_more(make: MakeDaemon, keys: list[bytes], place: Path) -> None:
    daemon = make(ssd="64MiB")
    put(daemon.start().space(), keys)
    daemon.stop()
    offset = damage(daemon.ssd, keys, 4, "none")
    go_on = place / "go-on"
    daemon.start([{"point": "load", "offset": offset, "do": "hang", "until": str(go_on), "lasting": True}])
    space, other = daemon.space(), daemon.space("other")
    mine = chain(other, 1, 10)
    put(other, mine)
    quiet = slowest(other, mine)
    took: list[float] = []
    lengths: list[int] = []

    def wait() -> None:
        started = time.monotonic()
        with space.borrow(keys[:10], timeout=0.5) as lease:
            took.append(time.monotonic() - started)
            lengths.append(len(lease))
            assert not wrong(lease, keys)

    thread = threading.Thread(target=wait)
    thread.start()
    while thread.is_alive():
        loud = slowest(other, mine)
    thread.join()
    assert lengths == [4]
    assert 0.45 < took[0] < 2.0
    assert loud < max(10 * quiet, 0.25), "someone else waited too"
    go_on.touch()
    assert read(space, keys[:10]) == 10


def slowest(space: NamespaceClient, keys: list[bytes]) -> float:
    """The 99th of 100 borrows."""
    times = []
    for _ in range(100):
        started = time.monotonic()
        space.borrow(keys).release()
        times.append(time.monotonic() - started)
    return sorted(times)[98]


def test_a_hung_disk_stops_no_host_memory(make: MakeDaemon, place: Path) -> None:
    go_on = place / "go-on"
    hang = {"point": "store", "do": "hang", "until": str(go_on), "lasting": True}
    daemon = make(host="2MiB", ssd="64MiB").start([hang])
    space = daemon.space()
    for seed in range(40):
        keys = chain(space, seed, 40)
        put(space, keys, timeout=10)
        assert read(space, keys) == 40
    assert counters(space)["out_of_pages"] == 0
    go_on.touch()
    eventually(lambda: saved(space), "what is left is written once the disk is back")


def test_a_stuck_disk_does_not_keep_the_daemon_from_stopping(make: MakeDaemon, place: Path) -> None:
    hang = {"point": "store", "do": "hang", "until": str(place / "never"), "lasting": True}
    daemon = make(ssd="64MiB", stop_timeout=1).start([hang])
    space = daemon.space()
    put(space, chain(space, 1, 40))
    started = time.monotonic()
    daemon.stop()
    assert time.monotonic() - started < 8
    assert "unsaved" in daemon.log and "stuck" in daemon.log


def test_a_stop_says_what_it_could_not_save(make: MakeDaemon) -> None:
    daemon = make(ssd="64MiB", tiers__ssd__write_queue=0).start([{"point": "store", "do": "fail", "lasting": True}])
    space = daemon.space()
    put(space, chain(space, 1, 30))
    daemon.stop()
    assert "all pages saved" not in daemon.log
    assert "30 pages unsaved" in daemon.log


def test_a_slow_disk_costs_no_memory_and_no_borrower(make: MakeDaemon) -> None:
    """A disk of 1 MB/s: 16 pages of 64 KiB a second."""
    slow = {"point": "store", "do": "sleep", "seconds": 0.5, "lasting": True}
    daemon = make(host="16MiB", ssd="64MiB", slab="1MiB", tiers__ssd__write_queue="4MiB", stop_timeout=1).start([slow])
    assert daemon.process is not None
    space = daemon.space(big=True)
    hot = chain(space, 9999, 20)
    put(space, hot)
    before, most, started = memory(daemon.process.pid), 0, time.monotonic()
    held = space.borrow(hot)
    times = []
    for seed in range(16):  # 3 MiB each
        put(space, chain(space, seed, 40), timeout=10)
        most = max(most, memory(daemon.process.pid))
        at = time.monotonic()
        assert read(space, hot) == 20
        times.append(time.monotonic() - at)
        assert space.client.stats()["tiers"][1]["unsaved"] <= 4 << 20
    assert time.monotonic() - started < 30
    assert most - before < 40 << 20, "pages that wait to be written are held twice"
    assert max(times) < 1.0
    assert counters(space)["unsaved"] > 0, "what was not written is counted"
    held.release()


def memory(pid: int) -> int:
    """Bytes that the process has of its own and of shared memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) << 10
    raise AssertionError


def test_a_copy_holds_both_ends(make: MakeDaemon, keys: list[bytes]) -> None:
    """Promotions that take their time, and evictions of everything meanwhile."""
    daemon = make(host="1MiB", ssd="4MiB")
    space = daemon.start().space()
    chains = [chain(space, seed, 40) for seed in range(12)]
    for pages in chains:
        put(space, pages)
    daemon.stop()
    daemon.start([{"point": "load", "do": "sleep", "seconds": 0.005, "lasting": True}])
    space = daemon.space()
    stop = threading.Event()

    def storm() -> None:
        mine = daemon.space()
        seed = 100
        while not stop.is_set():
            pages = chain(mine, seed := seed + 1, 40)
            with contextlib.suppress(OutOfPages):
                put(mine, pages, timeout=1)
            mine.evict(chains[seed % 12][20:])
            mine.evict(pages)

    thread = threading.Thread(target=storm)
    thread.start()
    try:
        for pages in chains * 3:
            with contextlib.suppress(OutOfPages):
                read(space, pages, timeout=1)
    finally:
        stop.set()
        thread.join()


def test_eight_readers_of_ten_times_what_memory_holds(make: MakeDaemon) -> None:
    daemon = make(host="1MiB", ssd="32MiB", tiers__ssd__slab="1MiB").start()
    space = daemon.space()
    chains = [chain(space, seed, 40) for seed in range(50)]
    for pages in chains:
        put(space, pages)
    errors: list[BaseException] = []
    pages_read = [0] * 8

    def reader(number: int) -> None:
        mine = daemon.space()
        try:
            for turn in range(50):
                pages = chains[(turn * 7 + number * 13) % 50]
                with contextlib.suppress(OutOfPages):
                    pages_read[number] += read(mine, pages, tier="host", timeout=5)
        except BaseException as error:  # noqa: BLE001 (told by the test's own thread)
            errors.append(error)

    threads = [threading.Thread(target=reader, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert sum(pages_read) > 8 * 50 * 20
