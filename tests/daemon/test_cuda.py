"""The thread of a GPU, over an emulated CUDA: copies that find it idle are under way when they have been handed over."""

from __future__ import annotations

import threading
import time

import pytest

from kvtier import device, driver
from kvtier.wire import Borrowed
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


def test_an_idle_direction_is_at_work_when_submit_returns(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_PICK_UP", 5.0)  # a busy machine may take its time
    started: list[int] = []
    gpu = device.devices()[0]
    library = driver.library()

    def copy(target: int, source: int, nbytes: int, stream: object) -> int:
        time.sleep(0.0002)
        started.append(nbytes)
        return 0

    monkeypatch.setattr(library, "cuMemcpyAsync", copy, raising=False)
    monkeypatch.setattr(driver, "library", lambda: library)
    monkeypatch.setattr(tiers, "GRANULE", UNIT)
    world = World(64, 64, slab=16, persistent=False)
    world.tiers[0].device = "GPU-0"
    session = world.session()
    space = world.namespace(session)
    keys = world.keys(space, 8)
    world.store_chain(session, space, keys, tier=1)
    done: list[Job] = []
    over = threading.Event()

    def report(jobs: list[Job]) -> None:
        done.extend(jobs)
        over.set()

    media = [Memory("hbm", gpu), Memory("host", gpu)]
    lane = StreamLane(media[0], report, list(media))
    try:
        for _ in range(20):
            _, answers = world.borrow(session, keys, tier=0)
            while not any(isinstance(job, Copy) for job in world.jobs):
                world.do(world.ready_jobs()[0])
            copies = [job for job in world.jobs if isinstance(job, Copy)]
            before = len(started)
            lane.submit([(job.priority, job) for job in copies])
            assert len(started) > before, "the link idles"
            while len(done) < len(copies):
                assert over.wait(5)
                over.clear()
            for job in done:
                world.jobs.remove(job)
                world.store.finish(job)
            done.clear()
            world.store.run()
            assert isinstance(answers[0], Borrowed)
            world.sessions.release(session, answers[0].lease)
            for page in session.tenant.run(keys):
                world.store.shed([page.frames[0]])
    finally:
        assert lane.stop(5)
