"""Movers: the threads that do I/O and copies, so that the state thread never blocks.

Each tier has a lane of threads for copies and slabs, which takes the most urgent job first; a persistent tier has one
more thread, which writes its index in batches, in order. A job that was run, well or not, is put on `finished`, and
`wakeup` (an eventfd) tells the state thread's poller. A failing job carries its error; nothing that it raises ends a
thread, and a thread that ends all the same is replaced and counted.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from kvtier_daemon.index import Index
from kvtier_daemon.jobs import Barrier, Carve, Copy, Erase, Grow, Job, Record, Shrink
from kvtier_daemon.media import Medium, copy
from kvtier_daemon.tiers import Tier

log = logging.getLogger(__name__)

_BATCH = 512
"""Index jobs in one transaction, at most."""


class Lane:
    """Threads that run jobs, the most urgent first and in order among equals; `batch` of them at once."""

    def __init__(self, name: str, threads: int, run: Callable[[list[Job]], None], *, batch: int = 1) -> None:
        self.name = name
        self.run = run
        self.batch = batch
        self.restarts = 0
        self._queue: list[tuple[int, int, Job]] = []
        self._order = itertools.count()
        self._ready = threading.Condition()
        self._stopping = False
        self._threads = [self._start(number) for number in range(threads)]

    def submit(self, job: Job, urgency: int) -> None:
        with self._ready:
            heapq.heappush(self._queue, (urgency, next(self._order), job))
            self._ready.notify()

    def __len__(self) -> int:
        return len(self._queue)

    def stop(self, timeout: float) -> bool:
        """Let running jobs end and no other start; False if a thread is still busy after `timeout` seconds."""
        with self._ready:
            self._stopping = True
            self._ready.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def revive(self) -> None:
        """Replace threads that ended though nobody asked them to."""
        for number, thread in enumerate(self._threads):
            if not thread.is_alive() and not self._stopping:
                self.restarts += 1
                log.error("mover %s ended unexpectedly; started again (restart %d)", thread.name, self.restarts)
                self._threads[number] = self._start(number)

    def _start(self, number: int) -> threading.Thread:
        thread = threading.Thread(target=self._loop, name=f"{self.name}-{number}", daemon=True)
        thread.start()
        return thread

    def _loop(self) -> None:
        while jobs := self._next():
            self.run(jobs)

    def _next(self) -> list[Job]:
        """The jobs to run now, each taken by this thread alone; empty when the lane stops."""
        with self._ready:
            while True:
                while not self._queue and not self._stopping:
                    self._ready.wait()
                if self._stopping:
                    return []
                jobs: list[Job] = []
                while self._queue and len(jobs) < self.batch:
                    _, _, job = heapq.heappop(self._queue)
                    if not job.taken or self.batch > 1:  # a hurried job stands in the queue twice
                        job.taken = True
                        jobs.append(job)
                if jobs:
                    return jobs


class Movers:
    """All lanes of a daemon."""

    def __init__(self, tiers: list[Tier], media: list[Medium], indexes: dict[int, Index]) -> None:
        self.tiers = tiers
        self.media = media
        self.indexes = indexes
        self.finished: deque[Job] = deque()
        self.wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self.lanes = [Lane(tier.name, tier.config.queue_depth, self._run) for tier in tiers]
        self.index_lanes = {
            number: Lane(f"{tiers[number].name}-index", 1, self._writer(number), batch=_BATCH) for number in indexes
        }

    def submit(self, job: Job) -> None:
        """Hand `job` to the thread that runs it. Called by the state thread alone."""
        match job:
            case Copy():
                persistent = job.source.tier if job.source.tier.persistent else job.target.tier
                self.lanes[persistent.index].submit(job, job.priority)
            case Grow():
                self.lanes[job.owner.tier.index].submit(job, job.priority)
            case Shrink():
                lane = self.index_lanes.get(job.tier.index, self.lanes[job.tier.index])
                lane.submit(job, 0 if job.tier.index in self.index_lanes else job.priority)
            case Record():
                self.index_lanes[job.target.tier.index].submit(job, 0)
            case Erase():
                self.index_lanes[job.frame.tier.index].submit(job, 0)
            case Carve():
                self.index_lanes[job.slab.owner.tier.index].submit(job, 0)
            case Barrier():
                job.awaited = len(self.index_lanes)
                for lane in self.index_lanes.values():
                    lane.submit(job, 0)
                if not self.index_lanes:
                    self._report([job])

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
                    case Copy(source=source, target=target):
                        copy(source, self.media[source.tier.index], target, self.media[target.tier.index])
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
