"""Movers: the threads that do I/O and copies, so that the state thread never blocks.

Each tier has a lane of threads for copies and slabs, which takes the most urgent job first; a persistent tier has one
more thread, which writes its index in batches, in order. A job that was run, well or not, is put on `finished`, and
`wakeup` (an eventfd) tells the state thread's poller. A failing job carries its error; nothing that it raises ends a
thread, and a thread that ends all the same is replaced and counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from kvtier_daemon.index import Index
from kvtier_daemon.jobs import Barrier, Carve, Copy, Erase, Grow, Job, Record, Shrink
from kvtier_daemon.lanes import Lane
from kvtier_daemon.media import Medium, copy
from kvtier_daemon.tiers import Tier

log = logging.getLogger(__name__)

_BATCH = 512
"""Index jobs in one transaction, at most."""


class Movers:
    """All lanes of a daemon."""

    def __init__(self, tiers: list[Tier], media: list[Medium], indexes: dict[int, Index]) -> None:
        self.tiers = tiers
        self.media = media
        self.indexes = indexes
        self.finished: deque[Job] = deque()
        self.wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self.lanes = [
            medium.open_lane(tier.config.queue_depth, self._run, self._report, media)
            for tier, medium in zip(tiers, media, strict=True)
        ]
        self.index_lanes = {
            number: Lane(f"{tiers[number].name}-index", 1, self._writer(number), batch=_BATCH) for number in indexes
        }

    def submit(self, jobs: list[Job]) -> None:
        """Hand `jobs` to the threads that run them. Called by the state thread alone."""
        lanes: dict[Lane, list[tuple[int, Job]]] = {}
        for job in jobs:
            if isinstance(job, Barrier):
                job.awaited = len(self.index_lanes)
                for lane in self.index_lanes.values():
                    lanes.setdefault(lane, []).append((0, job))
                if not self.index_lanes:
                    self._report([job])
                continue
            lane = self._lane(job)
            ordered = lane in self.index_lanes.values()
            lanes.setdefault(lane, []).append((0 if ordered else job.priority, job))
        for lane, theirs in lanes.items():
            lane.submit(theirs)

    def _lane(self, job: Job) -> Lane:
        match job:
            case Copy():
                here, there = job.origin.index, job.tier.index
                # Between GPUs the origin's: a link that is pushed to both ways at once carries more than one pulled from.
                return self.lanes[there if self.media[there].rank > self.media[here].rank else here]
            case Grow():
                return self.lanes[job.owner.tier.index]
            case Shrink():
                return self.index_lanes.get(job.tier.index, self.lanes[job.tier.index])
            case Record():
                return self.index_lanes[job.target.tier.index]
            case Erase():
                return self.index_lanes[job.frame.tier.index]
            case Carve():
                return self.index_lanes[job.slab.owner.tier.index]
            case _:
                raise AssertionError(f"no lane runs {job}")

    def collect(self) -> list[Job]:
        """The jobs that were run since the last call. Called by the state thread alone."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wakeup)
        jobs = []
        while self.finished:
            jobs.append(self.finished.popleft())
        return jobs

    def revive(self) -> None:
        for lane in (*self.lanes, *self.index_lanes.values()):
            lane.revive()

    def stop(self, timeout: float) -> bool:
        """False if a thread is stuck; then the process should end without waiting for it."""
        deadline = time.monotonic() + timeout
        lanes = (*self.lanes, *self.index_lanes.values())
        stopped = [lane.stop(max(0.1, deadline - time.monotonic())) for lane in lanes]
        return all(stopped)

    def _run(self, jobs: list[Job]) -> None:
        for job in jobs:
            started = time.monotonic()
            try:
                match job:
                    case Copy():
                        origin, medium = self.media[job.origin.index], self.media[job.tier.index]
                        for source, target in zip(job.sources, job.targets, strict=True):
                            copy(source, origin, target, medium)
                    case Grow():
                        job.backing = self.media[job.owner.tier.index].grow(job.slab_id, job.nbytes)
                    case Shrink():
                        self.media[job.tier.index].shrink(job.slab.id, job.slab.backing)
            except Exception as error:  # noqa: BLE001 (whatever it is, the store must hear of it)
                job.error = error
                log.warning("%s", error)
            job.seconds = time.monotonic() - started
        self._report(jobs)

    def _writer(self, number: int) -> Callable[[list[Job]], None]:
        def write(jobs: list[Job]) -> None:
            error: Exception | None = None
            try:
                self.indexes[number].apply(jobs)
            except Exception as raised:  # noqa: BLE001 (likewise)
                error = raised
                log.error("tier %s: the index could not be written: %s", self.tiers[number].name, raised)
            done = []
            for job in jobs:
                job.error = error
                if isinstance(job, Shrink) and error is None:
                    self.media[number].shrink(job.slab.id, job.slab.backing)
                if isinstance(job, Barrier):
                    with self._lock:
                        job.awaited -= 1
                        if job.awaited:
                            continue
                done.append(job)
            self._report(done)

        return write

    def _report(self, jobs: list[Job]) -> None:
        self.finished.extend(jobs)
        os.eventfd_write(self.wakeup, 1)
