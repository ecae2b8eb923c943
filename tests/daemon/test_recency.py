"""Who leaves first: by hand, where the model only says that someone may."""

from __future__ import annotations

from kvtier.config import Size
from kvtier.wire import Borrowed, Reserved
from kvtier_daemon.jobs import Grow, Record
from kvtier_daemon.operations import Reserving
from kvtier_daemon.slabs import State
from tests.daemon.world import UNIT, World


def test_a_commit_renews_the_prefix_it_stands_on() -> None:
    """The head of a chain is on disk alone, the oldest thing there; its tail is committed in memory. Then the disk
    fills: the head must not go before its tail, which nothing could find without it."""
    world = World(24, 16)
    session = world.session()
    space = world.namespace(session)
    chain = world.keys(space, 12, branch=1)
    world.store_chain(session, space, chain[:8])
    others = [world.namespace(session, model=f"m{number}") for number in range(8)]
    for other in others[:4]:
        world.store_chain(session, other, world.keys(other, 2))
    for page in reversed(session.tenant.run(chain[:8])):
        world.store.shed([page.frames[0]])  # in memory no more
    operation, _ = world.reserve(session, space, chain[8:], first=8)
    for slot, parent in zip(operation.reservation.slots, chain[7:], strict=False):
        slot.parent = parent
    world.settle()
    world.commit(session, operation)
    for other in others[4:]:
        world.store_chain(session, other, world.keys(other, 1))
    world.settle()
    assert session.tenant.count(chain) == 12
    world.store.check()


def test_a_page_waits_to_be_saved_only_while_the_disk_gets_on() -> None:
    world = World(8, 64)
    session = world.session()
    space = world.namespace(session)
    keys = world.keys(space, 24)

    def store(start: int) -> int:
        """Eight pages, with nothing written to disk; how many got a frame."""
        operation, _ = world.reserve(session, space, keys[start : start + 8], first=start)
        for slot in operation.reservation.slots[:1]:
            slot.parent = keys[start - 1] if start else space.seed
        while grows := [job for job in world.jobs if isinstance(job, Grow) and job.owner.tier.index == 0]:
            world.do(grows[0])
        got = len(operation.reservation.slots)
        if not operation.done:
            operation.expire()
        world.commit(session, operation)
        return got

    assert store(0) == 8
    assert store(8) == 0, "the disk is asked to save them first"
    world.now += 60
    assert store(8) > 0, "but it does nothing"
    assert world.store.counters.evictions["unsaved"] > 0
    world.store.check()


def test_a_write_queue_is_bounded_and_what_does_not_fit_is_counted() -> None:
    world = World(32, 64, write_queue=Size(4 * UNIT))
    session = world.session()
    space = world.namespace(session)
    operation, _ = world.reserve(session, space, world.keys(space, 16))
    while grows := [job for job in world.jobs if isinstance(job, Grow)]:
        world.do(grows[0])
    world.commit(session, operation)
    below = world.tiers[1]
    assert below.unsaved_bytes <= 4 * UNIT
    assert world.store.counters.unsaved == 16 - len(below.unsaved) - below.writing


def test_second_use_admits() -> None:
    world = World(32, 64, admission="second-use")
    session = world.session()
    space = world.namespace(session)
    keys = world.keys(space, 8)
    world.store_chain(session, space, keys)
    assert not world.index
    operation, answers = world.borrow(session, keys[:3])
    assert operation.done and isinstance(answers[0], Borrowed)
    world.settle()
    assert set(world.index) == set(keys[:3])
    frame = session.tenant.pages[keys[0]].frames[1]
    assert frame is not None and frame.state is State.READY


def test_a_class_without_a_slab_gets_one_that_is_still_being_saved() -> None:
    """Under steady write-through some frame of every slab is being copied: that must not starve another class."""
    world = World(4, 64)
    session = world.session()
    space = world.namespace(session)
    operation, _ = world.reserve(session, space, world.keys(space, 4))
    world.settle()
    world.commit(session, operation)
    for job in [job for job in world.jobs if isinstance(job, Grow)]:
        world.do(job)
    assert all(any(frame.copies for frame in slab.frames) for slab in world.tiers[0].slabs.values())
    chain = world.keys(space, 34, branch=1)
    answers: list[object] = []
    pages = [(32, chain[32], chain[31])]  # of the second order: a class that has no slab yet
    waiting = Reserving(world.sessions, session, space, world.tiers[0], pages, answers.append)
    waiting.advance()
    world.store.run()
    assert any(slab.leaving for slab in world.tiers[0].slabs.values()), "a slab is on its way to the other class"
    world.settle()
    assert waiting.done and isinstance(answers[0], Reserved) and answers[0].reservation
    world.store.check()


def test_the_index_keeps_when_a_page_was_used() -> None:
    """Or a smaller disk, after a restart, would not know which slabs are the youngest."""
    world = World(16, 16)
    session = world.session()
    space = world.namespace(session)
    stamps = []
    for branch in range(3):
        keys = world.keys(space, 4, branch=branch)[2 if branch else 0 :]
        parent = session.tenant.pages.get(world.keys(space, 2)[-1])
        operation, _ = world.reserve(session, space, keys, first=2 if branch else 0)
        world.settle()
        if parent is not None:
            operation.reservation.slots[0].parent = parent.key
        world.commit(session, operation)
        while world.jobs:
            job = world.ready_jobs()[0]
            if isinstance(job, Record):
                assert job.target.touched == job.source.touched
                stamps.append(job.target.touched)
            world.do(job)
    assert (
        len(stamps) == 8
        and 0 < min(stamps[:4])
        and max(stamps[:4]) < min(stamps[4:6]) <= max(stamps[4:6]) < min(stamps[6:])
    )
