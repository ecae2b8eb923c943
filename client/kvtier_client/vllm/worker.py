"""The worker's side: pages into blocks before a request runs, and full blocks into pages after they are computed.

One session a rank. Nothing here waits for the daemon on the engine's thread: loads run on a few threads of their own and
saves on one, in order. What a step costs the engine is a look at which blocks it writes.

    load   borrow, copy, release. What could not be had is reported, and vLLM computes it
    save   reserve, copy, commit. A page that exists, or that another session is writing, is not copied

Nothing keeps a block from being used again while a save reads it, not even a preemption or the end of its request; so before
each step, `begin` looks whether it writes blocks that a save has yet to read, and waits for that copy, or takes the save back
if its copy has not begun for want of the daemon. That needs no count of references in vLLM, and leaves nothing behind.

On a GPU, copies run on two streams of their own: a save after the kernels of its step, a load after those of all steps before.
Needs torch, and no vLLM.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from kvtier.errors import KvtierError
from kvtier.keys import Namespace
from kvtier.wire import GRANTED
from kvtier_client.namespace import NamespaceClient
from kvtier_client.pages import PageView
from kvtier_client.vllm import blocks as copies
from kvtier_client.vllm.blocks import BlockMap
from kvtier_client.vllm.link import Link
from kvtier_client.vllm.messages import Load, Pages, Step
from kvtier_client.vllm.naming import page_key, variant
from kvtier_client.vllm.options import Options
from kvtier_client.vllm.stats import Tally

logger = logging.getLogger(__name__)

_LOADERS = 4
_PATIENCE = 0.05
"""Seconds that a step waits for saves whose copies have not begun, before it takes them back."""
_MOST_WAITING = 4096
"""Saves that may wait. Beyond, the daemon cannot keep up, and they are dropped."""
_SAVE_TIMEOUT = 2.0
_WAITING, _COPYING, _DONE, _DROPPED = range(4)


@dataclass(frozen=True, slots=True)
class Cache:
    """One group on this rank: its blocks, and the namespace of its pages without an adapter."""

    blocks: BlockMap
    space: Namespace


class Results(NamedTuple):
    """What loads came to since the last look: requests whose load is over, blocks that could not be filled, and requests
    they are of."""

    finished: set[str]
    missing: set[int]
    failed: set[str]


@dataclass(slots=True)
class _Saving:
    """One run of pages on its way. `ready` is a GPU event after which the blocks are computed."""

    run: Pages
    lora: str
    generation: str
    ready: Any
    state: int = _WAITING
    changed: threading.Condition = field(default_factory=threading.Condition)

    def advance(self, state: int) -> bool:
        """Whether it got there: what was dropped stays so."""
        with self.changed:
            if self.state in (_DONE, _DROPPED):
                return False
            self.state = state
            self.changed.notify_all()
            return True

    def reads(self) -> bool:
        """Whether it may yet read its blocks."""
        return self.state in (_WAITING, _COPYING)

    def settle(self, patience: float) -> None:
        """Return when its blocks are not read any more: copied, or taken back where the copy has not begun in time."""
        with self.changed:
            self.changed.wait_for(lambda: self.state != _WAITING, patience)
            self.changed.wait_for(lambda: self.state != _COPYING)
            if self.state == _WAITING:
                self.state = _DROPPED


class Worker:
    """The caches of one rank by group, and the threads that copy. `save` and `load` say what this engine may do."""

    def __init__(
        self, caches: Mapping[int, Cache], options: Options, link: Link, tally: Tally, *, saves: bool, loads: bool
    ) -> None:
        self._caches = caches
        self._options = options
        self._link = link
        self._tally = tally
        self._saves, self._loads = saves, loads
        self._device = next(iter(caches.values())).blocks.device
        gpu = self._device.type == "cuda"
        self._streams = (torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)) if gpu else (None, None)
        self._begun = -1
        self._before: Any = None
        self._reading: dict[int, list[_Saving]] = {}
        self._waiting: queue.SimpleQueue[_Saving | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._finished: set[str] = set()
        self._missing: set[int] = set()
        self._failed: set[str] = set()
        self._told = False
        self._loaders = ThreadPoolExecutor(_LOADERS, "kvtier-load")
        self._saver = threading.Thread(target=self._save_all, name="kvtier-save", daemon=True)
        self._saver.start()

    # What the engine calls, each step in this order

    def begin(self, step: Step) -> None:
        """Before anything of the step is written. Once a step, however often it is called."""
        if step.number == self._begun:
            return
        self._begun = step.number
        if step.loads and self._streams[0] is not None:
            self._before = torch.cuda.current_stream(self._device).record_event()
        if not self._reading:
            return
        pending = {id(job): job for block in step.written for job in self._reading.get(block, ())}
        deadline = time.monotonic() + _PATIENCE
        waited = False
        for job in pending.values():
            waited = waited or job.reads()
            job.settle(max(0.0, deadline - time.monotonic()))
        if waited:
            self._tally.add(waits=1)
        still = ((block, [job for job in jobs if job.reads()]) for block, jobs in self._reading.items())
        self._reading = {block: jobs for block, jobs in still if jobs}

    def start_loads(self, step: Step) -> None:
        for load in step.loads if self._loads else ():
            self._loaders.submit(self._load, load, step.generation, self._before)

    def start_saves(self, step: Step) -> None:
        """After the kernels of the step were given to the current stream."""
        if not step.saves or not self._saves:
            return
        ready = torch.cuda.current_stream(self._device).record_event() if self._streams[0] is not None else None
        for save in step.saves:
            for run in (one for one in save.pages if one.group in self._caches):
                if self._waiting.qsize() >= _MOST_WAITING:
                    self._tally.add(dropped_pages=len(run.hashes))
                    continue
                job = _Saving(run, save.lora, step.generation, ready)
                for block in (one for page in run.blocks for one in page):
                    self._reading.setdefault(block, []).append(job)
                self._waiting.put(job)

    def results(self) -> Results:
        """Each load's, once. A block is in `missing` no later than its request is in `finished`."""
        with self._lock:
            taken = Results(self._finished, self._missing, self._failed)
            self._finished, self._missing, self._failed = set(), set(), set()
        return taken

    def close(self) -> None:
        """Let the threads end; what is not saved yet is not."""
        self._loaders.shutdown(wait=True, cancel_futures=True)
        self._waiting.put(None)
        self._saver.join(_SAVE_TIMEOUT + 3)

    # Loads, on threads of their own

    def _load(self, load: Load, generation: str, before: Any) -> None:
        started = time.perf_counter()
        missing: set[int] = set()
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            for run in (one for one in load.pages if one.group in self._caches):
                try:
                    missing |= self._fill(load, run, generation, before)
                except Exception as error:  # noqa: BLE001 - whatever it is, vLLM computes these tokens
                    missing |= {block for page in run.blocks for block in page if block >= 0}
                    self._complain("a load failed, and its tokens are computed", error)
        finally:
            self._tally.add(loads=1, load_seconds=time.perf_counter() - started, failed_loads=bool(missing))
            with self._lock:  # last: what is over has been counted
                self._missing |= missing
                if missing:
                    self._failed.add(load.request)
                self._finished.add(load.request)

    def _fill(self, load: Load, run: Pages, generation: str, before: Any) -> set[int]:
        """Fill what can be had of a run; the blocks that could not be."""
        cache = self._caches[run.group]
        space = self._space(cache, load.lora, generation)
        keys = [page_key(space.seed, digest, run.first + n) for n, digest in enumerate(run.hashes)]
        wanted = [block for page in run.blocks for block in page if block >= 0]
        numbers: list[int] = []
        units: list[int] = []
        with space.borrow(keys, timeout=self._options.wait) as lease, lease.attachment.hold():
            for page, page_blocks in zip(lease.pages, run.blocks, strict=False):
                for address, block in zip(self._units(page), page_blocks, strict=True):
                    if block >= 0:
                        numbers.append(block)
                        units.append(address)
            self._copy(cache, numbers, units, load=True, after=before)
            if not lease.attachment.alive():  # the lease may have ended meanwhile, and the frames be another's
                return set(wanted)
        self._tally.add(
            loaded_bytes=len(numbers) * cache.blocks.unit_bytes,
            loaded_tokens=len(numbers) * cache.space.layout.unit_tokens,
        )
        return set(wanted[len(numbers) :])

    # Saves, on one thread, since a page follows the page before it

    def _save_all(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (job := self._waiting.get()) is not None:
            started = time.perf_counter()
            kept = 0
            try:
                kept = self._keep(job)
            except Exception as error:  # noqa: BLE001 - a page less, and the engine goes on
                self._complain("pages are not saved", error)
            finally:
                job.advance(_DONE)
                self._tally.add(dropped_pages=len(job.run.hashes) - kept, save_seconds=time.perf_counter() - started)

    def _keep(self, job: _Saving) -> int:
        """Save a run of pages; how many are kept now, by whomever."""
        run = job.run
        cache = self._caches[run.group]
        space = self._space(cache, job.lora, job.generation)
        keys = [page_key(space.seed, digest, run.first + n) for n, digest in enumerate(run.hashes)]
        parent = page_key(space.seed, run.before, run.first - 1) if run.first else space.seed
        kept = 0
        while kept < len(keys) and job.state != _DROPPED:
            first = run.first + kept
            with space.reserve(keys[kept:], start=first, parent=parent, timeout=_SAVE_TIMEOUT) as reservation:
                status, numbers = reservation.status, reservation.numbers
                if not status:
                    break
                if numbers:
                    chosen = [block for number in numbers for block in run.blocks[number - run.first]]
                    with reservation.attachment.hold():
                        units = [unit for page in reservation.pages for unit in self._units(page)]
                        if not job.advance(_COPYING):
                            break
                        self._copy(cache, chosen, units, load=False, after=job.ready)
                        job.advance(_DONE if kept + len(status) == len(keys) else _WAITING)
                    saved = reservation.commit().count(GRANTED)
                    self._tally.add(saved_pages=saved, saved_bytes=len(chosen) * cache.blocks.unit_bytes)
                self._tally.add(known_pages=len(status) - len(numbers))
                kept += len(status)
                parent = keys[kept - 1]
        return kept

    # What both need

    def _space(self, cache: Cache, lora: str, generation: str) -> NamespaceClient:
        return self._link.space(variant(cache.space, lora, generation))

    def _units(self, page: PageView) -> list[int]:
        start = page.address if self._streams[0] is None else page.device_address
        stride = page.holder.layout.unit_stride
        return [start + stride * unit for unit in range(page.units)]

    def _copy(self, cache: Cache, numbers: list[int], units: list[int], *, load: bool, after: Any) -> None:
        """Done on return."""
        stream = self._streams[load]
        if stream is not None and after is not None:
            stream.wait_event(after)
        copies.copy(cache.blocks, numbers, units, load=load, stream=stream)
        if stream is not None:
            stream.record_event().synchronize()

    def _complain(self, what: str, error: Exception) -> None:
        """Misses are not news; the first loss of the daemon is, and what is no error of kvtier's always."""
        if not isinstance(error, KvtierError):
            logger.exception("kvtier: %s", what)
        elif not self._told:
            self._told = True
            logger.warning("kvtier: %s (%s); this is said once", what, error)
