"""A long request does not keep the others waiting until all of it is under way."""

from __future__ import annotations

import itertools

from kvtier.wire import Borrowed, Count, unpack_handles
from kvtier_daemon.directory import OpenNamespace
from kvtier_daemon.jobs import Copy, Job
from kvtier_daemon.operations import _TURN, Borrowing, Migrating
from kvtier_daemon.sessions import Session
from kvtier_daemon.store import AT_ONCE
from tests.daemon.world import World

LONG = 2 * _TURN + 100


def _stored(world: World, session: Session, model: str, first: int, count: int) -> tuple[OpenNamespace, list[bytes]]:
    """A namespace of pages of one size, and the keys of so many in the lower tier."""
    space = world.namespace(session, model)
    space.orders = bytes(LONG)
    keys = [number.to_bytes(16) for number in range(first, first + count)]
    world.store_chain(session, space, keys, tier=1)
    return space, keys


def _long(*, slabs: bool = True) -> tuple[World, Session, list[bytes]]:
    """A world, a session of it, and the keys of LONG pages in its lower tier; `slabs`: the upper tier has free ones."""
    world = World(LONG + 512, LONG + 512, persistent=False, slab=256)
    session = world.session()
    space, keys = _stored(world, session, "long", 1, LONG)
    if slabs:
        spare, _ = world.reserve(session, space, [number.to_bytes(16) for number in range(5000, 5000 + LONG + 8)])
        world.settle()
        world.sessions.abandon(session, spare.reservation, spare.reservation.slots)
        world.store.run()
    return world, session, keys


def test_a_long_borrow_and_a_short_one_take_turns() -> None:
    world, session, keys = _long()
    few = _stored(world, session, "short", LONG + 1, 4)[1]
    slow, lent = world.borrow(session, keys)
    assert 0 < len(slow.held) <= 2 * _TURN and world.store.postponed == [slow]
    _, soon = world.borrow(session, few)
    mine = next(at for at, job in enumerate(world.jobs) if isinstance(job, Copy) and job.pages[0].key == few[0])
    while world.store.postponed:
        world.store.run()
    theirs = [at for at, job in enumerate(world.jobs) if isinstance(job, Copy) and job.pages[-1].key == keys[-1]]
    assert theirs and mine < theirs[0], "the short one's copies are not behind all of the long one's"
    world.settle()
    assert isinstance(soon[0], Borrowed) and isinstance(lent[0], Borrowed)
    assert len(unpack_handles(lent[0].handles)) == LONG
    world.store.check()


def test_movers_are_given_the_first_pages_early_and_the_rest_in_few_pieces() -> None:
    world, session, keys = _long()
    given: list[int] = []

    def submit(jobs: list[Job]) -> None:
        given.append(sum(len(job.pages) for job in jobs if isinstance(job, Copy)))
        world.jobs.extend(jobs)

    world.store.submit = submit
    world.borrow(session, keys)
    while world.store.postponed:
        world.store.run()
    assert given[0] == AT_ONCE and sum(given) == LONG
    assert len(given) <= 5, given


def test_a_long_request_takes_longer_turns_each_time() -> None:
    """So that one that comes together with it does not have to wait for a whole long one first."""
    world, session, keys = _long()
    slow, _ = world.borrow(session, keys)
    asked = [len(slow.held)]
    while world.store.postponed:
        world.store.run()
        asked.append(len(slow.held))
    turns = [after - before for before, after in itertools.pairwise(asked)]
    assert asked[0] <= 4 * AT_ONCE
    assert turns[0] > AT_ONCE and max(turns) <= _TURN and turns[:-1] == sorted(turns[:-1])


def test_a_long_borrow_that_is_taken_back_holds_nothing() -> None:
    world, session, keys = _long(slabs=False)
    slow, _ = world.borrow(session, keys)
    slow.cancel()
    world.settle()
    assert not world.store.postponed
    assert not any(frame.pins for tier in world.tiers for slab in tier.slabs.values() for frame in slab.frames)
    world.store.check()


def test_keys_are_looked_up_in_turns_and_end_at_the_first_unknown_one() -> None:
    world, session, keys = _long()
    answers: list[object] = []
    run = session.tenant.run(keys[:1])
    packed = b"".join([*keys[1:], b"unknown".ljust(16), keys[-1]])
    operation = Borrowing(world.sessions, session, run, world.tiers[0], answers.append, packed)
    operation.advance()
    world.store.run()
    assert 1 < len(operation.pages) < LONG and len(operation.held) >= AT_ONCE
    world.settle()
    (lent,) = answers
    assert isinstance(lent, Borrowed) and len(unpack_handles(lent.handles)) == LONG
    counters = world.store.counters
    assert (counters.requested, sum(counters.hits)) == (LONG + 2, LONG)
    world.store.check()


def test_what_leaves_between_two_turns_ends_the_run() -> None:
    world, session, keys = _long()
    answers: list[object] = []
    migrating = Migrating(world.sessions, session, [], world.tiers[0], answers.append, b"".join(keys))
    migrating.advance()
    known = len(migrating.pages)
    assert known < LONG - 100
    world.store.forget(session.tenant.pages[keys[known + 50]], "asked")
    world.settle()
    assert answers == [Count(known + 50)]
    world.store.check()


def test_uses_are_counted_in_turns_and_once() -> None:
    world, session, keys = _long()
    run = session.tenant.run(keys)
    before = [page.uses for page in run]
    slow, lent = world.borrow(session, keys)
    counted = sum(page.uses - was for page, was in zip(run, before, strict=True))
    assert AT_ONCE <= counted < LONG and not lent
    slow.let_go()
    world.store.runnable.append(slow)
    world.settle()
    assert isinstance(lent[0], Borrowed)
    assert [page.uses - was for page, was in zip(run, before, strict=True)] == [1] * LONG
