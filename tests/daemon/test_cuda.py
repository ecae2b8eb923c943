"""The thread of a GPU, over an emulated CUDA: copies that find it idle are under way when they have been handed over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvtier import device, driver
from kvtier.driver import DriverError
from kvtier.wire import Borrowed, unpack_handles
from kvtier_daemon import cuda, tiers
from kvtier_daemon.cuda import CudaMedium, StreamLane
from kvtier_daemon.jobs import Copy, Job
from kvtier_daemon.slabs import Frame
from tests.daemon.world import UNIT, World
from tests.emulation import emulated

__all__ = ["emulated"]


class Memory(CudaMedium):
    """Frames that lie nowhere: copies are counted."""

    def address(self, frame: Frame) -> int:
        return frame.slab.id << 32 | frame.offset


class Link:
    """A lane, the world whose copies it is given, and what it has reported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **calls: Callable[..., int]) -> None:
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
        media = [Memory("hbm", gpu), Memory("host", gpu)]
        self.lane = StreamLane(media[0], self._report, list(media))

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
        while len(self.done) < len(copies):
            assert self._told.wait(5)
            self._told.clear()
        for job in self.done:
            self.world.jobs.remove(job)
            self.world.store.finish(job)
        self.done.clear()
        self.world.store.run()


def test_an_idle_direction_is_at_work_when_submit_returns(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_PICK_UP", 5.0)  # a busy machine may take its time
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
