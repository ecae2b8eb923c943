"""What survives the daemon, and what does not: clean stops, kill -9 between any two steps of the SSD write path."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import DaemonLost, StaleHandle
from tests.system.conftest import Daemon, MakeDaemon, eventually
from tests.system.faulty import EXITED
from tests.system.pages import chain, put, read, read_all


def test_a_clean_stop_keeps_every_page(daemon: Daemon) -> None:
    space = daemon.space()
    chains = [chain(space, seed, 40) for seed in range(20)]
    for keys in chains:
        put(space, keys)
    daemon.stop()
    daemon.start()
    space = daemon.space()
    assert [space.lookup(keys) for keys in chains] == [40] * 20
    assert set(space.locate(chains[0])) == {"ssd"}
    assert read_all(space, chains) == [40] * 20
    assert set(space.locate(chains[0])) == {"host"}


STEPS = ["store", "stored", "synced", "record", "recorded", "erase", "erased"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("nth", [1, 5])
def test_death_between_two_steps_of_the_write_path(make: MakeDaemon, step: str, nth: int) -> None:
    daemon = make(host="1MiB", ssd="2MiB")
    daemon.start([{"point": step, "nth": nth * 8 if step in ("store", "stored") else nth, "do": "exit"}])
    assert daemon.process is not None
    space = daemon.space()
    chains = [chain(space, seed, 36) for seed in range(60)]
    with pytest.raises(DaemonLost):
        for keys in chains:  # more than both tiers hold, so that pages are erased too
            put(space, keys)
        for keys in reversed(chains):
            read(space, keys)
        raise AssertionError(f"step {step} was not reached {nth} times")
    assert daemon.process.wait() == EXITED
    daemon.start()
    space = daemon.space()
    found = [space.lookup(keys) for keys in chains]
    served = read_all(space, chains)  # each page with its own bytes
    assert all(0 <= got <= had for got, had in zip(served, found, strict=True))
    assert f"{daemon.client().stats()['counters']['lost']}" == "0", "an entry pointed at bytes that were not its own"
    for keys in chains[:30]:  # and the tier works on
        put(space, keys)
        assert read(space, keys) == 36


@pytest.mark.alone
def test_twenty_kills_leave_nothing_behind(make: MakeDaemon) -> None:
    daemon = make(host="32MiB", slab="1MiB")
    before = _shared()
    for turn in range(20):
        daemon.start()
        assert daemon.process is not None
        if turn % 5 == 0:
            space = daemon.space()
            put(space, chain(space, turn, 400))
        assert "/dev/shm" not in Path(f"/proc/{daemon.process.pid}/maps").read_text(), "its memory has a name"
        daemon.kill()
        for client in daemon.clients:
            client.close()
        daemon.clients.clear()
    assert not [name for name in os.listdir("/dev/shm") if "kvt" in name]
    eventually(lambda: _shared() - before < 48 << 20, "the memory of the killed daemons (128 MiB) comes back")


def _shared() -> int:
    """Bytes of memfds and the like on this machine."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Shmem:"))


def test_a_fast_restart_is_noticed_and_touches_no_new_lease(daemon: Daemon) -> None:
    old = daemon.space()
    keys = chain(old, 1, 8)
    put(old, keys)
    lease = old.borrow(keys)
    daemon.stop()
    daemon.start()
    new = daemon.space()
    held = new.borrow(keys)
    assert len(held) == 8
    with pytest.raises(DaemonLost):
        old.client.ping()
    lease.release()  # of a daemon that is gone: nothing to do
    with pytest.raises(StaleHandle):
        lease.release()
    assert new.client.stats()["daemon"]["leases"] == 1
    assert old.client.ping() < 1, "the client attaches again by itself"
    assert old.lookup(keys) == 8, "and its namespaces with it"
    held.release()


def test_attaching_again_backs_off(daemon: Daemon) -> None:
    space = daemon.space()
    daemon.kill()
    tries = 0
    started = time.monotonic()
    while time.monotonic() - started < 1.0:
        with pytest.raises(DaemonLost):
            space.client.ping()
        tries += 1
    assert tries > 100, "a lost daemon costs its workers no time"
    assert 2 <= space.client._failures <= 8, space.client._failures
    daemon.start()
    eventually(lambda: _answers(space.client), "the client finds the new daemon")


def _answers(client: Any) -> bool:
    try:
        client.ping()
    except DaemonLost:
        return False
    return True


def test_eviction_reaches_the_disk_and_survives_a_crash(daemon: Daemon) -> None:
    space = daemon.space()
    other = daemon.space("other")
    keys, kept = chain(space, 1, 40), chain(other, 1, 40)
    put(space, keys)
    put(other, kept)
    lease = space.borrow(keys)
    space.client.drain("host", timeout=1)  # what is not leased is on disk now
    assert space.evict() == 40
    assert space.lookup(keys) == 0
    assert not [page for page in lease if bytes(page.view[:16]) not in keys], "a leased page stays readable"
    lease.release()
    daemon.kill()
    daemon.start()
    assert daemon.space().lookup(keys) == 0
    assert daemon.space("other").lookup(kept) == 40


@pytest.mark.parametrize("step", ["record", "recorded", "stored"])
def test_death_during_a_clean_stop(make: MakeDaemon, step: str) -> None:
    daemon = make(ssd="64MiB", tiers__ssd__write_queue=0).start([{"point": step, "nth": 3, "do": "exit"}])
    assert daemon.process is not None
    space = daemon.space()
    chains = [chain(space, seed, 40) for seed in range(40)]
    for keys in chains:
        put(space, keys)  # written by the stop alone, since nothing may wait to be written
    daemon.process.process.terminate()
    assert daemon.process.wait() == EXITED
    daemon.start()
    space = daemon.space()
    served = read_all(space, chains)
    assert sum(served) < 1600
