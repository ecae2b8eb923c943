"""The client's side: threads, forks, requests taken back, deadlines, read-only sessions, events, handles that are over."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier import wire
from kvtier.errors import DaemonLost, ForkedClient, InvalidRequest, OutOfPages, SlabError, StaleHandle
from kvtier.memory import Mapping
from kvtier_client import GRANTED, ORPHAN, Client, local
from tests.system.conftest import PATIENCE, ROOT, Daemon, MakeDaemon, eventually
from tests.system.pages import LAYOUT, chain, fill, holds, open_space, put, read, write, wrong


def test_only_whole_pages_are_found(daemon: Daemon) -> None:
    space = daemon.space()
    tokens = list(range(1056))
    put(space, space.keys(tokens))
    assert (space.lookup(space.keys(tokens)), len(space.keys(tokens))) == (48, 48)
    assert space.lookup(space.keys(tokens[:1040])) == 48
    with space.borrow(space.keys(tokens)) as lease:
        assert (len(lease), lease.tokens) == (48, 1024)
    assert space.lookup(space.keys(tokens[:1023])) == 47


def test_eight_threads_with_one_client(daemon: Daemon) -> None:
    space = daemon.space()
    chains = [chain(space, seed, 20) for seed in range(30)]
    errors: list[BaseException] = []

    def hammer(number: int) -> None:
        try:
            for turn in range(60):
                keys = chains[(number * 11 + turn * 7) % 30]
                put(space, keys)
                assert read(space, keys) <= 20
                assert space.lookup(keys) <= 20
                if turn % 20 == 10:
                    space.evict(keys)
                space.submit_borrow(keys).cancel()
        except BaseException as error:  # noqa: BLE001 (told by the test's own thread)
            errors.append(error)

    threads = [threading.Thread(target=hammer, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert space.client.stats()["daemon"]["leases"] == 0
    assert space.client.stats()["daemon"]["reservations"] == 0


def test_a_client_is_of_no_use_in_a_forked_child(daemon: Daemon) -> None:
    worker = daemon.worker()
    code = """
import os
keys = chain(space, 1, 8); put(space, keys); lease = space.borrow(keys)
reader, writer = os.pipe()
if not os.fork():
    said = []
    for use in (client.ping, lambda: space.borrow(keys), lease.release, lambda: space.submit_borrow(keys)):
        try: use(); said.append("nothing")
        except Exception as error: said.append(type(error).__name__)
    client.close()
    from kvtier_client import Client
    with Client(client.directory) as mine:
        said.append(str(read(open_space(mine), keys)))
    os.write(writer, " ".join(said).encode())
    os._exit(0)
os.wait()
result = [os.read(reader, 1000).decode(), client.ping() < 5, wrong(lease, keys)]
lease.release()
"""
    said, answered, bad = worker.do(code)
    assert said == " ".join([ForkedClient.__name__] * 4 + ["8"])
    assert answered and not bad
    assert daemon.client().stats()["daemon"]["leases"] == 0


def test_a_request_taken_back_leaves_nothing(make: MakeDaemon) -> None:
    daemon = make(host="1MiB", ssd="8MiB").start([{"point": "load", "do": "sleep", "seconds": 0.02, "lasting": True}])
    space = daemon.space()
    chains = [chain(space, seed, 40) for seed in range(10)]
    for keys in chains:
        put(space, keys)
    for turn in range(60):
        pending = space.submit_borrow(chains[turn % 10], tier="host", timeout=5)
        if turn % 3:
            time.sleep(0.005 * (turn % 5))
        pending.cancel()
        with pytest.raises(StaleHandle):
            pending.result()
    assert space.client.stats()["daemon"]["leases"] == 0
    eventually(lambda: space.client.stats()["tiers"][0]["leased"] == 0, "nothing is pinned")
    pending = space.submit_borrow(chains[0])
    lease = pending.result()
    assert pending.result() is lease and not wrong(lease, chains[0])
    lease.release()
    pending.cancel()


def test_an_interrupted_call_leaves_nothing(daemon: Daemon) -> None:
    """A signal may come between a request and its answer; what the answer grants must not be lost."""
    worker = daemon.worker()
    code = """
import signal
class Stop(Exception): pass
def stop(*_): raise Stop
signal.signal(signal.SIGALRM, stop)
keys = chain(space, 1, 8); put(space, keys)
stopped = 0
for turn in range(80):
    lease = None
    try:
        signal.setitimer(signal.ITIMER_REAL, 2e-5 + turn % 40 * 1e-5)
        lease = space.borrow(keys)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Stop:
        stopped += 1
    if lease is not None: lease.release()
result = [stopped, client.stats()["daemon"]["leases"]]
"""
    stopped, leases = worker.do(code)
    assert stopped > 5
    assert leases <= stopped // 4, "what an interrupted call was granted is held by nobody"


def test_no_frame_is_said_in_time(make: MakeDaemon) -> None:
    daemon = make(host="1MiB").start()
    space = daemon.space()
    first = space.reserve_ahead(0, 256, timeout=0.5)
    assert 0 < len(first) < 256
    rest = []
    with pytest.raises(OutOfPages):
        while True:
            rest.append(space.reserve_ahead(0, 8, timeout=0.1))
    started = time.monotonic()
    with pytest.raises(OutOfPages, match=r"none of 4 pages of 4\.0 KiB got a frame in tier host.*release leases"):
        space.reserve_ahead(0, 4, timeout=0.2)
    assert 0.15 < time.monotonic() - started < 1.5
    waiting = threading.Thread(target=lambda: rest.append(space.reserve_ahead(0, 4, timeout=10)))
    waiting.start()
    first.abort()
    waiting.join(PATIENCE)
    assert not waiting.is_alive() and len(rest[-1]) == 4
    assert space.client.stats()["counters"]["out_of_pages"] >= 2


def test_all_leased_is_said_in_time(make: MakeDaemon) -> None:
    daemon = make(host="1MiB", ssd="16MiB").start()
    space = daemon.space()
    leases = []
    for seed in range(20):
        try:
            put(space, chain(space, seed, 30), timeout=0.2)
        except OutOfPages:
            break
        leases.append(space.borrow(chain(space, seed, 30)))
    with pytest.raises(OutOfPages):
        put(space, chain(space, 99, 30), timeout=0.2)
    while len(leases) > 6:
        leases.pop().release()
    put(space, chain(space, 98, 30), timeout=10)
    for number, lease in enumerate(leases):
        assert not wrong(lease, chain(space, number, 30))


def test_a_handle_that_is_over_shows_nothing(daemon: Daemon) -> None:
    space = daemon.space()
    keys = chain(space, 1, 8)
    reservation = space.reserve(keys)
    page = reservation[0]
    write(reservation, keys)
    reservation.commit()
    lease = space.borrow(keys)
    borrowed = lease[3]
    assert holds(borrowed.view, keys[3])
    lease.release()
    for use in (
        *(lambda: page.view, lambda: borrowed.view, lambda: borrowed.numpy(), lambda: borrowed.address),
        *(lambda: borrowed.unit_addresses(), lease.release, lambda: reservation.commit([0])),
    ):
        with pytest.raises(StaleHandle):
            use()
    assert reservation.commit() == b"", "nothing is left to commit"


def test_frames_change_hands_and_handles_do_not(make: MakeDaemon) -> None:
    daemon = make(host="1MiB", ssd="16MiB").start()
    space = daemon.space()
    chains = [chain(space, seed, 36) for seed in range(20)]
    put(space, chains[0])
    with space.borrow(chains[0]) as lease:
        before = list(lease.handles)
    for keys in chains[1:]:
        put(space, keys)
    with space.borrow(chains[0], tier="host") as lease:
        assert not wrong(lease, chains[0]), "it came back, maybe elsewhere"
        assert not set(before) & set(lease.handles), "another stay has another generation"


def test_pages_reserved_without_keys_get_those_of_their_slots(daemon: Daemon) -> None:
    space = daemon.space()
    keys = chain(space, 1, 6)
    with space.reserve_ahead(0, 6) as reservation:
        for page, key in zip(reservation, keys, strict=True):
            fill(page.view, key)
        with pytest.raises(InvalidRequest):
            reservation.commit([4], keys=[keys[4]])  # before page 3 has its key
        with pytest.raises(InvalidRequest):
            reservation.commit([0, 1], keys=[keys[0]])
        assert list(reservation.commit([1, 0, 2], keys=[keys[1], keys[0], keys[2]])) == [0, 0, 0]
        with pytest.raises(StaleHandle):
            reservation.commit([2], keys=[keys[2]])
        assert read(space, keys) == 3
        status, lease = reservation.commit_and_lease([5, 3, 4], keys=[keys[5], keys[3], keys[4]])
        assert list(status) == [0, 0, 0]
        assert not [at for at, page in enumerate(lease) if not holds(page.view, keys[3 + at])]
        lease.release()
    assert read(space, keys) == 6


def test_pages_reserved_before_the_page_before_them_is_complete(daemon: Daemon) -> None:
    space = daemon.space()
    keys = chain(space, 1, 6)
    with space.reserve_ahead(0, 3) as first, space.reserve_ahead(3, 3) as then:
        for page, key in zip([*first, *then], keys, strict=True):
            fill(page.view, key)
        first.commit(keys=keys[:3])
        with pytest.raises(InvalidRequest, match="as its parent"):
            then.commit([0], keys=[keys[3]])
        assert list(then.commit([0, 1], keys=keys[3:5], parent=keys[2])) == [0, 0]
        assert list(then.commit([2], keys=keys[5:])) == [0], "the page before it is of the same reservation"
    assert read(space, keys) == 6


def test_a_page_whose_prefix_went_stays_readable_for_its_writer(daemon: Daemon) -> None:
    space = daemon.space()
    keys = chain(space, 1, 2)
    put(space, keys[:1])
    with space.reserve(keys, start=1) as reservation:
        fill(reservation[0].view, keys[1])
        space.evict(keys[:1])
        status, lease = reservation.commit_and_lease()
        assert list(status) == [ORPHAN] and not lease
        put(space, chain(space, 2, 40))  # whoever takes frames now gets others
        assert holds(reservation[0].view, keys[1])
        put(space, keys[:1])
        assert list(reservation.commit()) == [GRANTED], "and it can be published when its prefix is back"


def test_what_is_held_stays_mapped_when_the_daemon_is_lost_and_no_longer(daemon: Daemon) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("kvtier")

    space = daemon.space()
    keys = chain(space, 13, 4)
    put(space, keys)
    before = mapped()
    assert before
    lease = space.borrow(keys)
    with lease.attachment.hold():
        addresses = [page.address for page in lease]
        daemon.kill()
        with pytest.raises(DaemonLost):
            space.lookup(keys)
        assert mapped() == before
        for key, address in zip(keys, addresses, strict=True):
            assert ctypes.string_at(address, 16) == key
    assert mapped() < before
    with pytest.raises(DaemonLost), lease.attachment.hold():
        pass


def test_threads_open_namespaces_at_once(daemon: Daemon) -> None:
    client = daemon.client()
    with ThreadPoolExecutor(8) as pool:
        spaces = list(pool.map(lambda n: open_space(client, f"model {n}"), range(64)))
    assert len({space.seed for space in spaces}) == 64


def test_namespaces_without_pages_do_not_add_up(daemon: Daemon) -> None:
    """A salt a user: those that nobody has pages in are closed when they become many, and opened again when they are
    wanted; one that pages are being written in stays."""
    client = daemon.client()
    first, written, kept = (open_space(client, model=name) for name in ("first", "written", "kept"))
    put(kept, chain(kept, 1, 3))
    keys = chain(written, 2, 3)
    with written.reserve(keys) as reservation:
        for number in range(3000):
            open_space(client, salt=str(number))
        assert client.stats()["daemon"]["namespaces"] < 1100
        for key, page in zip(keys, reservation, strict=True):
            fill(page.view, key)
        assert reservation.commit() == bytes([GRANTED] * 3)
    assert read(written, keys) == 3 and read(kept, chain(kept, 1, 3)) == 3
    put(first, chain(first, 3, 3))
    assert read(first, chain(first, 3, 3)) == 3
    assert {space["model"] for space in client.inventory()["namespaces"]} >= {"first", "written", "kept"}


def test_a_namespace_is_opened_after_a_restart_that_nothing_else_has_noticed(daemon: Daemon) -> None:
    client = daemon.client()
    open_space(client)
    daemon.kill()
    daemon.start()
    with pytest.raises(DaemonLost):
        open_space(client, "other")
    eventually(lambda: _opens(client), "the client attaches again")


def _opens(client: Client) -> bool:
    with contextlib.suppress(DaemonLost):
        open_space(client, "other")
        return True
    return False


def test_many_threads_ask_at_once_whether_the_daemon_lives(daemon: Daemon) -> None:
    attachment = daemon.client().current()
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: all(attachment.alive() for _ in range(2000)), range(8)))
    daemon.kill()
    assert not attachment.alive()


def test_pages_in_the_middle_of_a_chain_are_reserved_by_their_own_keys_and_their_parents(daemon: Daemon) -> None:
    space = daemon.space()
    keys = chain(space, 12, 6)
    put(space, keys[:3])
    with space.reserve(keys[3:], start=3, parent=keys[2]) as reservation:
        assert reservation.numbers == [3, 4, 5]
        for number, page in zip(reservation.numbers, reservation.pages, strict=True):
            fill(page.view, keys[number])
        assert reservation.commit() == bytes([GRANTED] * 3)
    assert read(space, keys) == 6


def test_pages_of_one_size_need_not_know_their_numbers(daemon: Daemon) -> None:
    space, other = daemon.space(cap_tokens=16), daemon.space()
    keys, sized = chain(space, 1, 40), chain(other, 1, 40)
    put(space, keys[:20])
    put(other, sized[:20])
    for pages, own, expected in ((space, keys, GRANTED), (other, sized, ORPHAN)):
        with pages.reserve(own[20:], start=1, parent=own[19]) as reservation:
            for page, key in zip(reservation, own[20:], strict=True):
                fill(page.view, key)
            assert set(reservation.commit()) == {expected}
    assert read(space, keys) == 40
    assert read(other, sized) == 20
    (listed,) = [one for one in space.client.inventory()["namespaces"] if one["digest"] == space.seed.hex()]
    assert listed["pages"] == 40
    numbers = [page["number"] for page in space.client.inventory(space.seed)["pages"]]
    assert sorted(numbers) == list(range(40))


def test_a_page_follows_the_page_before_it(daemon: Daemon) -> None:
    space, other = daemon.space(), daemon.space("other")
    keys, foreign = chain(space, 1, 6), chain(other, 1, 6)
    put(space, keys)
    put(other, foreign)
    for parent, first in ((keys[2], 7), (foreign[5], 6)):
        with space.reserve_ahead(first, 1, parent) as reservation:
            assert list(reservation.commit(keys=[os.urandom(16)])) == [3]
    with pytest.raises(InvalidRequest):
        space.reserve_ahead(3, 1, space.seed)


def test_a_session_that_only_reads(daemon: Daemon) -> None:
    space = daemon.space()
    keys = chain(space, 1, 8)
    put(space, keys)
    client = daemon.client(read_only=True)
    mine = client.namespace(space.spec.layout, model="model")
    assert read(mine, keys) == 8
    with mine.borrow(keys) as lease:
        assert not wrong(lease, keys)
        with pytest.raises(TypeError):
            lease[0].view[0:1] = b"x"
        with pytest.raises(ValueError, match="read-only"):
            lease[0].numpy()[:] = 1
        attachment = client.current()
        with attachment.lock:
            attachment._ask(wire.WantSlab(lease[0].handle.slab), wire.SlabIs)
            fd = attachment._fds.pop()
        with pytest.raises(SlabError):
            Mapping(fd, 4096, writable=True)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
        os.close(fd)
    for verb in (lambda: mine.reserve(chain(mine, 2, 4)), mine.evict):
        with pytest.raises(Exception, match="read-only"):
            verb()


def test_events_tell_of_pages_that_come_and_go(daemon: Daemon) -> None:
    space = daemon.space()
    keys = chain(space, 1, 5)
    events = daemon.client().events(timeout=2)
    heard: list[tuple[str, bytes, int, bytes]] = []
    thread = threading.Thread(target=lambda: heard.extend(events))
    thread.start()
    eventually(
        lambda: any(session["requests"] == 1 for session in space.client.sessions()["sessions"]), "it has subscribed"
    )
    put(space, keys)
    space.evict(keys[3:])
    thread.join(PATIENCE)
    assert heard[:5] == [("stored", space.seed, number, keys[number]) for number in range(5)]
    assert sorted(heard[5:]) == [("removed", space.seed, number, keys[number]) for number in (3, 4)]


def test_events_end_with_the_daemon(daemon: Daemon) -> None:
    events = daemon.client().events()
    killer = threading.Timer(0.3, daemon.kill)
    killer.start()
    with pytest.raises(DaemonLost):
        list(events)
    killer.join()


def test_one_shot_traffic_is_cheap(make: MakeDaemon) -> None:
    daemon = make(host="64MiB", ssd="64MiB", tiers__ssd__admission='"second-use"').start()
    space = daemon.space()
    client = space.client
    before = client.sessions()["sessions"][0]["requests"]
    for seed in range(10_000):
        assert space.lookup(chain(space, 10 + seed, 2)) == 0
    assert client.sessions()["sessions"][0]["requests"] - before < 500, "next to no round trips"
    for seed in range(300):
        put(space, chain(space, 10 + seed, 4))
    assert not [move for move in client.stats()["moves"] if move["to"] == "ssd"], "nothing is written for nothing"
    read(space, chain(space, 10, 4))
    eventually(lambda: client.stats()["tiers"][1]["pages"] == 4, "the second use is")


def test_a_local_daemon_is_taken_down(place: Path) -> None:
    with local(host="32MiB", ssd="32MiB", directory=str(place / "l")) as daemon:
        space = daemon.client().namespace(LAYOUT, model="m")
        keys = chain(space, 1, 10)
        put(space, keys)
    assert daemon.process.poll() == 0
    with pytest.raises(DaemonLost):
        space.client.ping()
    with local(host="32MiB", ssd="32MiB", directory=str(place / "l")) as daemon:
        assert read(daemon.client().namespace(LAYOUT, model="m"), keys) == 10
    assert not Path(daemon.endpoint, "attach.sock").exists()


def test_a_program_that_forgets_everything_ends_cleanly(daemon: Daemon) -> None:
    code = f"""
import sys
from kvtier_client import Client
from tests.system.pages import *
client = Client({daemon.endpoint!r})
space = open_space(client)
keys = chain(space, 1, 8)
put(space, keys)
lease, reservation, pending = space.borrow(keys), space.reserve(chain(space, 2, 8)), space.submit_borrow(keys)
array = lease[0].numpy()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([".", "daemon", "client", "kernels"])},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    client = daemon.client()
    eventually(lambda: client.stats()["daemon"]["sessions"] == 1, "its session is over")
    assert client.stats()["tiers"][0]["reserved_bytes"] == 0


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next(make: MakeDaemon) -> None:
    """The daemon stands still while a slab is asked for; what it says later must not be mapped as another slab."""
    daemon = make(host="4MiB", slab="256KiB").start()
    writer = daemon.space()
    chains = [chain(writer, seed, 32) for seed in range(8)]
    for keys in chains:
        put(writer, keys)  # a slab for every two of them
    space = daemon.space()
    leases = [space.borrow(keys) for keys in chains]
    attachment = space.client.current()
    attachment.connection.settimeout(0.2)
    assert daemon.process is not None
    os.kill(daemon.process.pid, signal.SIGSTOP)
    for lease in leases[:3]:
        with pytest.raises(DaemonLost):
            _ = lease[0].view
    os.kill(daemon.process.pid, signal.SIGCONT)
    for number, lease in enumerate(leases):
        try:
            assert not wrong(lease, chains[number])
        except DaemonLost:
            continue

    def attached_again() -> bool:
        with contextlib.suppress(DaemonLost):
            space.client.ping()
        return space.client.current() is not attachment

    eventually(attached_again, "the client gives the attachment up")
    assert [read(space, keys) for keys in chains] == [32] * 8


def test_no_daemon_is_said_with_what_to_do(place: Path) -> None:
    with pytest.raises(DaemonLost, match="start one, or set KVTIER_ENDPOINT"):
        Client(place / "nowhere")


def test_a_client_may_be_made_before_its_daemon(make: MakeDaemon) -> None:
    daemon = make(host="4MiB")
    client = daemon.client(attach=False)
    with pytest.raises(DaemonLost, match="no kvtierd answers"):
        client.ping()
    with pytest.raises(DaemonLost, match="the next attempt to attach is in"):
        client.ping()
    with pytest.raises(DaemonLost):
        open_space(client)
    daemon.start()
    eventually(lambda: _lives(client), "attached, as after a loss", within=6)
    space = open_space(client)
    put(space, keys := chain(space, 1, 4))
    assert space.lookup(keys) == 4
    client.close()
    with pytest.raises(StaleHandle, match="closed"):
        client.ping()
    Client(daemon.endpoint, attach=False).close()  # nothing to end


def test_an_endpoint_is_found_when_it_is_attached_to(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that was found stays the one, whatever the environment says later."""
    client = Client(attach=False)
    with local(host="32MiB", ssd="32MiB", directory=str(place / "l")) as daemon:
        monkeypatch.setenv("KVTIER_ENDPOINT", daemon.endpoint)
        assert client.ping() < 5 and str(client.directory) == daemon.endpoint
        monkeypatch.setenv("KVTIER_ENDPOINT", str(place / "nowhere"))
        client.lost(client.current())
        assert client.ping() < 5
        client.close()


def _lives(client: Client) -> bool:
    try:
        client.ping()
    except DaemonLost:
        return False
    return True
