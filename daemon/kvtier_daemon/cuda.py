"""The cuda medium: slabs of a GPU's memory, lent to workers by CUDA IPC, and the thread that copies to and from them.

One thread a GPU makes all of that GPU's driver calls, in that GPU's own context. Copies are asynchronous, on a stream a
direction, so that promotion and demotion run at once; frames that lie side by side at both ends go as one. Their events
are asked, never waited for, while more is to be started; a frame is reported only when its event has passed.
"""

from __future__ import annotations

import heapq
import importlib
import logging
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

log = logging.getLogger(__name__)

_WINDOW = 256 << 20
"""Bytes under way in one direction: enough to keep the link busy, little enough for a borrow not to wait long."""
_DIRECTIONS = ("up", "down", "peer")
_POLL = 20e-6
"""Seconds between two looks at the events while nothing else is to be done."""
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
        self.streams: dict[str, Any] = {}
        self.under_way: dict[str, deque[tuple[Any, list[Copy], float, int]]] = {}
        self.bytes: dict[str, int] = {}
        super().__init__(medium.name, 1, lambda jobs: None)

    def _loop(self) -> None:
        cupy_cuda = importlib.import_module("cupy").cuda
        lost: Exception | None = None
        try:
            device.use(self.medium.gpu.ordinal)
            self.streams = {direction: cupy_cuda.Stream(non_blocking=True) for direction in _DIRECTIONS}
        except Exception as error:  # noqa: BLE001 (every job that comes is told)
            lost = MediumLost(f"tier {self.medium.name}: the GPU {self.medium.gpu.uuid} cannot be used ({error})")
            log.error("%s; the other tiers serve on", lost)
        self.under_way = {direction: deque() for direction in _DIRECTIONS}
        self.bytes = dict.fromkeys(_DIRECTIONS, 0)
        while True:
            busy = any(self.under_way.values())
            jobs = self._take(wait=not busy)
            if jobs is None and not busy:
                return
            if jobs and lost is not None:
                for job in jobs:
                    job.error = lost
                self.report(jobs)
            elif jobs:
                self._run(cupy_cuda, jobs)
            if not self._reap() and not jobs and busy:
                time.sleep(_POLL)

    def _take(self, *, wait: bool) -> list[Job] | None:
        """Jobs to start now; None if the lane stops."""
        with self._ready:
            while wait and not self._queue and not self._stopping:
                self._ready.wait()
            if self._stopping:
                return None
            jobs: list[Job] = []
            held: list[tuple[int, int, Job]] = []
            room = {direction: _WINDOW - under_way for direction, under_way in self.bytes.items()}
            while self._queue and len(jobs) < 256:
                entry = heapq.heappop(self._queue)
                job = entry[2]
                if job.taken:
                    continue
                if isinstance(job, Copy):
                    direction = self._direction(job)
                    if room[direction] <= 0:
                        held.append(entry)
                        if len(held) > 64:
                            break
                        continue
                    room[direction] -= job.target.nbytes
                job.taken = True
                jobs.append(job)
            for entry in held:
                heapq.heappush(self._queue, entry)
            return jobs

    def _direction(self, job: Copy) -> str:
        if not job.target.tier.device:
            return "down"
        return "peer" if job.source.tier.device else "up"

    def _run(self, cupy_cuda: Any, jobs: list[Job]) -> None:
        """Start what is asked for; slabs are made and unmade on the spot."""
        copies: dict[str, list[Copy]] = {}
        for job in jobs:
            if isinstance(job, Copy):
                copies.setdefault(self._direction(job), []).append(job)
                continue
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
        for direction, group in copies.items():
            self._start_copies(cupy_cuda, direction, group)

    def _start_copies(self, cupy_cuda: Any, direction: str, jobs: list[Copy]) -> None:
        cuda = device.runtime()
        stream = self.streams[direction]
        started = time.monotonic()
        for run in adjacent(jobs):
            first = run[0]
            source = self.media[first.source.tier.index].address(first.source)
            target = self.media[first.target.tier.index].address(first.target)
            nbytes = len(run) * first.target.nbytes
            try:
                cuda.memcpyAsync(target, source, nbytes, cuda.memcpyDefault, stream.ptr)
                event = cupy_cuda.Event(disable_timing=True)
                event.record(stream)
            except Exception as error:  # noqa: BLE001
                self._fail(list(run), error, started)
                continue
            self.under_way[direction].append((event, run, started, nbytes))
            self.bytes[direction] += nbytes

    def _reap(self) -> bool:
        """Report the copies whose event has passed; whether there were any."""
        finished: list[Job] = []
        for direction, queue in self.under_way.items():
            while queue:
                event, run, started, nbytes = queue[0]
                try:
                    if not event.done:
                        break
                except Exception as error:  # noqa: BLE001
                    queue.popleft()
                    self.bytes[direction] -= nbytes
                    self._fail(run, error, started)
                    continue
                queue.popleft()
                self.bytes[direction] -= nbytes
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


def adjacent(jobs: list[Copy]) -> list[list[Copy]]:
    """`jobs`, in their order, in runs that lie side by side at both ends, so that one copy moves a run."""
    runs: list[list[Copy]] = []
    run: list[Copy] = []
    source = target = None
    for job in jobs:
        after, into = job.source, job.target
        if (
            source is not None
            and target is not None
            and after.index == source.index + 1
            and into.index == target.index + 1
            and after.slab is source.slab
            and into.slab is target.slab
        ):
            run.append(job)
        else:
            run = [job]
            runs.append(run)
        source, target = after, into
    return runs
