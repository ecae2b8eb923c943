"""The copies and slabs of a GPU, over an emulated CUDA: who starts them, and what is told when."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvtier import device, driver
from kvtier.driver import DriverError
from kvtier.wire import Borrowed, unpack_handles
from kvtier_daemon import tiers
from kvtier_daemon.cuda import CudaMedium, StreamLane
from kvtier_daemon.jobs import Copy, Grow, Job
from kvtier_daemon.media import HostMedium, Medium
from kvtier_daemon.slabs import Frame
from tests.daemon.world import UNIT, World
from tests.emulation import emulated

__all__ = ["emulated"]


class Nowhere:
    """Where frames lie of which copies are only counted."""

    def address(self, frame: Frame) -> int:
        return frame.slab.id << 32 | frame.offset


class Memory(Nowhere, CudaMedium):
    """Of a GPU."""


class Pageable(Nowhere, HostMedium):
    """Of a host, where it could not be pinned."""


class Link:
    """A lane, the world whose copies it is given, and what it has reported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, pinned: bool = True, **calls: Callable[..., int]) -> None:
        """`calls` stand in for the driver's of those names."""
        gpu = device.devices()[0]
        library = driver.library()
        for name, call in calls.items():
            monkeypatch.setattr(library, name, call, raising=False)
        monkeypatch.setattr(driver, "library", lambda: library)
        monkeypatch.setattr(tiers, "GRANULE", UNIT)
        self.world = World(64, 64, slab=16, persistent=False)
        self.world.tiers[0].device = "GPU-0"
        self.session = self.world.session()
        space = self.world.namespace(self.session)
        self.keys = self.world.keys(space, 8)
        self.world.store_chain(self.session, space, self.keys, tier=1)
        self.done: list[Job] = []
        self._told = threading.Event()
        hbm = Memory("hbm", gpu)
        host: Medium = Memory("host", gpu) if pinned else Pageable("host", None)
        self.lane = StreamLane(hbm, self._report, [hbm, host])

    def told(self, jobs: int) -> list[Job]:
        """The first so many that are reported."""
        while len(self.done) < jobs:
            assert self._told.wait(5)
            self._told.clear()
        return self.done[:jobs]

    def _report(self, jobs: list[Job]) -> None:
        self.done.extend(jobs)
        self._told.set()

    def asked_for(self) -> tuple[list[Copy], list[Any]]:
        """The copies of a borrow of all pages, and where its answer will be."""
        _, answers = self.world.borrow(self.session, self.keys, tier=0)
        while not any(isinstance(job, Copy) for job in self.world.jobs):
            self.world.do(self.world.ready_jobs()[0])
        return [job for job in self.world.jobs if isinstance(job, Copy)], answers

    def finish(self, copies: list[Copy]) -> None:
        """Wait until they are reported, and have the store take note."""
        self.told(len(copies))
        for job in self.done:
            self.world.jobs.remove(job)
            self.world.store.finish(job)
        self.done.clear()
        self.world.store.run()


def test_an_idle_direction_is_at_work_when_submit_returns(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def copy(target: int, source: int, nbytes: int, stream: object) -> int:
        time.sleep(0.0002)
        started.append(nbytes)
        return 0

    link = Link(monkeypatch, cuMemcpyAsync=copy)
    try:
        for _ in range(20):
            copies, answers = link.asked_for()
            before = len(started)
            link.lane.submit([(job.priority, job) for job in copies])
            assert len(started) > before, "the link idles"
            link.finish(copies)
            assert isinstance(answers[0], Borrowed)
            link.world.sessions.release(link.session, answers[0].lease)
            for page in link.session.tenant.run(link.keys):
                link.world.store.shed([page.frames[0]])
    finally:
        assert link.lane.stop(5)


@pytest.mark.parametrize("pinned", [True, False])
def test_who_brings_copies_starts_them_unless_that_would_keep_it(
    emulated: None, monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    """A copy of memory that is not pinned returns when it is made: the state thread must not be kept by it."""
    started: list[threading.Thread] = []

    def copy(target: int, source: int, nbytes: int, stream: object) -> int:
        started.append(threading.current_thread())
        return 0

    link = Link(monkeypatch, pinned=pinned, cuMemcpyAsync=copy)
    try:
        time.sleep(0.05)  # its thread has begun to wait
        copies, _ = link.asked_for()
        link.lane.submit([(job.priority, job) for job in copies])
        link.finish(copies)
        assert started and all((thread is threading.current_thread()) is pinned for thread in started)
    finally:
        assert link.lane.stop(5)


def test_copies_go_on_while_a_slab_is_zeroed(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    zeroed = threading.Event()
    streams = itertools.count(1)
    calls: list[int] = []

    def create(stream: Any, flags: int) -> int:
        stream._obj.value = next(streams)
        return 0

    def mark(event: Any, stream: Any) -> int:
        event.value = stream.value
        return 0

    def zero(target: int, value: int, nbytes: int, stream: Any) -> int:
        calls.append(stream.value)
        return 0

    def query(event: Any) -> int:
        return 600 if calls and event.value == calls[0] and not zeroed.is_set() else 0

    link = Link(
        monkeypatch,
        cuStreamCreate=create,
        cuMemcpyAsync=lambda *_: 0,
        cuMemsetD8Async=zero,
        cuEventRecord=mark,
        cuEventQuery=query,
    )
    try:
        copies, _ = link.asked_for()
        grow = Grow(link.world.tiers[0].slab_class(link.session.tenant, UNIT), 99, 1 << 21)
        link.lane.submit([(0, grow)])
        while not calls:
            time.sleep(0.001)
        link.lane.submit([(job.priority, job) for job in copies])
        assert link.told(len(copies)) == copies, "a slab with what was in that memory before is nobody's yet"
        zeroed.set()
        assert link.told(len(copies) + 1)[-1] is grow and grow.error is None and grow.backing is not None
    finally:
        assert link.lane.stop(5)


def test_copies_whose_event_fails_are_reported_and_the_next_are_made(
    emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = [600, 1]  # not ready, then an error
    link = Link(
        monkeypatch,
        cuMemcpyAsync=lambda *_: 0,
        cuEventQuery=lambda _: says.pop(0) if says else 0,
        cuGetErrorName=lambda *_: 1,
    )
    try:
        copies, answers = link.asked_for()
        link.lane.submit([(job.priority, job) for job in copies])
        link.finish(copies)
        assert all(isinstance(job.error, DriverError) for job in copies)
        (nothing,) = answers
        assert isinstance(nothing, Borrowed) and not nothing.handles
        time.sleep(0.05)  # the thread has gone on to look for more
        copies, answers = link.asked_for()
        link.lane.submit([(job.priority, job) for job in copies])
        link.finish(copies)
        assert isinstance(answers[0], Borrowed) and len(unpack_handles(answers[0].handles)) == 8
        assert not link.lane.restarts
    finally:
        assert link.lane.stop(5)
