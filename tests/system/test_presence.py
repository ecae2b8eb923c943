"""Lookups that ask nobody: they tell what is there as soon as a round trip would, and never in the name of a dead daemon."""

from __future__ import annotations

import functools
import os
import resource
import signal
import socket
import threading
import time

import pytest

from kvtier import wire
from kvtier.errors import DaemonLost, ForkedClient, InvalidRequest, SlabError, StaleHandle
from kvtier_client import Client, NamespaceClient
from tests.system.conftest import Daemon, MakeDaemon, eventually
from tests.system.pages import UNIT, chain, put, read

ALICE, BOB = 12001, 12002


def told(space: NamespaceClient) -> NamespaceClient:
    """`space`, whose client has the presence table by now."""
    eventually(lambda: space.lookup([]) == 0 and space.client.present([]) is not None, "there is a presence table")
    return space


def asked(client: Client) -> int:
    """Lookups that the daemon was asked for."""
    number = client.stats()["counters"]["lookups"]
    assert isinstance(number, int)
    return number


def test_what_this_process_commits_and_evicts_it_sees_at_once(daemon: Daemon) -> None:
    space = told(daemon.space())
    before = asked(space.client)
    for seed in range(50):
        keys = chain(space, seed, 3)
        assert space.lookup(keys) == 0
        put(space, keys)
        assert space.lookup(keys) == 3
        assert space.evict(keys[1:]) == 2
        assert space.lookup(keys) == 1
    assert space.evict() == 50
    assert [space.lookup(chain(space, seed, 3)) for seed in range(50)] == [0] * 50
    assert asked(space.client) == before, "and asked nobody"


def test_what_other_processes_do_is_seen_when_they_say_so(daemon: Daemon) -> None:
    space, worker = told(daemon.space()), daemon.worker()
    keys = chain(space, 1, 40)
    for _ in range(5):
        worker.do("keys = chain(space, 1, 40); put(space, keys)")
        assert space.lookup(keys) == 40
        assert worker.do("result = space.evict(keys[7:])") == 33
        assert space.lookup(keys) == 7
        space.evict(keys)
        assert worker.do("result = space.lookup(keys)") == 0


def test_a_table_that_grows_is_had_anew(make: MakeDaemon) -> None:
    daemon = make(host="16MiB").start()
    space, idle = (told(daemon.space(cap_tokens=16)) for _ in range(2))
    writer = daemon.worker()
    writer.do("space = open_space(client, cap_tokens=16)")
    chains = [chain(space, seed, 100) for seed in range(30)]
    views = set()
    for seed, keys in enumerate(chains):
        writer.do(f"put(space, chain(space, {seed}, 100))")
        assert [space.lookup(keys), space.lookup(keys), space.lookup(chains[0])] == [100] * 3
        views.add(space.client.current().presence)
    assert len(views) >= 5, "five doublings from 128 pages to 3,000"
    assert idle.lookup(chains[29]) == 100, "also to who looks for the first time in a long while"
    assert told(idle).lookup(chains[0]) == 100
    assert told(space).evict() > 0
    assert [space.lookup(keys) for keys in chains] == [0] * 30


def test_a_killed_daemon_is_not_answered_for(daemon: Daemon) -> None:
    spaces = [told(daemon.space()) for _ in range(2)]
    space = spaces[0]
    saved, lost = chain(space, 1, 8), chain(space, 2, 8)
    put(space, saved)
    eventually(lambda: daemon.clients[0].stats()["tiers"][1]["pages"] == 8, "the pages are on SSD")
    put(space, lost)
    assert [space.lookup(saved), space.lookup(lost)] == [8, 8]
    daemon.kill()
    times = []
    for each in spaces:
        started = time.perf_counter()
        with pytest.raises(DaemonLost):
            each.lookup(saved)
        times.append(time.perf_counter() - started)
        with pytest.raises(DaemonLost):
            each.lookup(lost)
    assert min(times) < 0.05, "at once"
    daemon.start()
    for each in spaces:
        eventually(functools.partial(answered, each), "attached again")
        assert told(each).lookup(saved) == 8 and each.lookup(lost) in range(9)
        assert each.lookup(lost) == len(each.locate(lost)), "what it says is the new daemon's"
        assert read(each, saved) == 8


def answered(space: NamespaceClient) -> bool:
    try:
        space.lookup([])
    except DaemonLost:
        return False
    return True


def test_a_restart_that_nobody_saw_is_noticed(daemon: Daemon) -> None:
    space = told(daemon.space())
    keys = chain(space, 1, 8)
    put(space, keys)
    daemon.stop()
    daemon.start()
    daemon.client().namespace(space.spec.layout, model="model").evict(keys)
    with pytest.raises(DaemonLost):
        space.lookup(keys)
    eventually(lambda: answered(space), "attached again")
    assert space.lookup(keys) == 0 and told(space).lookup(keys) == 0


def test_a_daemon_that_does_not_get_to_answer_is_not_waited_for(daemon: Daemon) -> None:
    space = told(daemon.space())
    keys = chain(space, 1, 8)
    put(space, keys)
    assert daemon.process is not None
    daemon.process.process.send_signal(signal.SIGSTOP)
    started = time.perf_counter()
    assert space.lookup(keys) == 8
    assert time.perf_counter() - started < 0.5
    daemon.process.process.send_signal(signal.SIGCONT)


def test_a_client_that_wants_no_table_asks(daemon: Daemon) -> None:
    space = daemon.space()
    keys = chain(space, 1, 8)
    put(space, keys)
    for _ in range(3):
        assert space.client.call("lookup", wire.Lookup(b"".join(keys)), wire.Found).pages == 8
    assert space.client.current().presence is None
    assert asked(space.client) == 3


def test_after_close_and_in_a_child_it_is_of_no_use(daemon: Daemon) -> None:
    space = told(daemon.space())
    keys = chain(space, 1, 4)
    put(space, keys)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            space.lookup(keys)
            os.write(writer, b"nothing")
        except Exception as error:  # noqa: BLE001 - its name is what the test is about
            os.write(writer, type(error).__name__.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100).decode() == ForkedClient.__name__
    os.close(reader)
    os.close(writer)
    assert space.lookup(keys) == 4
    space.client.close()
    with pytest.raises(StaleHandle, match="closed"):
        space.lookup(keys)


def test_what_is_no_key_is_said_to_be_none(daemon: Daemon) -> None:
    for space in (daemon.space(), told(daemon.space())):
        with pytest.raises(InvalidRequest, match="16"):
            space.lookup([b"short"])


def test_threads_look_up_while_others_come_and_go(daemon: Daemon) -> None:
    space = told(daemon.space())
    stays = chain(space, 1, 20)
    put(space, stays)
    stop = threading.Event()
    wrong: list[object] = []

    def look() -> None:
        try:
            while not stop.is_set():
                if (found := space.lookup(stays)) != 20:
                    wrong.append(found)
        except Exception as error:  # noqa: BLE001 - seen by the test
            wrong.append(error)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    worker = daemon.worker()
    worker.do(
        "for turn in range(6):\n"
        "  chains = [chain(space, 10 + turn * 10 + seed, 40) for seed in range(8)]\n"
        "  for keys in chains: put(space, keys)\n"
        "  for keys in chains: space.evict(keys)\n"
    )
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_slabs_that_are_wanted_back_are_let_go_of_by_who_only_looks_up(make: MakeDaemon) -> None:
    daemon = make(host=str(64 * UNIT), slab=str(8 * UNIT)).start()
    space, admin = told(daemon.space()), daemon.client()
    keys = chain(space, 1, 32)
    put(space, keys)
    attachment = space.client.current()
    assert len(attachment.slabs) >= 4
    admin.resize("host", 8 * UNIT, timeout=0)
    eventually(lambda: space.lookup(keys) >= 0 and len(attachment.slabs) <= 1, "its mappings are gone")
    eventually(lambda: admin.stats()["tiers"][0]["allocated"] <= 8 * UNIT, "and the daemon's memory with them")


def test_it_cannot_be_written_by_who_reads_it(daemon: Daemon) -> None:
    """Not even by the daemon's own user, who could open the descriptor anew."""
    space = told(daemon.space())
    attachment = space.client.current()
    with attachment.lock:
        answer = attachment._ask(wire.WantPresence(), wire.PresenceIs)
        fd = attachment._fds.pop()
    assert isinstance(answer, wire.PresenceIs)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, bytes(8), 64)
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(again, bytes(8), 64)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(again, 0)
    os.close(again)
    os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_tenants_have_tables_of_their_own(make: MakeDaemon) -> None:
    shared = make(host="4MiB").start()
    alice, bob = shared.worker(user=ALICE), shared.worker(user=BOB)
    alice.do("keys = chain(space, 1, 40); put(space, keys)")
    for worker, held in ((alice, 40), (bob, 0)):
        worker.do(
            "keys = chain(space, 1, 40)\n"
            "while client.present([]) is None: space.lookup([])\n"
            "words = client.current().presence._words"
        )
        assert worker.do("result = client.present(keys)") == held
        assert worker.do("result = sum(word != 0 for word in words)") == held
    with pytest.raises(RuntimeError, match="PermissionError"):
        bob.do(
            "with client.current().lock:\n"
            "  client.current()._ask(wire.WantPresence(), wire.PresenceIs)\n"
            "  fd = client.current()._fds.pop()\n"
            "os.open(f'/proc/self/fd/{fd}', os.O_RDWR)"
        )
    bob.do("put(space, keys[:3])")
    assert [worker.do("result = space.lookup(keys)") for worker in (alice, bob)] == [40, 3]


def descriptors(daemon: Daemon) -> int:
    assert daemon.process is not None
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def test_who_asks_and_never_reads_loses_its_session_and_nothing_else(daemon: Daemon) -> None:
    space = told(daemon.space())
    before = descriptors(daemon)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(daemon.runtime / "attach.sock"))
        peer.sendall(wire.encode_attach(wire.Hello(wire.VERSION)))
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            for number in range(100_000):
                peer.sendall(wire.encode_attach(wire.WantPresence()))
                assert number % 1000 or descriptors(daemon) < before + 100
    assert space.client.ping() < 5
    eventually(lambda: descriptors(daemon) <= before, "all descriptors are closed")


def test_a_daemon_without_descriptors_lives_and_is_asked(daemon: Daemon) -> None:
    space, other = daemon.space(), daemon.space("other")
    keys = chain(space, 1, 300)
    assert daemon.process is not None
    most = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
    reservation = space.reserve(keys)
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (12, most[1]))  # no more than there are
    with pytest.raises(SlabError, match="cannot be given: Too many open files"):
        reservation.pages[0].view  # noqa: B018 - it cannot be mapped
    for _ in range(3):
        assert other.lookup(chain(other, 1, 3)) == 0
        assert other.client.present([]) is None
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, most)
    reservation.abort()
    for each in (space, other):
        put(each, chain(each, 1, 3))
        assert each.lookup(chain(each, 1, 3)) == 3
