"""Workers that die, hang, fork or let go without a word: what they held comes back, and no earlier than it may."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from kvtier import wire
from kvtier_client import Client
from tests.system.conftest import Daemon, MakeDaemon, eventually
from tests.system.pages import LAYOUT, chain, put, read, write


def held(client: Client, what: str) -> Any:
    return client.stats()["daemon"][what]


def nothing_held(client: Client) -> bool:
    stats = client.stats()
    tier = stats["tiers"][0]
    return (
        not stats["daemon"]["leases"]
        and not stats["daemon"]["reservations"]
        and not tier["leased"]
        and not tier["reserved_bytes"]
        and not tier["quarantined_bytes"]
        and not tier["filling_bytes"]
    )


MOMENTS = {
    "idle": "",
    "reserved": "r = space.reserve(keys)",
    "writing": "r = space.reserve(keys)\nwhile True: write(r, keys)",
    "committed": "put(space, keys)",
    "committing": "while True:\n with space.reserve(keys) as r:\n  write(r, keys); r.commit()\n space.evict()",
    "leased": "put(space, keys); lease = space.borrow(keys)",
    "borrowing": "put(space, keys)\nwhile True:\n with space.borrow(keys): pass",
    "waiting": "r = space.reserve(keys)\nwhile len(r): r = space.reserve_ahead(0, 60, timeout=60)",
    "leased and reserved": "put(space, keys[:8]); lease = space.borrow(keys); r = space.reserve(keys, start=8)",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_death_at_any_moment_gives_everything_back(make: MakeDaemon, moment: str) -> None:
    daemon = make(host="1MiB").start()
    client = daemon.client()
    before = client.stats()["tiers"][0]
    worker = daemon.worker()
    worker.do("keys = chain(space, 1, 40)")
    worker.tell(MOMENTS[moment])
    if "while" in MOMENTS[moment]:
        time.sleep(0.2)  # any moment will do
    else:
        worker.heard()
    worker.kill()
    eventually(lambda: nothing_held(client), "what a dead worker held is free", within=1.0)
    assert held(client, "sessions") == 1
    space = daemon.space("another")
    keys = chain(space, 2, 40)
    put(space, keys)  # its frames are of use again
    assert read(space, keys) == 40
    assert client.stats()["tiers"][0]["capacity"] == before["capacity"]


def test_a_child_that_outlives_its_parent_keeps_nothing(daemon: Daemon) -> None:
    client = daemon.client()
    worker = daemon.worker()
    worker.do("keys = chain(space, 1, 40); put(space, keys); lease = space.borrow(keys)")
    worker.do("r = space.reserve(chain(space, 2, 8))")
    child = worker.do(
        "result = os.fork()\nif not result:\n time.sleep(60)\n os._exit(0)",
    )
    try:
        assert held(client, "leases") == 1
        worker.kill()
        eventually(lambda: nothing_held(client), "leases are back though a child holds the socket", within=1.0)
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_silence_is_not_death(daemon: Daemon) -> None:
    client = daemon.client()
    worker = daemon.worker()
    worker.do("keys = chain(space, 1, 40); put(space, keys); lease = space.borrow(keys)")
    os.kill(worker.pid, signal.SIGSTOP)
    worker.tell("result = [wrong(lease, keys), read(space, keys)]")
    started = time.monotonic()
    while time.monotonic() - started < 4:
        assert held(client, "leases") == 1
        assert held(client, "sessions") == 2
        time.sleep(0.2)
    os.kill(worker.pid, signal.SIGCONT)
    assert worker.heard() == [[], 40]


def test_frames_of_a_writer_that_hung_up_wait_for_its_process(daemon: Daemon) -> None:
    client = daemon.client()
    worker = daemon.worker()
    worker.do("r = space.reserve(chain(space, 1, 20))")
    worker.do("lease = put(space, chain(space, 2, 4)); lease = space.borrow(chain(space, 2, 4))")
    worker.do("client._attachment.connection.close()")
    eventually(lambda: held(client, "sessions") == 1, "the session ends with its socket")
    assert held(client, "leases") == 0
    tier = client.stats()["tiers"][0]
    assert tier["quarantined_bytes"] == 20 * 4096, "its process may write in them still"
    space = daemon.space()
    with space.reserve(chain(space, 1, 20), timeout=1) as reservation:
        assert len(reservation) == 20, "the keys are free, in other frames"
        where = {page.handle[:3] for page in reservation}
        assert len(where) == 20
    worker.kill()
    eventually(lambda: nothing_held(client), "the quarantine ends with the process", within=1.0)


def test_two_writers_of_one_key(daemon: Daemon) -> None:
    space = daemon.space()
    keys = chain(space, 1, 8)
    worker = daemon.worker()
    assert worker.do("keys = chain(space, 1, 8); r = space.reserve(keys); result = list(r.status)") == [0] * 8
    with space.reserve(keys) as second:
        assert list(second.status) == [2] * 8, "busy"
        assert not len(second)
    assert space.lookup(keys) == 0, "what is not committed is not there"
    worker.kill()
    eventually(lambda: nothing_held(space.client), "the first is dead")
    with space.reserve(keys) as second:
        assert list(second.status) == [0] * 8
        write(second, keys)
        assert list(second.commit()) == [0] * 8
    with space.reserve(keys) as third:
        assert list(third.status) == [1] * 8, "exists"
    assert read(space, keys) == 8


def test_a_lease_is_owned_and_ends_once(daemon: Daemon) -> None:
    one, two = daemon.space(), daemon.space()
    keys = chain(one, 1, 8)
    put(one, keys)
    first, second = one.borrow(keys), two.borrow(keys)
    first.release()
    worker = daemon.worker()
    for lease in (first.id, second.id):
        with pytest.raises(RuntimeError, match="StaleHandle"):
            worker.do(f"client.call('release', wire.Release(wire.pack_u64([{lease}])))")
    assert one.evict() == 8  # unlists it; the bytes stay for who holds them
    for number, page in enumerate(second):
        assert bytes(page.view[:16]) == keys[number]
    other = chain(one, 2, 8)
    put(one, other)
    for number, page in enumerate(second):
        assert bytes(page.view[:16]) == keys[number], "a leased frame was reused"
    second.release()
    assert held(one.client, "leases") == 0


def test_attaching_again_and_again_costs_the_daemon_nothing(daemon: Daemon) -> None:
    assert daemon.process is not None
    descriptors = f"/proc/{daemon.process.pid}/fd"
    for turn in range(60):
        client = Client(daemon.endpoint)
        if turn % 3 == 0:
            put(space := client.namespace(LAYOUT, model="m"), chain(space, 1, 3))
        if turn % 3 == 1:
            attachment = client.current()
            attachment._ask(wire.WantProbe(4096), wire.ProbeIs)  # never used
            os.close(attachment._fds.pop())
        if turn % 3 == 2:
            client.current().connection.close()  # no farewell
        else:
            client.close()
        if turn == 9:
            eventually(lambda: len(daemon_sessions(daemon)) == 1, "sessions are gone")
            before = len(os.listdir(descriptors))
    eventually(lambda: len(daemon_sessions(daemon)) == 1, "sessions are gone")
    eventually(lambda: len(os.listdir(descriptors)) <= before + 2, "descriptors are closed", within=5)


def daemon_sessions(daemon: Daemon) -> list[Any]:
    if not daemon.clients:
        daemon.client(name="watcher")
    sessions: list[Any] = daemon.clients[0].sessions()["sessions"]
    return sessions
