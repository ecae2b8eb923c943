"""The cuda medium: slabs of a GPU's memory, lent to workers by CUDA IPC, and the thread that copies to and from them.

Copies are asynchronous, on a stream a direction, so that promotion and demotion run at once. Their events are asked, never
waited for; a copy is reported only when its event has passed. One thread a GPU does so, and makes all calls that may take
their time, in that GPU's own context.
The calls themselves are in `kvtier_daemon.streams`.
"""

from __future__ import annotations

import ctypes
import heapq
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvtier import device, driver
from kvtier.device import CudaUnavailable, Device
from kvtier.driver import DriverError
from kvtier.errors import SlabError
from kvtier.sizes import format_size
from kvtier_daemon.jobs import Copy, Grow, Job, Shrink
from kvtier_daemon.lanes import Lane
from kvtier_daemon.media import HostMedium, Medium
from kvtier_daemon.slabs import Frame
from kvtier_daemon.store import MediumLost
from kvtier_daemon.streams import MOST, Stream

log = logging.getLogger(__name__)

_WINDOWS = {"up": 256 << 20, "down": 256 << 20, "peer": 2 << 30}
"""Bytes under way by direction: enough to keep the link busy for some milliseconds, in which the thread may have to wait
for the interpreter; little enough for a borrow not to wait longer than that."""
_FRESH = "fresh"
"""Slabs that are being zeroed, among what is under way. Nothing here waits for a whole device: that would be for all copies."""
_MARKED = 4 << 20
"""Bytes after which an event is due: often enough for those who wait, seldom enough for pages of a few KiB."""
_POLL = (20e-6, 200e-6)
"""Seconds between two looks at the events while nothing else is to be done, at least and at most."""
_POLLED = 2e12
"""Bytes of the copies that are due next, a second of waiting: long ones, which take a link five times as long or longer, are
looked at no more often than it pays to ask for the interpreter lock; but the last of all, as often as can be."""
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
        """With whatever was in that memory, another tenant's pages perhaps: the lane has it zeroed."""
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
    """One GPU's copies and slabs. What fits in a direction's window is started by whoever brings it; the thread starts the
    rest as room comes, reports what has ended, and makes slabs."""

    def __init__(self, medium: CudaMedium, report: Callable[[list[Job]], None], media: list[Medium]) -> None:
        self.medium = medium
        self.report = report
        self.media = media
        self.streams: dict[str, Stream] = {}
        self.under_way: dict[str, deque[tuple[Any, Sequence[Job], float, int]]] = {
            direction: deque() for direction in (*_WINDOWS, _FRESH)
        }
        """By direction: (event, the jobs that it ends, when they were started, their bytes), oldest first."""
        self.bytes = dict.fromkeys(self.under_way, 0)
        self.copies = dict.fromkeys(self.under_way, 0)
        self._waiting: dict[str, list[tuple[int, int, Copy]]] = {direction: [] for direction in _WINDOWS}
        self._context: ctypes.c_void_p | None = None
        """In which others may start copies; None while the thread makes a slab, and for good where the GPU is lost."""
        super().__init__(medium.name, 1, lambda jobs: None)

    def submit(self, jobs: list[tuple[int, Job]]) -> None:
        """As a lane does; a direction that is busy keeps no other waiting.

        Copies are under way when this returns, as far as their window allows: a thread takes longer to wake than many a copy
        takes, and far longer if it has to ask a busy state thread for the interpreter lock, which compiled code never offers.
        """
        with self._ready:
            for urgency, job in jobs:
                queue: list[Any] = self._waiting[self._direction(job)] if isinstance(job, Copy) else self._queue
                heapq.heappush(queue, (urgency, next(self._order), job))
            if self._may_start():
                self._start_waiting()
            self._ready.notify()

    def _may_start(self) -> bool:
        """Whether the calling thread can start copies now, and none would keep it: memory that is not pinned does."""
        pinned = all(medium.pinning for medium in self.media if isinstance(medium, HostMedium))
        if self._context is None or self._stopping or not pinned:
            return False
        try:
            driver.call("cuCtxSetCurrent", self._context)
        except DriverError:  # the thread will see, and say so
            return False
        return True

    def __len__(self) -> int:
        return len(self._queue) + sum(map(len, self._waiting.values()))

    def _loop(self) -> None:
        context = ctypes.c_void_p()
        try:
            device.use(self.medium.gpu.ordinal)
            self.streams = {direction: Stream() for direction in self.under_way}
            driver.call("cuCtxGetCurrent", ctypes.byref(context))
        except Exception as error:  # noqa: BLE001 (every job that comes is told)
            self._refuse_all(error)
            return
        while True:
            with self._ready:
                self._context = context
                while not (self._stopping or any(self.under_way.values()) or len(self)):
                    self._ready.wait()
                if self._stopping and not any(self.under_way.values()):
                    return
                slab = None
                if not self._stopping:
                    self._start_waiting()
                    slab = heapq.heappop(self._queue)[2] if self._queue else None
                if slab is not None:
                    self._context = None
            if slab is not None:
                self._change(slab)
            due = self._reap()
            if due is not None and slab is None:
                time.sleep(min(max(_POLL[0], due / _POLLED), _POLL[1]))

    def _refuse_all(self, error: Exception) -> None:
        lost = MediumLost(f"tier {self.medium.name}: the GPU {self.medium.gpu.uuid} cannot be used ({error})")
        log.error("%s; the other tiers serve on", lost)
        while True:
            with self._ready:
                while not (self._stopping or len(self)):
                    self._ready.wait()
                if self._stopping:
                    return
                queues: list[list[Any]] = [self._queue, *self._waiting.values()]
                refused: list[Job] = [job for queue in queues for _, _, job in queue]
                for queue in queues:
                    queue.clear()
            for job in refused:
                job.error = lost
            self.report(refused)

    def _start_waiting(self) -> None:
        """Start as many copies as there is room for under way."""
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
                self._start_copies(direction, taken)

    def _direction(self, job: Copy) -> str:
        if not job.tier.device:
            return "down"
        return "peer" if job.origin.device else "up"

    def _change(self, job: Job) -> None:
        """Make a slab, to be reported when it is zeroed, or unmake one."""
        started = time.monotonic()
        try:
            if isinstance(job, Grow):
                backing = job.backing = self.medium.grow(job.slab_id, job.nbytes)
                with self._ready:
                    self.streams[_FRESH].zero(backing.address, job.nbytes)
                    self._mark(_FRESH, [job], job.nbytes, started)
                return
            if isinstance(job, Shrink):
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

    def _mark(self, direction: str, jobs: Sequence[Job], nbytes: int, started: float) -> None:
        """`jobs` are under way, to be reported when all that was started is done."""
        try:
            event = self.streams[direction].mark()
        except Exception as error:  # noqa: BLE001
            self._fail(jobs, error, started)
            return
        self.under_way[direction].append((event, jobs, started, nbytes))
        self.bytes[direction] += nbytes
        self.copies[direction] += len(jobs)

    def _reap(self) -> int | None:
        """Report what has ended. Where that was nothing, the bytes that are due next, 0 if nothing follows them."""
        finished: list[Job] = []
        due: list[int] = []
        with self._ready:
            for direction, queue in self.under_way.items():
                while queue:
                    event, run, started, nbytes = queue[0]
                    failed: Exception | None = None
                    try:
                        if not self.streams[direction].passed(event):
                            due.append(nbytes if len(queue) > 1 else 0)
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
        return None if finished else min(due, default=None)

    def _fail(self, jobs: Sequence[Job], error: Exception, started: float) -> None:
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
