"""How slabs are grown, and what becomes of those that are emptied."""

from __future__ import annotations

from kvtier.config import Size
from kvtier.wire import GRANTED, Borrowed, Reserved, unpack_handles
from kvtier_daemon.directory import OpenNamespace
from kvtier_daemon.jobs import Grow
from kvtier_daemon.sessions import Session
from kvtier_daemon.tiers import GROWING_AT_ONCE
from tests.daemon.world import UNIT, World


def _drained(world: World, holders: set[int]) -> None:
    """A tier of four slabs, all full, mapped by `holders`; then every page leaves it."""
    session = world.session()
    space = world.namespace(session)
    keys = world.keys(space, 16)
    world.store_chain(session, space, keys)
    tier = world.tiers[0]
    for slab in list(tier.slabs.values()):
        slab.holders |= holders
        world.store.room.vacate(slab)
    world.store.run()
    world.settle()
    assert world.store.directory.tenants["a"].count(keys) == 16
    assert not any(page.frames[0] for page in session.tenant.run(keys))
    world.store.check()


def test_a_drained_tier_that_workers_map_takes_pages_again() -> None:
    """A worker that is idle does not hear that a slab is to go: its memory would be nobody's for as long as it sleeps."""
    world = World(16, 64)
    _drained(world, {1})
    (owner,) = world.tiers[0].classes.values()
    assert len(owner.free) == 16 and len(world.tiers[0].slabs) == 4


def test_what_nobody_maps_goes_back_to_the_medium() -> None:
    world = World(16, 64)
    _drained(world, set())
    assert not world.tiers[0].slabs and world.tiers[0].allocated == 0


def test_a_smaller_tier_gives_back_what_is_mapped_too() -> None:
    world = World(16, 64)
    session = world.session()
    world.store_chain(session, world.namespace(session), world.keys(world.namespace(session), 16))
    slabs = list(world.tiers[0].slabs.values())
    for slab in slabs:
        slab.holders.add(1)
    told: list[int] = []
    world.store.room.retire = lambda slab: told.append(slab.id)
    world.store.room.resize(world.tiers[0], 8 * UNIT)
    world.settle()
    assert len(told) == 2 and world.tiers[0].allocated == 16 * UNIT, "until the worker has unmapped them"
    for slab in slabs:
        slab.holders.clear()
        world.store.room.unheld(slab)
    world.store.run()
    world.settle()
    assert world.tiers[0].allocated == 8 * UNIT


def test_who_waits_for_many_frames_gets_slabs_for_them_at_once() -> None:
    """One after the other, a link would wait for each of them anew; but no more than the tier takes, nor than are wanted."""
    world = World(64, 64)
    session = world.session()
    space = world.namespace(session)
    world.reserve(session, space, world.keys(space, 10))
    assert [type(job) for job in world.jobs] == [Grow] * 3, "10 pages, 4 a slab"
    world.settle()
    world.reserve(session, space, world.keys(space, 40, branch=1))
    assert sum(isinstance(job, Grow) for job in world.jobs) == GROWING_AT_ONCE
    owner = world.tiers[0].slab_class(session.tenant, UNIT)
    assert not owner.free and world.store.room.can_take(owner, 0), (
        "a tier is not full while slabs are under construction"
    )
    world.settle()
    world.store.check()


def test_a_copy_to_a_tier_without_slabs_has_them_made_at_once() -> None:
    world = World(64, 64, persistent=False)
    session = world.session()
    space = world.namespace(session)
    keys = world.keys(space, 10)
    world.store_chain(session, space, keys, tier=1)
    world.borrow(session, keys, tier=0)
    assert sum(isinstance(job, Grow) for job in world.jobs) == 3
    world.settle()
    world.store.check()


def test_two_tenants_and_one_slab_below_them() -> None:
    """Both have pages to save in a tier of one slab. Whose turn it is keeps the slab until what it copies there has come."""
    world = World(32, 4, 64)
    sessions = [world.session(name) for name in ("a", "b")]
    chains = []
    for session in sessions:
        space = world.namespace(session)
        keys = world.keys(space, 8)
        operation, _ = world.reserve(session, space, keys)
        while not operation.done:
            world.do(world.ready_jobs()[0])
        chains.append((session, keys, operation))
    for session, _, operation in chains:
        world.commit(session, operation)
    for slab in list(world.tiers[0].slabs.values()):
        world.store.room.vacate(slab)
    world.store.run()
    done = 0
    while world.jobs:
        world.do(world.ready_jobs()[0])
        done += 1
        assert done < 1000, "slabs go to and fro, and nothing comes of it"
    for session, keys, _ in chains:
        assert session.tenant.count(keys) == 8
        assert not any(page.frames[0] for page in session.tenant.run(keys))
    world.store.check()


def test_a_slab_that_another_class_waits_for_does_not_outgrow_the_write_queue() -> None:
    """What a slow disk could not take is lost, as it is when a page is evicted: the class that waits must not wait for it."""
    world = World(8, 64, admission="second-use", write_queue=Size(3 * UNIT))
    session = world.session()
    space = world.namespace(session)
    keys = world.keys(space, 8)
    world.store_chain(session, space, keys)
    tier, below = world.tiers
    heir = tier.slab_class(session.tenant, 2 * UNIT)
    slab = tier.coldest_slab(heir)
    assert slab is not None and slab.busy == 4 and not below.unsaved
    world.store.room.vacate(slab, heir)
    assert below.unsaved_bytes == 3 * UNIT
    world.settle()
    assert len(heir.free) == 2
    assert set(world.index) == set(keys[:3]) and session.tenant.count(keys) == 3, "the head is kept, not the tail"
    assert world.store.counters.evictions["unsaved"] == 5
    world.store.check()


def _two_sizes(world: World, session: Session, name: str, *, stored: bool) -> tuple[OpenNamespace, list[bytes]]:
    """A chain of four pages of a unit and one of two, by itself on the disk or nowhere."""
    space = world.namespace(session, name)
    space.sizes = [UNIT, 2 * UNIT]
    space.orders = bytes([0, 0, 0, 0, 1])
    keys = [name.encode() * 8 + number.to_bytes(8) for number in range(5)]
    if stored:
        world.store_chain(session, space, keys)
        world.store.shed([page.frames[0] for page in reversed(session.tenant.run(keys))])
        world.settle()
        assert not any(page.frames[0] for page in session.tenant.run(keys))
    return space, keys


def test_borrows_that_each_hold_what_another_needs() -> None:
    """Each has four pages, which is all the memory there is, and waits for a frame of the other size."""
    world = World(12, 64)
    sessions = [world.session() for _ in range(3)]
    chains = [_two_sizes(world, session, name, stored=True)[1] for session, name in zip(sessions, "abc", strict=True)]
    for slab in list(world.tiers[0].slabs.values()):
        world.store.room.vacate(slab)
    world.settle()
    heads = [world.borrow(session, keys[:4])[1] for session, keys in zip(sessions, chains, strict=True)]
    world.settle()  # all of the memory has pages of a unit, leased
    lent = [(session, *world.borrow(session, keys)) for session, keys in zip(sessions, chains, strict=True)]
    for session, (answer,) in zip(sessions, heads, strict=True):
        assert isinstance(answer, Borrowed)
        world.sessions.release(session, answer.lease)
    world.store.run()
    world.settle()
    assert [operation.holds() for _, operation, _ in lent] == [4, 4, 4] and not any(answers for *_, answers in lent)
    beats = 0
    for session, operation, answers in lent:
        while not operation.done:
            world.store.beat()
            world.store.run()
            world.settle()
            world.store.check()
            beats += 1
            assert beats < 20, "they wait for each other"
        (answer,) = answers
        assert isinstance(answer, Borrowed) and len(unpack_handles(answer.handles)) == 5, "all of it"
        world.sessions.release(session, answer.lease)
        world.store.run()


def test_reserves_that_each_hold_what_another_needs() -> None:
    world = World(8, persistent=False)
    sessions = [world.session(), world.session()]
    asked = []
    for session, name in zip(sessions, "ab", strict=True):
        space, keys = _two_sizes(world, session, name, stored=False)
        asked.append((session, *world.reserve(session, space, keys)))
        while world.jobs:
            world.do(world.ready_jobs()[0])
    (first, one, granted), (_, two, waits) = asked
    assert one.holds() == two.holds() == 4 and not granted and not waits
    for _ in range(3):
        world.store.beat()
        world.store.run()
        world.settle()
    assert len(granted) == 1 and not waits
    assert isinstance(granted[0], Reserved) and granted[0].status == bytes([GRANTED] * 5)
    assert world.store.counters.reserved == 5, "what was let go of was not given"
    world.sessions.abandon(first, one.reservation, one.reservation.slots)
    world.store.run()
    two.expire()
    assert isinstance(waits[0], Reserved) and waits[0].status.count(GRANTED) >= 4
    world.store.check()


def test_what_a_borrow_let_go_of_is_lent_at_its_deadline_if_it_is_there() -> None:
    world = World(8, 64)
    sessions = [world.session(), world.session()]
    chains = [_two_sizes(world, session, name, stored=True)[1] for session, name in zip(sessions, "ab", strict=True)]
    lent = [world.borrow(session, keys) for session, keys in zip(sessions, chains, strict=True)]
    world.settle()
    (_, second) = lent
    second[0].let_go()
    assert second[0].holds() == 0
    second[0].expire()
    (answer,) = second[1]
    assert isinstance(answer, Borrowed) and len(unpack_handles(answer.handles)) == 4
    world.store.check()
