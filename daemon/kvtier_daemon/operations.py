"""Requests that may have to wait: for a copy, for a frame, for the index. Each ends by its deadline at the latest.

An operation is tried at once (`advance`) and again whenever something that it waits for has changed; `expire` is its
deadline, `cancel` the end of its session or its owner's change of mind. It answers exactly once, then is `done`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable

from kvtier import keys as page_keys
from kvtier.errors import Cancelled, KvtierError, OutOfPages
from kvtier.sizes import format_size
from kvtier.wire import BUSY, EXISTS, GRANTED, HANDLE_BYTES, Body, Borrowed, Count, Pinned, Reserved
from kvtier_daemon.directory import OpenNamespace, Page, Tenant
from kvtier_daemon.jobs import Barrier, Priority, longest
from kvtier_daemon.placement import leave_crowded, place, rise
from kvtier_daemon.sessions import Reservation, Session, Sessions, Slot
from kvtier_daemon.slabs import READY, Frame, SlabClass, State
from kvtier_daemon.store import AT_ONCE, Store
from kvtier_daemon.tiers import Tier

Answer = Callable[[Body | KvtierError], None]
_numbers = itertools.count()
_LOOKED_UP = 2 * AT_ONCE * page_keys.KEY_BYTES
"""Bytes of keys that are looked up together."""
_TURN = 4 * AT_ONCE
"""Pages that a long request asks for at most before others have their turn."""


class Operation:
    """Base: answers once."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.number = next(_numbers)
        """Who came first has the lowest."""
        self.done = False
        self.space: OpenNamespace | None = None
        """Where it is going to write."""
        self.spent: dict[str, float] | None = None
        """Seconds waited so far by what for; None while nothing had to be waited for."""
        self._waiting = ("", 0.0)

    def waits(self, reason: str) -> None:
        """From now on it waits for that ("": for nothing more)."""
        before, since = self._waiting
        self._waiting = (reason, time.monotonic())
        if self.spent is None:
            self.spent = {}
        if before:
            self.spent[before] = self.spent.get(before, 0.0) + self._waiting[1] - since

    def advance(self) -> None:
        """Go as far as possible now."""
        raise NotImplementedError

    def expire(self) -> None:
        """The deadline has come: answer with what there is."""
        raise NotImplementedError

    def holds(self) -> int:
        """Frames that nobody else can have while it waits for one more."""
        return 0

    def let_go(self) -> None:
        """Give them up. Woken, it begins anew."""

    def cancel(self) -> None:
        """Give everything back and answer `Cancelled`."""
        self.finish(Cancelled("the request was taken back"))

    def finish(self, result: Body | KvtierError) -> None:
        if not self.done:
            self.done = True
            if self.spent is not None:
                self.waits("")
            self.answer(result)


class Borrowing(Operation):
    """Lease the longest leading run of `pages`, and of those under the packed keys `rest`, that can be had in `tier` (None:
    wherever workers can read it). Keys are looked up in turns too: a link need not wait until the last of them is found.

    Every frame is pinned as soon as it is found or its copy is started, so that nothing that arrives is lost to
    another borrow before the run is complete.
    """

    counted = True
    """Whether it is a worker's request, and so a hit or a miss."""

    def __init__(
        self,
        sessions: Sessions,
        session: Session,
        pages: list[Page],
        tier: Tier | None,
        answer: Answer,
        rest: bytes = b"",
    ) -> None:
        super().__init__(answer)
        self.sessions = sessions
        self.store = sessions.store
        self.session = session
        self.pages = pages
        self.rest = memoryview(rest)  # cut many times, without copying it
        self.tier = tier
        self.held: list[Frame] = []
        self.generations: list[int] = []
        self.origins: list[int] = []
        """Of the frames held; the tiers that the pages were found in, by index."""
        self.handles = bytearray()
        """Of the frames held, as far as they are packed, for a worker: turn by turn, rather than when the last has come."""
        self.pace = AT_ONCE
        """Pages to ask for before others have their turn; more from turn to turn."""
        self.arrived = 0
        self.used = 0
        """Pages of which the use has been counted."""
        self.starved: SlabClass | None = None
        self.first = pages[0] if pages else None
        self.asked = len(pages) + page_keys.count(rest)
        """Pages that the request named, whether they are held or not."""

    def advance(self) -> None:
        self.starved = None
        store, before = self.store, len(self.held)
        turn = before + self._turn()
        while self._more():
            if len(self.held) == turn:
                self._use()
                store.postponed.append(self)
                if not before:  # its link may be idle, whatever else there is to do
                    store.send()
                return
            page = self.pages[len(self.held)]
            there = page.frames[self.tier.index] if self.tier is not None else None
            if there is not None and there.state is READY and not page.gone:
                self._hold(there, there.tier)
                continue
            found = page.ready()
            if page.gone or found is None:
                self._cut(len(self.held))
                break
            tier = place(store, page, self.tier, self.session.readable if self.counted else frozenset())
            frame = store.fetch(page, tier, Priority.BORROW)
            if frame is None:
                if page.gone or page.ready() is None:
                    continue
                assert store.starved is not None
                self.starved = store.starved
                if len(self.pages) - len(self.held) < _TURN:
                    self._look_up()
                ahead = (page.nbytes for page in itertools.islice(self.pages, len(self.held), None))
                wait_for(store, self, self.starved, ahead)
                break
            self._hold(frame, found.tier)
            if tier is self.tier:
                for following in store.follow(frame, self.pages, len(self.held), min(turn, len(self.pages))):
                    self._hold(following, found.tier)
        if not self._more():
            self._use()  # while the copies are under way, rather than when the last of them has come
        self._count_arrived()
        if self.arrived == len(self.pages) and not self.rest:
            self._grant()

    def expire(self) -> None:
        if not self.done and not self.held:
            self.advance()  # it may have let go of what is still there
        if self.done:
            return
        self._count_arrived()
        if not self.arrived and self.starved is not None and not self.held:
            self.store.counters.out_of_pages += 1
            self.finish(starvation(self.starved, self.asked))
            return
        self._cut(self.arrived)
        self._grant()

    def cancel(self) -> None:
        if not self.done:
            self._cut(0)
            super().cancel()

    def finish(self, result: Body | KvtierError) -> None:
        if not self.done and self.counted and self.first is not None:
            lent = 0 if isinstance(result, KvtierError) else len(self.pages)
            missed = self.asked - lent
            tokens = self.first.namespace.schedule.tokens(self.first.number + lent, missed) if missed else 0
            self.store.counters.asked(self.asked, tokens)
        super().finish(result)

    def result(self) -> Body:
        lease = self.sessions.grant(self.session, self.held)
        return Borrowed(lease, bytes(self.handles), bytes(self.origins))

    def holds(self) -> int:
        return len(self.held) if self.starved is not None else 0

    def let_go(self) -> None:
        self._release(0)
        self.arrived = 0

    def _hold(self, frame: Frame, origin: Tier) -> None:
        self.store.pin(frame)
        self.held.append(frame)
        self.generations.append(frame.generation)
        self.origins.append(origin.index)

    def _more(self) -> bool:
        """Whether there is a page to ask for next."""
        if len(self.held) == len(self.pages):
            self._look_up()
        return len(self.held) < len(self.pages)

    def _look_up(self) -> None:
        """Find the pages under the next keys of `rest`, if there are any."""
        if not self.rest:
            return
        keys = page_keys.split(bytes(self.rest[:_LOOKED_UP]))
        found = self.session.tenant.run(keys)
        self.pages += found
        self.rest = self.rest[_LOOKED_UP:] if len(found) == len(keys) else self.rest[:0]

    def _turn(self) -> int:
        """How many pages to ask for before others have their turn: some milliseconds of a link, some tenths of one here."""
        page = self.pages[len(self.held)] if self._more() else None
        found = page.ready() if page is not None else None
        if page is None or found is None or self.tier is None:
            return AT_ONCE
        turn = max(AT_ONCE, min(_TURN, self.pace, 4 * longest(found.tier, self.tier) // page.nbytes))
        self.pace = 2 * turn
        return turn

    def _count_arrived(self) -> None:
        while self.arrived < len(self.held):
            page, frame = self.pages[self.arrived], self.held[self.arrived]
            if frame.page is not page or frame.generation != self.generations[self.arrived]:
                self._cut(self.arrived)  # its copy failed
            elif frame.state is READY:
                self.arrived += 1
            else:
                watch(self, page)  # again each time: a page on its way in two steps wakes its waiters at the first
                return

    def _use(self) -> None:
        """Turn by turn too: what is done for thousands of pages at once keeps links and others waiting."""
        if self.used < len(self.held):
            self.store.use(self.pages[self.used : len(self.held)])
            self.used = len(self.held)
        if self.counted:
            self.handles += packed(self.held[len(self.handles) // HANDLE_BYTES :])

    def _cut(self, length: int) -> None:
        """Ask for no more than the first `length` pages."""
        self.rest = self.rest[:0]
        self._release(length)
        del self.pages[length:]

    def _release(self, length: int) -> None:
        """Hold no more than the first `length` pages."""
        for page, frame, generation in zip(
            self.pages[length:], self.held[length:], self.generations[length:], strict=False
        ):
            if frame.page is page and frame.generation == generation:
                self.store.unpin(frame)
        del self.held[length:], self.generations[length:], self.origins[length:]
        del self.handles[length * HANDLE_BYTES :]

    def _grant(self) -> None:
        if self.counted:
            count_hits(self.store, self.pages, self.origins)
        self._use()
        self.finish(self.result())
        self._granted()

    def _granted(self) -> None:
        """What who asked need not wait for."""
        if self.pages:
            self.store.renew(self.pages[-1])
        if self.tier is not None:
            leave_crowded(self.store, self.pages, self.tier)
        elif self.session.home is not None:
            rise(self.store, self.pages, self.session.home)


def at_hand(page: Page, tier: Tier | None, readable: frozenset[int]) -> Frame | None:
    """The frame of `page` that can be lent in `tier` now, with no copy."""
    for frame in page.frames:
        if frame is not None and frame.state is READY and frame.tier.index in readable:
            return frame if tier is None or frame.tier is tier else None
    return None


def lend_at_once(
    sessions: Sessions, session: Session, run: list[Page], tier: Tier | None, asked: int
) -> Borrowed | None:
    """As a `Borrowing` of `run` that has to wait for nothing, which most have not; None where this one has to."""
    store, readable = sessions.store, session.readable
    frames: list[Frame] = []
    for page in run:
        found = at_hand(page, tier, readable)
        if found is None:
            return None
        frames.append(found)
    origins = [frame.tier.index for frame in frames]
    for frame in frames:
        store.pin(frame)
    count_hits(store, run, origins)
    missed = asked - len(run)
    store.counters.asked(asked, run[0].namespace.schedule.tokens(run[0].number + len(run), missed) if missed else 0)
    store.touch(run)
    home = session.home
    if tier is None and home is not None and frames[-1].tier is not home:  # tails leave first: else the run is there
        rise(store, run, home)
    return Borrowed(sessions.grant(session, frames), packed(frames), bytes(origins))


def packed(frames: list[Frame]) -> bytes:
    """Their handles."""
    return b"".join([frame.handle() for frame in frames])


def count_hits(store: Store, pages: list[Page], origins: list[int]) -> None:
    """`pages`, a piece of a chain, are lent to a worker; each was found in the tier of that index."""
    if not pages:
        return
    counters, number, namespace = store.counters, pages[0].number, pages[0].namespace
    namespace.borrowed += len(pages)
    start = 0
    for end in range(1, len(pages) + 1):
        origin = origins[start]
        if end == len(pages) or origins[end] != origin:
            counters.hits[origin] += end - start
            counters.hit_tokens[origin] += namespace.schedule.tokens(number + start, end - start)
            start = end


class Pinning(Borrowing):
    """A borrow that outlives its session, for an operator."""

    counted = False

    def result(self) -> Body:
        pin = self.sessions.new_id()
        self.sessions.pins[pin] = (self.session.tenant, self.held)
        return Pinned(pin, len(self.held))


class Migrating(Borrowing):
    """Bring a run to `tier`; with `move`, leave its pages in no faster tier (where nobody holds them)."""

    counted = False
    move = False

    def result(self) -> Body:
        return Count(len(self.pages))

    def _granted(self) -> None:
        super()._granted()
        for frame in reversed(self.held):
            self.store.unpin(frame)
        there = self.tier
        if self.move and there is not None:
            self.store.shed(
                [
                    other
                    for page in reversed(self.pages)
                    for other in page.frames
                    if other is not None
                    and other.tier is not there
                    and (other.tier.index < there.index or other.tier.device)
                ]
            )


class Prefetching(Operation):
    """Bring a run to `tier`, as far as frames come free or slabs are grown for it; nobody is told, and nothing held."""

    def __init__(self, store: Store, pages: list[Page], tier: Tier) -> None:
        super().__init__(lambda _: None)
        self.store = store
        self.pages = pages
        self.tier = tier
        self.started = 0

    def advance(self) -> None:
        while self.started < len(self.pages):
            page = self.pages[self.started]
            if page.gone or self.store.fetch(page, self.tier, Priority.PREFETCH) is None:
                owner = self.store.class_of(self.tier, page.namespace.tenant, page.nbytes)
                if not page.gone and owner.growing:
                    ahead = (page.nbytes for page in itertools.islice(self.pages, self.started, None))
                    wait_for(self.store, self, owner, ahead)
                    return
                break
            self.started += 1
        self.done = True


class Reserving(Operation):
    """Frames for pages number `first` on: one a page that is neither published nor being written by anyone."""

    def __init__(
        self,
        sessions: Sessions,
        session: Session,
        namespace: OpenNamespace,
        tier: Tier,
        pages: list[tuple[int, bytes, bytes]],
        answer: Answer,
    ) -> None:
        """`pages` are (number, key or b"", key of the page before or b"")."""
        super().__init__(answer)
        self.sessions = sessions
        self.store = sessions.store
        self.session = session
        self.tier = tier
        self.pages = pages
        self.status = bytearray()
        self.reservation = Reservation(sessions.new_id(), namespace)
        self.space = namespace
        self.starved: SlabClass | None = None

    def advance(self) -> None:
        self.starved = None
        tenant, store = self.session.tenant, self.store
        namespace = self.reservation.namespace
        while len(self.status) < len(self.pages):
            number, key, parent = self.pages[len(self.status)]
            if key and key in tenant.pages:
                self.status.append(EXISTS)
                continue
            if key and key in tenant.writing:
                self.status.append(BUSY)
                continue
            owner = store.class_of(self.tier, tenant, namespace.page_bytes(number))
            frame = store.take(owner, State.RESERVED)
            if frame is None:
                self.starved = owner
                ahead = itertools.islice(self.pages, len(self.status), None)
                wait_for(store, self, owner, (namespace.page_bytes(number) for number, _, _ in ahead))
                return
            if key:
                tenant.writing.add(key)
            self.reservation.slots.append(Slot(frame, number, key, parent))
            self.status.append(GRANTED)
        self._grant()

    def expire(self) -> None:
        if not self.done and not self.reservation.slots:
            self.advance()  # it may have let go
        if self.done:
            return
        if self.starved is not None and not self.reservation.slots:
            self.store.counters.out_of_pages += 1
            self.finish(starvation(self.starved, len(self.pages)))
            return
        self._grant()

    def cancel(self) -> None:
        if not self.done:
            self.let_go()
            super().cancel()

    def holds(self) -> int:
        return len(self.reservation.slots)

    def let_go(self) -> None:
        self.sessions.abandon(self.session, self.reservation, self.reservation.slots)
        self.reservation.slots.clear()
        self.status.clear()

    def _grant(self) -> None:
        slots, counters = self.reservation.slots, self.store.counters
        counters.reserved += len(slots)
        counters.exists += self.status.count(EXISTS)
        counters.busy += self.status.count(BUSY)
        if slots:
            self.session.reservations[self.reservation.id] = self.reservation
        handles = packed([slot.frame for slot in slots if slot.frame is not None])
        self.finish(Reserved(self.reservation.id if slots else 0, bytes(self.status), handles))


class Evicting(Operation):
    """Wait until pages that were forgotten are out of every tier and index, but for frames that someone still holds."""

    def __init__(self, sessions: Sessions, pages: list[Page], answer: Answer) -> None:
        super().__init__(answer)
        self.store = sessions.store
        self.pages = pages
        self.number = len(pages)
        self.barrier: Barrier | None = None

    def advance(self) -> None:
        for page in self.pages:
            stays = [
                frame for tier, frame in zip(self.store.tiers, page.frames, strict=True) if frame and tier.persistent
            ]
            if stays:  # a copy to the disk is still under way
                watch(self, page)
                return
        if self.barrier is None:
            self.waits("index")
            self.barrier = Barrier(self)
            self.store.post(self.barrier)
        elif self.barrier.done:
            self.finish(Count(self.number))

    def expire(self) -> None:
        self.finish(Count(self.number))


class Emptying(Operation):
    """Wait until slabs that were vacated are gone, or all that is unsaved is saved: while `busy`."""

    def __init__(
        self, sessions: Sessions, busy: Callable[[], bool], answer: Answer, result: Callable[[], Body]
    ) -> None:
        super().__init__(answer)
        self.busy = busy
        self.result = result
        sessions.store.watchers.append(self)
        self.waits("copies")

    def advance(self) -> None:
        if not self.busy():
            self.finish(self.result())

    def expire(self) -> None:
        self.finish(self.result())


def watch(operation: Operation, page: Page) -> None:
    """Have `operation` woken when a copy of `page` ends."""
    operation.waits("copies")
    if page.waiters is None:
        page.waiters = []
    if operation not in page.waiters:
        page.waiters.append(operation)


def wait_for(store: Store, operation: Operation, owner: SlabClass, nbytes: Iterable[int]) -> None:
    """Have `operation` woken when a frame of `owner` may be had. It is going to want frames of those sizes."""
    operation.waits("frames")
    if operation not in owner.waiters:
        owner.waiters.append(operation)
    store.room.grow_for(owner, nbytes)


def starvation(owner: SlabClass, pages: int) -> OutOfPages:
    """Says with numbers why no frame came."""
    tier = owner.tier
    counts = {state.name.lower(): number for state, number in zip(State, owner.counts, strict=True) if number}
    return OutOfPages(
        f"none of {pages} pages of {format_size(owner.frame_bytes)} got a frame in tier {tier.name}: its frames are "
        f"{counts or 'none'}, with {format_size(tier.allocated)} of {format_size(tier.capacity)} in slabs; release "
        f"leases, give the tier more capacity, or wait longer"
    )


def forget_all(sessions: Sessions, tenant: Tenant, roots: list[Page], answer: Answer) -> Evicting:
    """Forget `roots` and all that follow them; answers when no tier holds them any more."""
    store = sessions.store
    gone: list[Page] = []
    for root in roots:
        if not root.gone:
            members = [root]
            for member in members:
                members.extend(member.kids())
            gone.extend(members)
            store.forget(root, "asked")
    return Evicting(sessions, gone, answer)
