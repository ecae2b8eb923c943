"""How much there is, who gives way to whom, and that nothing is ever more than it may be."""

from __future__ import annotations

import time
from pathlib import Path

from kvtier_client import NamespaceClient
from tests.system.conftest import MakeDaemon, eventually
from tests.system.pages import UNIT, chain, put, read, wrong


def on_disk(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("slab-*.kv"))


def tier(space: NamespaceClient, number: int = 0) -> dict[str, int]:
    found: dict[str, int] = space.client.stats()["tiers"][number]
    return found


def test_a_commit_is_a_use(make: MakeDaemon) -> None:
    """Fill, read half, commit one, evict some: what was read and what was committed stays."""
    daemon = make(host=str(64 * UNIT), slab=str(8 * UNIT)).start()
    space = daemon.space()
    pages = [chain(space, seed, 1) for seed in range(64)]
    for keys in pages:
        put(space, keys)
    for keys in pages[:32]:
        read(space, keys)
    fresh = [chain(space, seed, 1) for seed in range(100, 116)]
    for keys in fresh:
        put(space, keys)
    assert all(space.lookup(keys) for keys in fresh), "new pages went before old ones"
    assert all(space.lookup(keys) for keys in pages[:32]), "pages in use went before others"
    assert [space.lookup(keys) for keys in pages[32:48]] == [0] * 16


def test_looking_is_no_use(make: MakeDaemon) -> None:
    daemon = make(host=str(32 * UNIT), slab=str(8 * UNIT)).start()
    space = daemon.space()
    pages = [chain(space, seed, 1) for seed in range(32)]
    for keys in pages:
        put(space, keys)
    for _ in range(3):
        for keys in pages[:8]:
            assert space.lookup(keys) and space.locate(keys) == ["host"]
    for seed in range(100, 108):
        put(space, chain(space, seed, 1))
    assert [space.lookup(keys) for keys in pages] == [0] * 8 + [1] * 24


def test_tails_leave_before_heads(make: MakeDaemon) -> None:
    daemon = make(host=str(64 * UNIT), slab=str(8 * UNIT)).start()
    space = daemon.space()
    old, new = chain(space, 1, 32), chain(space, 2, 32)
    put(space, old)
    put(space, new)
    for seed in range(10, 20):
        put(space, chain(space, seed, 1))
    assert space.lookup(old) == 22
    assert space.lookup(new) == 32
    assert read(space, old) == 22


def test_resizing_down_and_up_again(make: MakeDaemon) -> None:
    daemon = make(host="64MiB", slab="4MiB").start()
    space = daemon.space(big=True)
    client = space.client

    def fill(first: int) -> list[list[bytes]]:
        chains = [chain(space, first + seed, 32) for seed in range(32)]  # 2 MiB each
        for keys in chains:
            put(space, keys)
        return chains

    fill(0)
    assert tier(space)["used"] == 64 << 20
    assert client.resize("host", "16MiB", timeout=20).allocated <= 16 << 20
    assert tier(space)["allocated"] <= 16 << 20
    eventually(lambda: shared_memory(daemon.process) <= 17 << 20, "the memory itself is given back")
    assert client.resize("host", "64MiB").capacity == 64 << 20
    chains = fill(1000)
    assert tier(space)["used"] == 64 << 20, "it holds as much as before"
    assert sum(read(space, keys) for keys in chains) == 32 * 32


def shared_memory(process: object) -> int:
    """Of the memfds that the process has mapped."""
    total = 0
    for line in Path(f"/proc/{process.pid}/smaps").read_text().splitlines():  # type: ignore[attr-defined]
        if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
            ours = "memfd:kvtier" in line
        elif line.startswith("Rss:") and ours:
            total += int(line.split()[1]) << 10
    return total


def test_leases_hold_their_slabs_and_no_others(make: MakeDaemon) -> None:
    daemon = make(host="32MiB", slab="2MiB").start()
    space = daemon.space(big=True)
    chains = [chain(space, seed, 32) for seed in range(16)]  # a slab each
    for keys in chains:
        put(space, keys)
    leases = [space.borrow(keys[:1]) for keys in chains[:4]]
    started = time.monotonic()
    shrunk = space.client.resize("host", "2MiB", timeout=1)
    assert time.monotonic() - started < 5
    assert shrunk.allocated == 8 << 20, "four slabs stay while they are leased, the others move"
    for lease, keys in zip(leases, chains, strict=False):
        assert not wrong(lease, keys)
        lease.release()
    eventually(lambda: tier(space)["allocated"] <= 2 << 20, "and go when they are not")


def test_an_idle_session_lets_go_of_slabs(make: MakeDaemon) -> None:
    daemon = make(host="16MiB", slab="2MiB").start()
    space, other = daemon.space(big=True), daemon.space(big=True)
    for seed in range(8):
        keys = chain(space, seed, 32)
        put(space, keys)
        read(other, keys)  # both map every slab
    space.client.resize("host", "2MiB", timeout=0.5)
    other.client.ping()
    space.client.ping()
    eventually(lambda: tier(space)["allocated"] <= 2 << 20, "slabs that both have unmapped are gone")


def test_slabs_follow_what_is_stored(make: MakeDaemon) -> None:
    """Memory full of small pages serves large ones, and small ones again."""
    daemon = make(host="4MiB", slab="256KiB").start()
    space, large = daemon.space(), daemon.space(big=True)
    for turn in range(3):
        for seed in range(40):
            keys = chain(space, 1000 * turn + seed, 32)
            put(space, keys)
            assert read(space, keys) == 32
        for seed in range(4):
            keys = chain(large, 1000 * turn + seed, 32)
            put(large, keys)
            assert read(large, keys) == 32
    assert space.client.stats()["counters"]["reassigned"] > 10
    assert tier(space)["allocated"] <= 4 << 20


def test_a_restart_with_a_tenth_of_the_disk(make: MakeDaemon) -> None:
    daemon = make(host="16MiB", ssd="32MiB", slab="1MiB").start()
    space = daemon.space()
    chains = [chain(space, seed, 32) for seed in range(250)]
    for keys in chains:
        put(space, keys)
    daemon.stop()
    assert on_disk(daemon.ssd) >= 30 << 20
    daemon.settings["tiers.ssd.capacity"] = "3MiB"
    daemon.start()
    assert on_disk(daemon.ssd) <= 3 << 20
    space = daemon.space()
    assert tier(space, 1)["allocated"] <= 3 << 20
    found = [space.lookup(keys) for keys in chains]
    assert sum(found) >= 100, "what fits is kept"
    assert not any(found[:125]), "the youngest of it"
    for keys in chains:
        read(space, keys)
        assert on_disk(daemon.ssd) <= 3 << 20
    put(space, chain(space, 1000, 32))


def test_the_disk_is_never_more_than_it_may_be(make: MakeDaemon) -> None:
    daemon = make(host="1MiB", ssd="2MiB").start()
    space = daemon.space()
    for seed in range(60):
        put(space, chain(space, seed, 40))
        assert on_disk(daemon.ssd) <= 2 << 20
        assert tier(space)["allocated"] <= 1 << 20
    daemon.kill()
    daemon.start()
    assert on_disk(daemon.ssd) <= 2 << 20


def test_pins_outlive_their_session(make: MakeDaemon) -> None:
    daemon = make(host=str(64 * UNIT), slab=str(8 * UNIT)).start()
    space, other = daemon.space(), daemon.space()
    keys = chain(space, 1, 16)
    put(space, keys)
    pinned = space.pin(keys)
    assert pinned.pages == 16
    space.client.close()
    for seed in range(2, 20):
        put(other, chain(other, seed, 32))
    assert read(other, keys) == 16
    assert other.client.unpin(pinned.pin) == 16
    for seed in range(20, 30):
        put(other, chain(other, seed, 32))
    assert other.lookup(keys) == 0


def test_prefetch_brings_pages_before_they_are_asked_for(make: MakeDaemon) -> None:
    daemon = make(ssd="16MiB").start()
    space = daemon.space()
    keys = chain(space, 1, 40)
    put(space, keys)
    daemon.stop()
    daemon.start()
    space = daemon.space()
    assert space.prefetch(keys) == 40
    eventually(lambda: set(space.locate(keys)) == {"host"}, "they are in host memory")
    assert read(space, keys, timeout=0.5) == 40
    assert space.migrate(keys, "ssd", move=True) == 40
    assert set(space.locate(keys)) == {"ssd"}
    assert read(space, keys) == 40


def test_three_tiers_and_back(make: MakeDaemon) -> None:
    """Two disks below host memory: what leaves one goes to the next, and comes back from wherever it is."""
    daemon = make(host="1MiB", ssd="2MiB", tiers__slow__medium="file", tiers__slow__capacity="8MiB")
    daemon.settings["tiers.slow.path"] = daemon.directory / "slow"
    daemon.settings["tiers.slow.slab"] = "256KiB"
    space = daemon.start().space()
    chains = [chain(space, seed, 36) for seed in range(40)]
    for keys in chains:
        put(space, keys)
        eventually(lambda: not any(tier(space, at)["unsaved"] for at in (1, 2)), "all is written")
    found = [space.lookup(keys) for keys in chains]
    assert sum(found) > 1000, "the last tier holds what the others do not"
    assert sum(read(space, keys) for keys in chains) > 1000
    daemon.stop()
    daemon.start()
    space = daemon.space()
    assert sum(read(space, keys) for keys in chains) > 1000
