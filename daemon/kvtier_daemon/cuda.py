"""The cuda medium: slabs of a GPU's memory, lent to workers by CUDA IPC, and the thread that copies to and from them.

One thread a GPU makes all of that GPU's driver calls, in that GPU's own context. Copies are asynchronous, on a stream a
direction, so that promotion and demotion run at once. Their events are asked, never waited for, while more is to be
started; a copy is reported only when its event has passed.
The calls themselves are in `kvtier_daemon.streams`.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvtier import device
from kvtier.device import CudaUnavailable, Device
from kvtier.errors import SlabError
from kvtier.sizes import format_size
from kvtier_daemon.jobs import Copy, Grow, Job, Shrink
from kvtier_daemon.lanes import Lane
from kvtier_daemon.media import Medium
from kvtier_daemon.slabs import Frame
from kvtier_daemon.store import MediumLost
from kvtier_daemon.streams import MOST, Stream

log = logging.getLogger(__name__)

_WINDOWS = {"up": 256 << 20, "down": 256 << 20, "peer": 2 << 30}
"""Bytes under way by direction: enough to keep the link busy for some milliseconds, in which this thread may have to wait
for the interpreter; little enough for a borrow not to wait longer than that."""
_MARKED = 4 << 20
"""Bytes after which an event is due: often enough for those who wait, seldom enough for pages of a few KiB."""
_PICK_UP = 1e-3
"""Seconds that whoever brings copies to an idle stream waits at most for them to be started."""
_POLL = (20e-6, 200e-6)
"""Seconds between two looks at the events while nothing else is to be done, at least and at most."""
_POLLED = 2e12
"""Bytes of the copies that are due next, a second of waiting: long ones, which take a link five times as long or longer, are
looked at no more often than it pays to ask for the interpreter lock."""
_LOST = frozenset({46, 214, 700, 702, 709, 710, 719, 999})
"""CUDA errors after which a context is of no more use (device unavailable, ECC, illegal access, launch failure ...)."""


class CudaBacking:
    """`address` is the daemon's own; `handle` exports it."""

    __slots__ = ("address", "handle")

    def __init__(self, address: int, handle: bytes) -> None:
        self.address = address
        self.handle = handle


class CudaMedium:
    """Memory of one GPU."""

    persistent = False
    mappable = True
    rank = 2

    def __init__(self, name: str, gpu: Device) -> None:
        self.name = name
        self.gpu = gpu

    def grow(self, slab_id: int, nbytes: int) -> CudaBacking:
        try:
            address = device.allocate(nbytes)
            return CudaBacking(address, device.export(address))
        except CudaUnavailable as error:
            raise SlabError(
                f"tier {self.name}: no slab of {format_size(nbytes)}: {error}; other processes hold the GPU's memory: lower "
                f"tiers.{self.name}.capacity, or theirs; the tier goes on with what it has"
            ) from error

    def shrink(self, slab_id: int, backing: CudaBacking) -> None:
        cuda = device.runtime()
        try:
            cuda.free(backing.address)
        except cuda.CUDARuntimeError as error:
            log.warning("tier %s: a slab could not be freed: %s", self.name, error)

    def view(self, frame: Frame) -> memoryview | None:
        return None

    def address(self, frame: Frame) -> int:
        backing: CudaBacking = frame.slab.backing
        return backing.address + frame.offset

    def load(self, frame: Frame, into: memoryview) -> None:
        raise AssertionError("copies to and from a GPU run on its own lane")

    def store(self, frame: Frame, data: memoryview) -> None:
        raise AssertionError("copies to and from a GPU run on its own lane")

    def open_lane(
        self, threads: int, run: Callable[[list[Job]], None], report: Callable[[list[Job]], None], media: list[Medium]
    ) -> Lane:
        return StreamLane(self, report, media)


class StreamLane(Lane):
    """The thread of one GPU."""

    def __init__(self, medium: CudaMedium, report: Callable[[list[Job]], None], media: list[Medium]) -> None:
        self.medium = medium
        self.report = report
        self.media = media
        self.streams: dict[str, Stream] = {}
        self.under_way: dict[str, deque[tuple[Any, list[Copy], float, int]]] = {
            direction: deque() for direction in _WINDOWS
        }
        """By direction: (event, the copies that it ends, when they were started, their bytes), oldest first."""
        self.bytes = dict.fromkeys(_WINDOWS, 0)
        self.copies = dict.fromkeys(_WINDOWS, 0)
        self._waiting: dict[str, list[tuple[int, int, Copy]]] = {direction: [] for direction in _WINDOWS}
        self._picked_up = threading.Event()
        super().__init__(medium.name, 1, lambda jobs: None)

    def _loop(self) -> None:
        lost: Exception | None = None
        try:
            device.use(self.medium.gpu.ordinal)
            self.streams = {direction: Stream() for direction in _WINDOWS}
        except Exception as error:  # noqa: BLE001 (every job that comes is told)
            lost = MediumLost(f"tier {self.medium.name}: the GPU {self.medium.gpu.uuid} cannot be used ({error})")
            log.error("%s; the other tiers serve on", lost)
        while True:
            busy = any(self.under_way.values())
            due = self._take(wait=not busy)
            if due is None and not busy:
                return
            slabs, copies = due or ([], {})
            if lost is not None:
                given_up = [*slabs, *(job for jobs in copies.values() for job in jobs)]
                for job in given_up:
                    job.error = lost
                self.report(given_up)
                self._picked_up.set()
                continue
            if slabs:
                self._change(slabs)
            for direction, jobs in copies.items():
                self._start_copies(direction, jobs)
            self._picked_up.set()
            if not self._reap() and not slabs and not copies and busy:
                due_next = min((queue[0][3] for queue in self.under_way.values() if queue), default=0)
                time.sleep(min(max(_POLL[0], due_next / _POLLED), _POLL[1]))

    def submit(self, jobs: list[tuple[int, Job]]) -> None:
        """As a lane does; a direction that is busy keeps no other waiting.

        Returns when a direction that was idle has been set to work: this thread of many short calls lets go of the
        interpreter lock too often for Python ever to take it away, and never for long enough that a waking one gets it, so
        that a link would idle for milliseconds.
        """
        idle = False
        with self._ready:
            for urgency, job in jobs:
                queue: list[Any] = self._queue
                if isinstance(job, Copy):
                    direction = self._direction(job)
                    queue = self._waiting[direction]
                    idle = idle or not (queue or self.under_way[direction])
                heapq.heappush(queue, (urgency, next(self._order), job))
            if idle:
                self._picked_up.clear()
            self._ready.notify()
        if idle:
            self._picked_up.wait(_PICK_UP)

    def __len__(self) -> int:
        return len(self._queue) + sum(map(len, self._waiting.values()))

    def _take(self, *, wait: bool) -> tuple[list[Job], dict[str, list[Copy]]] | None:
        """Slab jobs, and copies by direction, to start now; None if the lane stops."""
        with self._ready:
            while wait and not self._stopping and not len(self):
                self._ready.wait()
            if self._stopping:
                return None
            slabs = [job for _, _, job in self._queue]
            self._queue.clear()
            copies: dict[str, list[Copy]] = {}
            for direction, queue in self._waiting.items():
                room, places = _WINDOWS[direction] - self.bytes[direction], MOST - self.copies[direction]
                taken: list[Copy] = []
                while queue and room > 0 and len(taken) < places:
                    job = heapq.heappop(queue)[2]
                    if not job.taken:  # a hurried one stands in the queue twice
                        job.taken = True
                        room -= job.nbytes
                        taken.append(job)
                if taken:
                    copies[direction] = taken
            return slabs, copies

    def _direction(self, job: Copy) -> str:
        if not job.tier.device:
            return "down"
        return "peer" if job.origin.device else "up"

    def _change(self, jobs: list[Job]) -> None:
        """Make and unmake slabs, on the spot."""
        for job in jobs:
            started = time.monotonic()
            try:
                if isinstance(job, Grow):
                    job.backing = self.medium.grow(job.slab_id, job.nbytes)
                elif isinstance(job, Shrink):
                    self.medium.shrink(job.slab.id, job.slab.backing)
            except Exception as error:  # noqa: BLE001 (whatever it is, the store must hear of it)
                job.error = self._judged(error)
                log.warning("%s", job.error)
            job.seconds = time.monotonic() - started
            self.report([job])

    def _start_copies(self, direction: str, jobs: list[Copy]) -> None:
        stream = self.streams[direction]
        started = time.monotonic()
        group: list[Copy] = []
        unmarked = 0
        for job in jobs:
            source = self.media[job.origin.index].address(job.sources[0])
            target = self.media[job.tier.index].address(job.targets[0])
            try:
                stream.copy(target, source, job.nbytes)
            except Exception as error:  # noqa: BLE001
                self._fail([job], error, started)
                continue
            group.append(job)
            unmarked += job.nbytes
            if unmarked >= _MARKED:
                self._mark(direction, group, unmarked, started)
                group, unmarked = [], 0
        if group:
            self._mark(direction, group, unmarked, started)

    def _mark(self, direction: str, jobs: list[Copy], nbytes: int, started: float) -> None:
        """`jobs` are under way, to be reported when all that was started is done."""
        try:
            event = self.streams[direction].mark()
        except Exception as error:  # noqa: BLE001
            self._fail(jobs, error, started)
            return
        self.under_way[direction].append((event, jobs, started, nbytes))
        self.bytes[direction] += nbytes
        self.copies[direction] += len(jobs)

    def _reap(self) -> bool:
        """Report the copies whose event has passed; whether there were any."""
        finished: list[Job] = []
        for direction, queue in self.under_way.items():
            while queue:
                event, run, started, nbytes = queue[0]
                failed: Exception | None = None
                try:
                    if not self.streams[direction].passed(event):
                        break
                except Exception as error:  # noqa: BLE001
                    failed = error
                queue.popleft()
                self.bytes[direction] -= nbytes
                self.copies[direction] -= len(run)
                if failed is not None:
                    self._fail(run, failed, started)
                    continue
                now = time.monotonic()
                for job in run:
                    job.seconds = (now - started) / len(run)
                finished += run
        if finished:
            self.report(finished)
        return bool(finished)

    def _fail(self, jobs: list[Copy], error: Exception, started: float) -> None:
        for job in jobs:
            job.error = self._judged(error)
            job.seconds = time.monotonic() - started
        log.warning("tier %s: %s", self.medium.name, error)
        self.report(list(jobs))

    def _judged(self, error: Exception) -> Exception:
        """MediumLost where the GPU is of no more use to this process."""
        if getattr(error, "status", None) in _LOST:
            return MediumLost(
                f"tier {self.medium.name}: the GPU {self.medium.gpu.uuid} is lost ({error}); restart kvtierd"
            )
        return error
