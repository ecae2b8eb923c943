"""The cost rule for pages that another GPU holds, on a store whose first two tiers stand for two GPUs."""

from __future__ import annotations

import itertools

import pytest

from kvtier.wire import Borrowed, unpack_handles
from kvtier_daemon import tiers
from kvtier_daemon.jobs import Copy
from kvtier_daemon.sessions import Session
from tests.daemon.world import UNIT, World


@pytest.fixture(autouse=True)
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "GRANULE", UNIT)


class TwoGpus(World):
    def __init__(self, first: int, second: int, slab: int = 4) -> None:
        super().__init__(first, second, 64, 64, slab=slab)
        one, two, host, file = self.tiers
        one.device, two.device = "GPU-1", "GPU-2"
        one.below = two.below = host
        for tier in (one, two):
            tier.direct = {0, 1, 2}
        host.direct, file.direct = {0, 1, 2, 3}, {2, 3}

    def lent(self, session: Session, keys: list[bytes], tier: int | None) -> list[int]:
        """The tiers of the pages that a borrow gives; released at once."""
        operation, answers = self.borrow(session, keys, tier)
        self.settle()
        if not operation.done:
            operation.expire()
        (answer,) = answers
        assert isinstance(answer, Borrowed)
        where = {slab.id: number for number, each in enumerate(self.tiers) for slab in each.slabs.values()}
        found = [where[handle.slab] for handle in unpack_handles(answer.handles)]
        if answer.lease:
            self.sessions.release(session, answer.lease)
            self.store.run()
        return found


def test_a_page_of_another_gpu_is_replicated_where_there_is_room() -> None:
    world = TwoGpus(16, 16)
    session = world.session()
    space = world.namespace(session)
    keys = world.keys(space, 6)
    world.store_chain(session, space, keys)
    assert world.lent(session, keys, 1) == [1] * 6
    assert world.lent(session, keys, 0) == [0] * 6, "the first GPU keeps its own"
    world.store.check()


def test_it_is_read_in_place_where_every_frame_holds_something_more_recent() -> None:
    world = TwoGpus(16, 4)
    session = world.session()
    space = world.namespace(session)
    old, new = world.keys(space, 4), world.keys(space, 6, branch=1)[2:]
    world.store_chain(session, space, old)
    operation, answers = world.reserve(session, space, world.keys(space, 4, branch=2), tier=1)
    world.settle()
    world.commit(session, operation)
    world.settle()
    assert answers and new
    assert world.lent(session, world.keys(space, 4, branch=2), 1)[-2:] == [1, 1]
    assert 0 in world.lent(session, old, 1), "its frames on GPU 2 would cost pages used later"


def test_it_is_moved_off_a_gpu_that_has_no_frame_left() -> None:
    world = TwoGpus(4, 16)
    session = world.session()
    space = world.namespace(session)
    keys = world.keys(space, 4)
    world.store_chain(session, space, keys)
    assert world.lent(session, keys, 1) == [1] * 4
    pages = session.tenant.run(keys)
    assert all(page.frames[0] is None and page.frames[1] is not None for page in pages)


def test_any_gives_what_lies_in_no_readable_tier_in_host_memory() -> None:
    world = TwoGpus(16, 16)
    session = world.session()
    space = world.namespace(session)
    keys = world.keys(space, 4)
    world.store_chain(session, space, keys)
    for page in session.tenant.run(keys):
        for frame in page.frames[:3]:
            world.store.shed([frame])
    world.settle()
    assert world.lent(session, keys, None) == [2] * 4
    assert world.lent(session, keys, 0) == [0] * 4, "and from the disk to a GPU it goes through host memory"
    blind = world.session()
    blind.readable = frozenset({2})
    assert world.lent(blind, keys, None) == [2] * 4


def test_what_is_lent_from_memory_rises_to_a_gpu_with_room() -> None:
    world = TwoGpus(16, 16)
    session = world.session()
    session.home = world.tiers[0]
    space = world.namespace(session)
    keys = world.keys(space, 6)
    world.store_chain(session, space, keys)
    for page in reversed(session.tenant.run(keys)):
        world.store.shed([page.frames[0]])
    assert world.lent(session, keys, None) == [2] * 6, "at once, where it lies"
    world.settle()
    assert world.lent(session, keys, None) == [0] * 6
    world.store.check()


def test_on_a_full_gpu_it_rises_when_it_is_borrowed_again() -> None:
    world = TwoGpus(8, 16)
    session = world.session()
    session.home = world.tiers[0]
    space = world.namespace(session)
    keys, others = world.keys(space, 4), world.keys(space, 8, branch=1)
    world.store_chain(session, space, keys)
    world.store_chain(session, space, others)
    for page in reversed(session.tenant.run(keys)):
        world.store.shed([page.frames[0]])
    tail = world.keys(space, 12, branch=1)
    operation, _ = world.reserve(session, space, tail[8:], first=8)
    for slot, parent in zip(operation.reservation.slots, tail[7:], strict=False):
        slot.parent = parent
    world.settle()
    world.commit(session, operation)
    world.settle()
    assert not world.tiers[0].classes[session.tenant.id, UNIT].free
    assert world.lent(session, keys, None) == [2] * 4
    world.settle()
    assert world.lent(session, keys, None) == [2] * 4, "once is not enough"
    world.settle()
    assert world.lent(session, keys, None) == [0] * 4
    world.store.check()


def _in_the_second(pages: int) -> tuple[World, Session, list[bytes]]:
    """A chain of so many pages in the second of three tiers."""
    world = World(16, 16, 16)
    session = world.session()
    space = world.namespace(session)
    keys = world.keys(space, pages)
    world.store_chain(session, space, keys, tier=1)
    return world, session, keys


def test_pages_side_by_side_at_both_ends_go_as_one_copy() -> None:
    world, session, keys = _in_the_second(6)
    _, answers = world.borrow(session, keys, tier=0)
    while not any(isinstance(job, Copy) for job in world.jobs):
        world.do(world.ready_jobs()[0])
    copies = [job for job in world.jobs if isinstance(job, Copy) and job.tier is world.tiers[0]]
    assert max(len(copy.pages) for copy in copies) > 1
    for copy in copies:
        assert copy.nbytes == UNIT * len(copy.pages)
        for frames in (copy.sources, copy.targets):
            for before, after in itertools.pairwise(frames):
                assert after.slab is before.slab and after.offset == before.offset + UNIT
    world.settle()
    assert isinstance(answers[0], Borrowed)
    pages = session.tenant.run(keys)
    assert [world.read(frame) for page in pages if (frame := page.frames[0])] == keys


def test_a_run_that_fails_leaves_its_pages_where_they_were() -> None:
    world, session, keys = _in_the_second(4)
    _, answers = world.borrow(session, keys, tier=0)
    while world.jobs:
        job = world.ready_jobs()[0]
        world.do(job, OSError(5, "injected") if isinstance(job, Copy) and job.tier is world.tiers[0] else None)
    answer = answers[0]
    assert isinstance(answer, Borrowed) and not answer.handles
    assert session.tenant.count(keys) == 4
    world.store.check()
    _, answers = world.borrow(session, keys, tier=0)
    world.settle()
    assert isinstance(answers[0], Borrowed) and len(answers[0].origins) == 4
