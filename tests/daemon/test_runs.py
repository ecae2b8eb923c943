"""Pages that lie side by side go by one copy, as long as there is nothing to decide."""

from __future__ import annotations

import itertools

from kvtier.wire import Borrowed
from kvtier_daemon.directory import OpenNamespace, Page
from kvtier_daemon.jobs import Copy, Priority
from kvtier_daemon.sessions import Session
from tests.daemon.world import World

PAGES = 12


class Chain:
    """Pages of one size, side by side in the lower tier; the upper one has free frames, side by side too."""

    def __init__(self, apart: int = PAGES) -> None:
        """From page `apart` on they lie elsewhere than those before."""
        self.world = World(64, 64, persistent=False, slab=32)
        self.session: Session = self.world.session()
        self.space: OpenNamespace = self.world.namespace(self.session)
        self.space.orders = bytes(PAGES)
        self.keys = self.world.keys(self.space, PAGES)
        self.world.store_chain(self.session, self.space, self.keys[:apart], tier=1)
        if apart < PAGES:
            between = self.world.namespace(self.session, "between")
            self.world.store_chain(self.session, between, self.world.keys(between, 1), tier=1)
            self._store_on(apart)
        spare, _ = self.world.reserve(self.session, self.space, self.world.keys(self.space, PAGES, branch=1))
        self.world.settle()
        self.world.sessions.abandon(self.session, spare.reservation, spare.reservation.slots)
        self.owner = next(iter(self.world.tiers[0].classes.values()))
        self.owner.forecast(1e9)  # which puts the free frames in order

    def _store_on(self, start: int) -> None:
        operation, _ = self.world.reserve(self.session, self.space, self.keys[start:], first=start, tier=1)
        operation.reservation.slots[0].parent = self.keys[start - 1]
        self.world.commit(self.session, operation)

    def page(self, number: int) -> Page:
        return self.session.tenant.pages[self.keys[number]]

    def borrow(self) -> list[list[int]]:
        """Borrow all; the numbers of the pages that each copy takes."""
        _, answers = self.world.borrow(self.session, self.keys)
        jobs = [job for job in self.world.jobs if isinstance(job, Copy)]
        copied = [[self.keys.index(page.key) for page in job.pages] for job in jobs]
        self.world.settle()
        answer = answers[0]
        assert isinstance(answer, Borrowed)
        frames = [self.page(number).frames[0] for number in range(PAGES)]
        assert [frame and self.world.read(frame) for frame in frames] == self.keys
        assert [frame and frame.pins for frame in frames] == [1] * PAGES
        assert self.world.sessions.release(self.session, answer.lease) == PAGES
        self.world.store.check()
        return copied


def test_one_copy_takes_all() -> None:
    assert Chain().borrow() == [list(range(PAGES))]


def test_a_page_that_is_there_already_is_left_out() -> None:
    chain = Chain()
    assert chain.world.store.fetch(chain.page(5), chain.world.tiers[0], Priority.WRITE) is not None
    chain.world.settle()
    copied = chain.borrow()
    assert copied[0] == [0, 1, 2, 3, 4]
    assert list(itertools.chain.from_iterable(copied)) == [number for number in range(PAGES) if number != 5]


def test_what_lies_apart_goes_by_itself() -> None:
    chain = Chain(apart=7)
    assert chain.borrow() == [list(range(7)), list(range(7, PAGES))]


def test_frames_are_kept_ahead_of_demand_all_the_same() -> None:
    """With no more free frames than are to be kept, each page makes room as it does without a run."""
    chain = Chain()
    free = len(chain.owner.free)
    chain.owner.low = free - 4
    grown = len(chain.owner.slabs)
    chain.borrow()
    assert len(chain.owner.slabs) > grown
