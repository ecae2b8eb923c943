"""Lanes: the threads of one medium, which run its jobs, the most urgent first.

Not here: which lane a job goes to (`kvtier_daemon.movers`), what a job does (`kvtier_daemon.media`).
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

from kvtier_daemon.jobs import Job

log = logging.getLogger(__name__)


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

    def submit(self, jobs: list[tuple[int, Job]]) -> None:
        """Queue (urgency, job), the lowest urgency first."""
        with self._ready:
            for urgency, job in jobs:
                heapq.heappush(self._queue, (urgency, next(self._order), job))
            self._ready.notify(len(jobs))

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
