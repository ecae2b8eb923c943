"""The state of the daemon: which page is in which frame of which tier, and every change of that.

One thread owns a `Store`. It decides and never does I/O: copies, slabs and index entries are jobs, handed to `submit`
and brought back to `finish` when a mover has done them. So the whole of it runs, and is tested, with no thread at all.

    commit ──► READY in a tier ──write-through──► unsaved ──pump──► Copy ──► Record ──► READY in the tier below
    borrow ──► fetch ──► Copy from the fastest replica ──► READY, pinned by the borrow that waits
    no frame free ──► `kvtier_daemon.room`

Who waits for what is in `kvtier_daemon.operations`; sessions and leases are in `kvtier_daemon.sessions`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvtier.errors import KvtierError
from kvtier_daemon.counters import Counters
from kvtier_daemon.directory import Directory, OpenNamespace, Page, Tenant
from kvtier_daemon.jobs import Barrier, Copy, Erase, Grow, Job, Priority, Record, Shrink
from kvtier_daemon.room import Room
from kvtier_daemon.slabs import FILLING, READY, Frame, SlabClass, State
from kvtier_daemon.tiers import Tier

if TYPE_CHECKING:
    from kvtier_daemon.operations import Operation

STALLED = 2.0
"""Seconds in which a tier finished no copy from above, though some were wanted, after which nobody waits for it."""
GPU_WINDOW = 256 << 20
"""Bytes of write-through from a GPU that are under way at once: its link is not kept waiting for this thread."""
AT_ONCE = 128
"""Jobs, or pages of their runs, handed to the movers together: first so that a link is soon at work. What follows at once is
handed over by twice as many each time, for each hand-over costs both sides."""
_REASONS = tuple(priority.name.lower() for priority in Priority)
EVICTION_REASONS = ("demoted", "evicted", "unsaved", "vacated", "moved", "asked", "lost", "last")


class SourceLost(KvtierError):
    """A copy failed because its source cannot be read or has the wrong bytes."""

    code = "source_lost"


class WrongBytes(SourceLost):
    """It has the wrong bytes."""


class MediumLost(KvtierError):
    """A job failed because its tier's medium is gone for good, with all that it held."""

    code = "medium_lost"


class Store:
    """Directory, tiers and the moves between them. `publish` is told of pages that came ("stored") or went
    ("removed")."""

    def __init__(self, directory: Directory, tiers: list[Tier], submit: Callable[[list[Job]], None]) -> None:
        self.directory = directory
        self.tiers = tiers
        self.submit = submit
        self.counters = Counters(len(tiers))
        self.runnable: deque[Operation] = deque()
        self.postponed: list[Operation] = []
        """Operations that have more to do, once others have had their turn."""
        self.publish: Callable[[str, Page], None] = lambda event, page: None
        self.clock: Callable[[], float] = time.monotonic
        self.tick = 0
        self.room = Room(self)
        self.jobs = 0
        self._outbox: list[Job] = []
        self._posted = 0
        """Jobs and pages in the outbox."""
        self._at_once = AT_ONCE
        self._run: Copy | None = None
        """The run in the outbox that may still grow."""
        self.onward: dict[Frame, list[tuple[Frame, Priority]]] = {}
        """FILLING frames from which a page goes on, as soon as it is there, to others taken for it already."""
        self.starved: SlabClass | None = None
        self.flushing = False
        """Whether everything is to be saved, whatever a queue's bound says."""
        self.watchers: list[Operation] = []
        """Operations that look again at every beat."""
        self._rated = self.clock()

    # Frames and who may have them

    def class_of(self, tier: Tier, tenant: Tenant, nbytes: int) -> SlabClass:
        return tier.slab_class(tenant, nbytes)

    def take(self, owner: SlabClass, state: State) -> Frame | None:
        """A frame of `owner` in `state`, or None: then one may come free later (`owner.waiters` are woken)."""
        frame = owner.take(state)
        if frame is None:
            self.room.make(owner)
            frame = owner.take(state)
        if len(owner.free) < owner.low:
            self.room.make_ahead(owner)
        return frame

    def give(self, frame: Frame) -> None:
        """Free a frame that holds nothing any more."""
        owner, slab = frame.slab.owner, frame.slab
        owner.give(frame)
        if slab.leaving and slab.busy == 0:
            self.room.emptied(slab)
        self.wake(owner)

    def wake(self, owner: SlabClass) -> None:
        """Let the operation that waits longest for a frame of `owner` try again."""
        while owner.waiters:
            operation = owner.waiters.popleft()
            if not operation.done:
                self.runnable.append(operation)
                return

    def pin(self, frame: Frame) -> None:
        """Hold a READY or FILLING frame where it is."""
        if not frame.pins and frame.state is READY:
            owner = frame.slab.owner
            owner.lru.discard(frame)
            owner.leased += 1
        frame.pins += 1

    def unpin(self, frame: Frame) -> None:
        frame.pins -= 1
        assert frame.pins >= 0
        if not frame.pins and frame.state is READY:
            frame.slab.owner.leased -= 1
            self.settle(frame)
            self.wake(frame.slab.owner)

    def touch(self, run: list[Page]) -> None:
        """`run`, a piece of one chain, was used just now: it becomes the most recent, its head more so than its tail."""
        if run:
            self.renew(run[-1])
            self.use(run)

    def use(self, run: list[Page]) -> None:
        """Count a use of each page, and save those that waited for their second."""
        for page in run:
            page.uses += 1
            if page.uses == 2:
                self._write_through(page)

    def renew(self, page: Page | None) -> None:
        """Make `page` and all before it the most recent, wherever they are: a prefix must not leave before its tail."""
        self.tick = tick = self.tick + 1
        while page is not None:
            for frame in page.frames:
                if frame is not None:
                    frame.touched = frame.slab.touched = tick
                    if frame.listed:
                        frame.slab.owner.lru.renew(frame)
            page = page.parent

    # Pages and their replicas

    def seal(
        self, frame: Frame, key: bytes, namespace: OpenNamespace, number: int, parent: Page | None, *, pinned: bool
    ) -> Page:
        """Publish what a worker wrote in the RESERVED `frame` as page `key`; `pinned`, it stays where it is."""
        page = self.directory.publish(key, namespace, number, parent)
        frame.pins += pinned
        page.enter(frame)
        frame.become(READY)
        self.tick += 1
        frame.touched = frame.slab.touched = self.tick
        self.counters.commits += 1
        self.counters.committed_tokens += page.tokens
        self.publish("stored", page)
        self.settle(frame)
        self._write_through(page)
        return page

    def fetch(self, page: Page, tier: Tier, priority: Priority) -> Frame | None:
        """The frame of `page` in `tier`: READY, or FILLING by a copy that this starts or hurries.

        A replica that no single copy can bring there is copied in two steps, through memory that both ends reach. None
        while no frame can be had (`starved` is the class that had none), and where there is no replica to copy.
        """
        frame = page.frames[tier.index]
        if frame is not None:
            job = frame.copy
            if job is not None and job.priority > priority and not job.taken:
                job.priority = priority
                self._hand_over(job)
            return frame
        source = page.in_reach(tier)
        if page.gone or (source is None and page.ready() is None):
            return None
        held = source or self.fetch(page, self._between(page, tier), priority)
        if held is None:
            return None
        held.copies += 1  # or making room could drop the very source
        owner = self.class_of(tier, page.namespace.tenant, page.nbytes)
        target = self.take(owner, FILLING)
        held.copies -= 1
        if held.state is READY and (page.gone or held.slab.leaving):
            self.settle(held)
        if target is None:
            self.starved = owner
        elif page.gone:
            self.give(target)
            return None
        elif source is not None:
            self._copy(page, source, target, priority)
        else:
            page.enter(target)
            self.onward.setdefault(held, []).append((target, priority))
        return target

    def follow(self, frame: Frame, pages: list[Page], start: int, stop: int) -> list[Frame]:
        """`fetch` has begun a copy to `frame`: the frames of those of `pages[start:stop]` that go by the same, one after the
        other, until there is something to decide: each lies beside the one before, and so does a frame for it, with more to
        spare."""
        run, owner = self._run, frame.slab.owner
        if run is None or run.targets[-1] is not frame:
            return []
        fitting = (run.longest - run.nbytes) // owner.frame_bytes
        most = min(stop - start, len(owner.free) - owner.low, fitting, self._at_once - self._posted)
        sources = run.beside(pages, start, start + most)
        targets = owner.take_beside(frame, len(sources))
        if targets:
            followers = pages[start : start + len(targets)]
            del sources[len(targets) :]
            for number, target in enumerate(targets):
                followers[number].enter(target)
                sources[number].copies += 1
                target.copy = run
            run.extend(followers, sources, targets)
            self._more(len(targets))
        return targets

    def forget(self, page: Page, reason: str) -> int:
        """Unpublish `page` and all that follow it. Frames that someone holds or copies are freed later. How many."""
        for index, frame in enumerate(page.frames):
            if frame is not None:
                page.left(index)
        members = self.directory.unpublish(page)
        for member in members:
            self._unqueue(member)
            self.publish("removed", member)
            for frame in member.frames:
                if frame is not None and frame.state is READY and not frame.pins and not frame.copies:
                    self.drop(frame)
            self._wake_page(member)
        self.counters.evicted(reason, len(members))
        return len(members)

    def shed(self, frames: Iterable[Frame | None]) -> None:
        """Drop those replicas that nobody holds and whose pages are in another tier too."""
        dropped = 0
        for frame in frames:
            if frame is None or frame.state is not READY or frame.pins or frame.copies or frame.page is None:
                continue
            if self.replicas(frame.page) > 1:
                self.drop(frame)
                dropped += 1
        if dropped:
            self.counters.evicted("moved", dropped)

    def replicas(self, page: Page) -> int:
        """In how many tiers the page could be read now."""
        return sum(frame is not None and frame.state is READY for frame in page.frames)

    # Jobs

    def finish(self, job: Job) -> None:
        """Take note of a job that a mover has run, well or not."""
        self.jobs -= 1
        match job:
            case Copy():
                self._finish_copy(job)
            case Record():
                self._finish_record(job)
            case Erase():
                self._finish_erase(job)
            case Grow():
                self.room.grown(job)
            case Shrink():
                if job.error is None:
                    job.tier.account(job.slab.owner.tenant, -job.slab.nbytes)
                    self.wake_all(job.tier)
                else:
                    self._close(job.tier)
            case Barrier():
                job.done = True
                if job.waiter is not None:
                    self.runnable.append(job.waiter)
            case _:
                pass

    def run(self) -> None:
        """Let everything go on that can: woken operations, then copies to the tiers below. Call after any change, and
        again soon while there are `postponed` ones."""
        self.runnable.extend(self.postponed)
        self.postponed.clear()
        while True:
            while self.runnable:
                operation = self.runnable.popleft()
                if not operation.done:
                    operation.advance()
            for tier in self.tiers:
                if tier.unsaved:
                    self.pump(tier)
            if not self.runnable:
                break
        self.send()
        if not self.postponed:
            self._at_once = AT_ONCE

    def beat(self) -> None:
        """Now and then (about 20 times a second while anything waits): measure demand, let waiters look again."""
        now = self.clock()
        elapsed, self._rated = max(1e-3, now - self._rated), now
        for tier in self.tiers:
            self._make_way(tier)
            for owner in tier.classes.values():
                owner.forecast(elapsed)
                self.wake(owner)
            if tier.unsaved and self.stalled(tier):
                self._give_up(tier)
        self.watchers = [watcher for watcher in self.watchers if not watcher.done]
        self.runnable.extend(self.watchers)

    def _make_way(self, tier: Tier) -> None:
        """Who waits for frames of `tier` holds others meanwhile. If none of them has got on since the last beat, only the
        first to come keeps what it holds, and goes on first: they could wait for each other until their deadlines."""
        before = tier.waiting
        tier.waiting = {
            operation: operation.holds()
            for owner in tier.classes.values()
            for operation in owner.waiters
            if not operation.done
        }
        if len(tier.waiting) < 2 or tier.waiting != before:
            return
        first = min(tier.waiting, key=lambda operation: operation.number)
        for operation in tier.waiting:
            if operation is not first and operation.holds():
                operation.let_go()
        self.runnable.appendleft(first)

    def _give_up(self, tier: Tier) -> None:
        """`tier` is stalled: what has to leave its slab now is lost rather than waited for."""
        for page in list(tier.unsaved):
            leaving = any(
                frame is not None and frame.slab.leaving and not frame.pins and not frame.copies
                for frame in page.frames
            )
            if leaving and not page.gone:
                self.forget(page, "unsaved")

    def wake_all(self, tier: Tier) -> None:
        for owner in tier.classes.values():
            self.wake(owner)

    def pump(self, tier: Tier) -> None:
        """Start copies of unsaved pages to `tier`, as many as its movers take at once."""
        most = 2 * tier.config.queue_depth
        while tier.unsaved:
            page = next(iter(tier.unsaved))
            source = page.in_reach(tier)
            if source is None or page.frames[tier.index] is not None:
                self._unqueue(page, tier)
                continue
            if tier.writing >= most and not (source.tier.device and tier.writing * page.nbytes < GPU_WINDOW):
                return
            target = self.take(self.class_of(tier, page.namespace.tenant, page.nbytes), FILLING)
            if target is None:
                return
            self._unqueue(page, tier)
            if page.gone or page.frames[tier.index] is not None:
                self.give(target)
                continue
            tier.writing += 1
            self._copy(page, source, target, Priority.WRITE, background=True)

    def save(self, page: Page, tier: Tier, *, first: bool = False) -> None:
        """Queue a copy of `page` to `tier`, whatever admission and queue say; `first` before all others."""
        if page not in tier.unsaved:
            if not tier.unsaved and not tier.writing:
                tier.progressed = self.clock()
            tier.unsaved[page] = None
            tier.unsaved_bytes += page.nbytes
        if first:
            tier.unsaved.move_to_end(page, last=False)

    def post(self, job: Job) -> None:
        self.jobs += 1
        self._hand_over(job)

    def _hand_over(self, job: Job) -> None:
        """Movers get jobs many at a time: each hand-over wakes threads, which then want this one's interpreter lock."""
        self._outbox.append(job)
        self._more(1)

    def _more(self, count: int) -> None:
        self._posted += count
        if self._posted >= self._at_once:
            self.send()
            self._at_once *= 2

    def send(self) -> None:
        """Hand the jobs that were posted so far to the movers."""
        if self._outbox:
            outbox, self._outbox, self._posted, self._run = self._outbox, [], 0, None
            self.submit(outbox)

    def check(self) -> None:
        """Assert every invariant of directory, tiers and slabs."""
        self.directory.check()
        for tier in self.tiers:
            tier.check()

    def stalled(self, tier: Tier) -> bool:
        """Whether a page had better be lost than kept from leaving until `tier` has a copy of it."""
        return tier.closed or self.clock() - tier.progressed > STALLED

    def settle(self, frame: Frame) -> None:
        """Put a READY frame where it belongs: in the recency order, or out."""
        if frame.pins:
            return
        page = frame.page
        assert page is not None
        if page.gone:
            if not frame.copies:
                self.drop(frame)
        elif frame.slab.leaving:
            if not frame.copies:
                self.room.leave(frame)
        else:
            frame.slab.owner.lru.add(frame)

    def drop(self, frame: Frame) -> None:
        """Take a replica that nobody holds out of its tier, and forget the page if it was the last."""
        page = frame.page
        assert page is not None and not frame.pins and not frame.copies
        page.leave(frame)
        if frame.tier.persistent:
            frame.become(State.DRAINING)
            self.post(Erase(page.namespace.tenant.name, page.namespace.seed, page.key, frame))
        else:
            self.give(frame)
        if not page.gone and not any(page.frames):
            self.forget(page, "last")

    def _between(self, page: Page, tier: Tier) -> Tier:
        """A tier through which `page` gets to `tier`."""
        source = page.ready()
        assert source is not None
        return next(step for step in self.tiers if step.reaches(tier) and step.reaches(source.tier))

    def _copy(self, page: Page, source: Frame, target: Frame, priority: Priority, *, background: bool = False) -> None:
        page.enter(target)
        self._start(page, source, target, priority, background=background)

    def _start(self, page: Page, source: Frame, target: Frame, priority: Priority, *, background: bool = False) -> None:
        source.copies += 1
        run = self._run
        if (
            run is not None
            and run.priority is priority
            and run.background is background
            and run.add(page, source, target)
        ):
            target.copy = run
            self._more(1)
            return
        job = target.copy = Copy(page, source, target, priority, background=background)
        self.post(job)
        # A disk has threads for each page, and no run.
        if self._outbox and not (source.tier.persistent or target.tier.persistent):
            self._run = job

    def _finish_copy(self, job: Copy) -> None:
        tier = job.tier
        if job.background:
            tier.writing -= len(job.pages)
        tier.progressed = self.clock()
        path = (job.origin.index, tier.index, _REASONS[job.priority])
        self.counters.moved(path, len(job.pages), job.nbytes, job.seconds, job.error)
        for target in job.targets:
            target.copy = None
        if job.error is None and not tier.persistent:
            self._arrived(job.targets)
        for number, page in enumerate(job.pages):
            source, target = job.sources[number], job.targets[number]
            if job.error is None and tier.persistent and not page.gone:
                target.touched = max(target.touched, source.touched)  # which the index keeps
                self.post(Record(page, source, target))  # the source stays held until the copy is recorded
                continue
            source.copies -= 1
            if job.error is not None or tier.persistent:
                self._failed(job.error, page, source, target)
            self._released(page, source)

    def _failed(self, error: Exception | None, page: Page, source: Frame, target: Frame) -> None:
        """A copy to `target` came to nothing; without an error, because the page is gone."""
        self._discard(target)
        if isinstance(error, MediumLost):
            self._lose(source.tier if source.tier.index < target.tier.index else target.tier)
        elif isinstance(error, SourceLost):
            self.counters.lost += 1
            self.counters.checksum_failures += isinstance(error, WrongBytes)
            if source.page is page and source.state is READY and not source.pins and not source.copies:
                self.drop(source)
            elif not page.gone:
                self.forget(page, "lost")
        elif source.slab.leaving and not page.gone:
            self.forget(page, "vacated")

    def _released(self, page: Page, source: Frame) -> None:
        """A copy of `page` reads `source` no more. It is in the recency order still, unless it was only kept for the copy."""
        kept = page.gone or source.slab.leaving
        if kept and not source.pins and source.page is page and source.state is READY:
            self.settle(source)
        owner = source.slab.owner
        if owner.waiters:
            self.wake(owner)
        if page.waiters:
            self._wake_page(page)

    def _finish_record(self, job: Record) -> None:
        job.source.copies -= 1
        if job.error is None:
            self._arrived([job.target])
        else:
            self._discard(job.target)
            if job.source.slab.leaving and not job.page.gone:
                self.forget(job.page, "vacated")
        self._released(job.page, job.source)

    def _arrived(self, run: list[Frame]) -> None:
        """A copy to these frames of one slab is complete (and, in a persistent tier, recorded)."""
        slab = run[0].slab
        slab.owner.filled(run)
        below = slab.owner.tier.below
        for frame in run:
            page = frame.page
            assert page is not None
            for other in page.frames:
                if other is not None and other.touched > frame.touched:
                    frame.touched = other.touched
            slab.touched = max(slab.touched, frame.touched)
            if self.onward:
                self._go_on(page, frame)
            if not frame.pins:
                self.settle(frame)
            if below is not None and not page.gone and page.frames[below.index] is None:
                self._write_through(page)

    def _go_on(self, page: Page, frame: Frame) -> None:
        """Copy `page`, which has come to `frame`, to where else it is wanted."""
        for target, priority in self.onward.pop(frame, ()):
            if page.gone:
                self._discard(target)
            else:
                self._start(page, frame, target, priority)

    def _lose(self, tier: Tier) -> None:
        """Nothing can be read from `tier` any more: its replicas are gone, but for those that someone holds."""
        if tier.closed:
            return
        tier.closed = True
        for slab in list(tier.slabs.values()):
            for frame in slab.frames:
                if frame.state is READY and not frame.pins and not frame.copies:
                    self.drop(frame)

    def _discard(self, target: Frame) -> None:
        """A copy into `target` failed. Those who waited for it find the page without it."""
        page = target.page
        assert page is not None
        for further, _ in self.onward.pop(target, ()):
            self._discard(further)
        page.leave(target)
        target.pins = 0
        self.give(target)

    def _finish_erase(self, job: Erase) -> None:
        if job.error is None:
            self.give(job.frame)
        else:
            self._close(job.frame.tier)  # the frame stays DRAINING: the index may still name it

    def _close(self, tier: Tier) -> None:
        """`tier` takes no new pages any more; what waited for it goes on without."""
        tier.closed = True
        for page in list(tier.unsaved):
            self._unqueue(page, tier)
            for frame in page.frames:
                if frame is not None and frame.state is READY and frame.slab.leaving:
                    self.settle(frame)

    def _write_through(self, page: Page) -> None:
        """Queue copies of `page` to the tier below each that holds it, as admission and the queue's bound allow."""
        frames = page.frames
        for frame in frames:
            if frame is None or frame.state is not READY:
                continue
            below = frame.tier.below
            if below is None or frames[below.index] is not None or below.closed:
                continue
            if (below.second_use and page.uses < 2) or (below.unsaved and page in below.unsaved):
                continue
            if not below.fits(page.namespace.tenant, page.nbytes):
                continue
            if not below.queues(page.nbytes) and not self.flushing:
                self.counters.unsaved += 1
                continue
            self.save(page, below)

    def _unqueue(self, page: Page, tier: Tier | None = None) -> None:
        """`page` needs no copy to `tier` (none: to any) any more."""
        for each in self.tiers if tier is None else (tier,):
            if page in each.unsaved:
                del each.unsaved[page]
                each.unsaved_bytes -= page.nbytes

    def _wake_page(self, page: Page) -> None:
        if page.waiters:
            self.runnable.extend(page.waiters)  # type: ignore[arg-type]
            page.waiters = None
