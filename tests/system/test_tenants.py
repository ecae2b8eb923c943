"""Users of one daemon: what one cannot see, take or crowd out of another's."""

from __future__ import annotations

import os
import statistics
import time

import pytest

from tests.system.conftest import Daemon, MakeDaemon
from tests.system.pages import UNIT

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")

ALICE, BOB = 12001, 12002


@pytest.fixture
def shared(make: MakeDaemon) -> Daemon:
    """Of root's, with two other users."""
    return make(host="4MiB", ssd="16MiB").start()


def test_another_users_pages_are_as_unknown_ones(shared: Daemon) -> None:
    alice, bob = shared.worker(user=ALICE), shared.worker(user=BOB)
    alice.do("keys = chain(space, 1, 40); put(space, keys)")
    assert alice.do("result = space.lookup(keys)") == 40
    bob.do("keys = chain(space, 1, 40); unknown = [os.urandom(16) for _ in keys]")
    assert bob.do(
        "result = [space.lookup(keys), len(space.borrow(keys)), space.locate(keys), space.prefetch(keys)]"
    ) == [*(0, 0, [], 0)]
    assert bob.do("r = space.reserve(keys); result = list(r.status); r.abort()") == [0] * 40
    assert bob.do("result = space.evict(keys)") == 0
    assert alice.do("result = read(space, keys)") == 40
    times = bob.do(
        "def timed(keys):\n"
        "  at = time.perf_counter(); space.lookup(keys); return time.perf_counter() - at\n"
        "result = [[timed(keys), timed(unknown)] for _ in range(2000)]"
    )
    known, unknown = (statistics.median(column) for column in zip(*times, strict=True))
    assert 0.7 < known / unknown < 1.4, "the time tells what another user asked"


def test_another_users_memory_cannot_be_had(shared: Daemon) -> None:
    alice, bob = shared.worker(user=ALICE), shared.worker(user=BOB)
    slab, lease, reservation = alice.do(
        "keys = chain(space, 1, 8); put(space, keys); lease = space.borrow(keys); r = space.reserve(chain(space, 2, 4))\n"
        "result = [lease[0].handle.slab, lease.id, r.id]"
    )
    for code in (
        f"client.current().mapping({slab})",
        f"client.call('release', wire.Release(wire.pack_u64([{lease}])))",
        f"client.call('commit', wire.Commit({reservation}))",
        f"client.call('abort', wire.Abort({reservation}))",
        "client.evict(namespace=bytes(16))",
    ):
        with pytest.raises(RuntimeError, match=r"SlabError|StaleHandle|InvalidRequest"):
            bob.do(code)
    assert bob.do("put(space, chain(space, 1, 8)); result = client.evict(everything=True)") == 8, "its own alone"
    assert alice.do("result = [wrong(lease, keys), space.lookup(keys)]") == [[], 8]
    assert {session["uid"] for session in bob.do("result = client.sessions()['sessions']")} == {BOB}
    assert [space["tenant"] for space in bob.do("result = client.inventory()['namespaces']")] == [f"uid:{BOB}"]
    tenants = {space["tenant"] for space in shared.client().inventory()["namespaces"]}
    assert tenants == {f"uid:{ALICE}", f"uid:{BOB}"}, "an administrator sees all"


def test_only_administrators_administer(make: MakeDaemon) -> None:
    shared = make(host="4MiB", admins=f"[{ALICE}]").start()
    alice, bob = shared.worker(user=ALICE), shared.worker(user=BOB)
    for verb in ("client.resize('host', '8MiB')", "client.drain('host')", "client.drain()"):
        with pytest.raises(RuntimeError, match=r"AccessDenied.*root, the daemon's user"):
            bob.do(verb)
    assert alice.do("result = client.resize('host', '8MiB').capacity") == 8 << 20


def test_one_may_be_in_the_same_group(make: MakeDaemon) -> None:
    shared = make(host="4MiB", tenants__team__uids=f"[{ALICE}, {BOB}]").start()
    alice, bob = shared.worker(user=ALICE), shared.worker(user=BOB)
    alice.do("keys = chain(space, 1, 40); put(space, keys)")
    assert bob.do("result = read(space, chain(space, 1, 40))") == 40
    assert bob.do("result = client.current().tenant") == "team"


def test_what_is_guaranteed_is_kept(make: MakeDaemon) -> None:
    """Of 64 frames, 8 are Alice's; Bob floods."""
    frames = f"{64 * UNIT}"
    shared = make(
        host=frames,
        slab=str(8 * UNIT),
        tenants__alice__uids=f"[{ALICE}]",
        tenants__alice__guaranteed=f"{{host = {8 * UNIT}}}",
        tenants__bob__uids=f"[{BOB}]",
        tenants__bob__limit=f"{{host = {32 * UNIT}}}",
    ).start()
    alice, bob = shared.worker(user=ALICE), shared.worker(user=BOB)
    alice.do("keys = chain(space, 1, 8); put(space, keys)")
    bob.do("for seed in range(125): put(space, chain(space, seed, 8))")
    assert alice.do("result = read(space, keys)") == 8
    assert bob.do("result = sum(space.lookup(chain(space, seed, 8)) for seed in range(125))") <= 32
    held = bob.do("r = space.reserve_ahead(0, 32, timeout=0.5); result = len(r)")
    assert held == 32, "the limit can be had"
    with pytest.raises(RuntimeError, match="OutOfPages"):
        bob.do("space.reserve_ahead(0, 1, timeout=0.2)")
    carol = shared.space()  # root: neither a guarantee nor a limit
    with carol.reserve_ahead(0, 32, timeout=0.5) as reservation:
        assert len(reservation) == 24, "all but what is Bob's and what Alice is promised"
        assert alice.do("result = read(space, keys)") == 8
        assert alice.do("put(space, chain(space, 2, 8)); result = read(space, chain(space, 2, 8))") == 8


def test_a_guarantee_not_used_yet_is_kept_free(make: MakeDaemon) -> None:
    shared = make(
        host=str(64 * UNIT),
        slab=str(8 * UNIT),
        tenants__alice__uids=f"[{ALICE}]",
        tenants__alice__guaranteed=f"{{host = {8 * UNIT}}}",
    ).start()
    greedy = shared.space()
    held = greedy.reserve_ahead(0, 64, timeout=0.5)
    assert len(held) < 64
    alice = shared.worker(user=ALICE)
    started = time.monotonic()
    assert alice.do("keys = chain(space, 1, 8); put(space, keys); result = read(space, keys)") == 8
    assert time.monotonic() - started < 5
    assert len(held) >= 24
