"""What each verb does. A handler answers at once with a body, or returns the operation that will answer.

Requests are checked here, at the edge: whatever is let through makes sense. Raises the `kvtier.errors` that clients see.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, get_args

from kvtier import keys as page_keys
from kvtier import wire
from kvtier.config import LogLevel
from kvtier.errors import AccessDenied, Draining, InvalidRequest, LayoutError, NotOpen, StaleHandle
from kvtier.sizes import format_size
from kvtier.wire import EXISTS, GRANTED, ORPHAN
from kvtier_daemon import logs
from kvtier_daemon.attach import AttachServer
from kvtier_daemon.directory import OpenNamespace, Page
from kvtier_daemon.operations import (
    Answer,
    Borrowing,
    Emptying,
    Migrating,
    Operation,
    Pinning,
    Prefetching,
    Reserving,
    at_hand,
    forget_all,
    lend_at_once,
)
from kvtier_daemon.reports import Reports
from kvtier_daemon.sessions import Reservation, Session, Sessions, Slot
from kvtier_daemon.slabs import Frame, State
from kvtier_daemon.tiers import Tier

log = logging.getLogger(__name__)

Handler = Callable[[Session, bytes, Any, Answer], wire.Body | Operation]


class Verbs:
    """Handlers by verb. `draining` refuses what would bring new pages."""

    def __init__(self, sessions: Sessions, attach: AttachServer, reports: Reports) -> None:
        self.sessions = sessions
        self.store = sessions.store
        self.attach = attach
        self.reports = reports
        self.draining = False
        self.tiers = {tier.name: tier for tier in self.store.tiers}
        self.handlers: dict[str, Handler] = {verb: getattr(self, f"_{verb}") for verb in wire.REQUESTS}

    def _open(self, session: Session, _: bytes, body: wire.Open, __: Answer) -> wire.Body:
        spec = body.namespace
        if body.fingerprint != spec.layout.fingerprint() or body.digest != spec.digest():
            raise LayoutError(
                f"daemon and worker compute different digests of {spec.model!r}: their releases differ; use one for both"
            )
        if body.probed:
            self.attach.verify_probe(session, spec)
        directory = self.store.directory
        if directory.crowded:
            directory.close_empty(self.sessions.spaces())
        session.space = directory.open(session.tenant, spec)
        return wire.Opened(session.space.id)

    def _lookup(self, session: Session, _: bytes, body: wire.Lookup, __: Answer) -> wire.Body:
        keys = page_keys.split(body.keys)
        counters = self.store.counters
        counters.lookups += 1
        counters.lookup_keys += len(keys)
        if not body.detail:
            found = session.tenant.count(keys)
            counters.lookup_found += found
            return wire.Found(found)
        places = []
        for page in session.tenant.run(keys):
            frame = page.ready()
            if frame is None:
                break
            places.append(frame.tier.index)
        counters.lookup_found += len(places)
        return wire.Found(len(places), bytes(places))

    def _borrow(self, session: Session, _: bytes, body: wire.Borrow, answer: Answer) -> wire.Body | Operation:
        tier = None if body.tier == "any" else self._tier(body.tier, session)
        asked = page_keys.count(body.keys)
        counters = self.store.counters
        counters.borrows += 1
        run = session.tenant.run(page_keys.split(body.keys[: page_keys.KEY_BYTES]))
        if not run:
            counters.asked(asked, session.space.schedule.tokens(0, asked) if session.space else 0)
            return wire.Borrowed(0, b"")
        if at_hand(run[0], tier, session.readable) is not None:
            whole = session.tenant.run(page_keys.split(body.keys))
            lent = lend_at_once(self.sessions, session, whole, tier, asked)
            if lent is not None:
                return lent
        return Borrowing(self.sessions, session, run, tier, answer, body.keys[page_keys.KEY_BYTES :])

    def _release(self, session: Session, _: bytes, body: wire.Release, __: Answer) -> wire.Body:
        pages = 0
        stale: StaleHandle | None = None
        for lease in wire.unpack_u64(body.leases):
            try:
                pages += self.sessions.release(session, lease)
            except StaleHandle as error:
                stale = error
        if stale is not None:
            raise stale
        return wire.Count(pages)

    def _reserve(self, session: Session, _: bytes, body: wire.Reserve, answer: Answer) -> wire.Body | Operation:
        self._accepting()
        if session.read_only:
            raise AccessDenied("this session attached read-only: it cannot reserve pages")
        space = self._namespace(session, body.namespace)
        tier = self._tier(body.tier, session)
        keys = page_keys.split(body.keys)
        if keys and len(keys) != body.count:
            raise InvalidRequest(f"{len(keys)} keys for {body.count} pages")
        if not 0 < body.count <= 1 << 20 or not 0 <= body.first < 1 << 31:
            raise InvalidRequest(f"{body.count} pages from number {body.first} on: out of range")
        unknown = bool(body.first) and not keys and not body.parent  # it is named at commit
        if not unknown and len(body.parent) != page_keys.KEY_BYTES:
            raise InvalidRequest(
                "the parent must be the key of the page before, or the namespace's digest for the first"
            )
        if (body.first == 0) != (body.parent == space.seed):
            raise InvalidRequest("page 0, and no other, follows the namespace's digest")
        if len(set(keys)) != len(keys):
            raise InvalidRequest("a key stands twice in the list")
        top = space.page_bytes(body.first + body.count - 1)
        if not tier.fits(session.tenant, top):
            raise InvalidRequest(
                f"a page of {format_size(top)} does not fit tier {tier.name} ({format_size(tier.capacity)}, less what "
                f"others are guaranteed): raise tiers.{tier.name}.capacity or lower the namespace's cap_tokens"
            )
        parents = [body.parent, *(keys or [b""] * body.count)]
        pages = [(body.first + at, keys[at] if keys else b"", parents[at]) for at in range(body.count)]
        return Reserving(self.sessions, session, space, tier, pages, answer)

    def _commit(self, session: Session, _: bytes, body: wire.Commit, __: Answer) -> wire.Body:
        reservation = self.sessions.reservation(session, body.reservation)
        slots = self._slots(reservation, body.slots)
        keys = page_keys.split(body.keys)
        if keys and len(keys) != len(slots):
            raise InvalidRequest(f"{len(keys)} keys for {len(slots)} pages")
        for slot in slots:
            if slot.frame is None:
                raise StaleHandle(f"page {slot.number} of reservation {reservation.id} is committed or aborted already")
            if bool(slot.key) == bool(keys):
                raise InvalidRequest("keys are given either at reserve or at commit, not twice and not never")
        if keys:
            self._name(reservation, dict(zip(slots, keys, strict=True)), body.parent)
        order = {slot: at for at, slot in enumerate(slots)}
        slots.sort(key=lambda slot: slot.number)
        status = bytearray(len(slots))
        frames: list[Frame] = []
        for slot in slots:
            status[order[slot]] = self._seal(session, reservation, slot, body.lease, frames)
        self.store.renew(session.tenant.pages.get(slots[-1].key) if slots else None)
        if not reservation.open:
            session.reservations.pop(reservation.id, None)
        return wire.Committed(bytes(status), self.sessions.grant(session, frames))

    def _abort(self, session: Session, _: bytes, body: wire.Abort, __: Answer) -> wire.Body:
        reservation = self.sessions.reservation(session, body.reservation)
        return wire.Count(self.sessions.abandon(session, reservation, self._slots(reservation, body.slots)))

    def _prefetch(self, session: Session, _: bytes, body: wire.Prefetch, __: Answer) -> wire.Body:
        self._accepting()
        tier = self._tier(body.tier)
        operation = Prefetching(self.store, session.tenant.run(page_keys.split(body.keys)), tier)
        operation.advance()
        return wire.Count(operation.started if operation.done else len(operation.pages))

    def _pin(self, session: Session, _: bytes, body: wire.Pin, answer: Answer) -> wire.Body | Operation:
        return Pinning(self.sessions, session, [], self._tier(body.tier), answer, body.keys)

    def _unpin(self, session: Session, _: bytes, body: wire.Unpin, __: Answer) -> wire.Body:
        return wire.Count(self.sessions.unpin(session.tenant, body.pin))

    def _evict(self, session: Session, _: bytes, body: wire.Evict, answer: Answer) -> wire.Body | Operation:
        if session.read_only:
            raise AccessDenied("this session attached read-only: it cannot evict pages")
        pages = session.tenant.pages
        roots: list[Page] = [pages[key] for key in page_keys.split(body.keys) if key in pages]
        if body.everything and session.admin:
            roots += [
                page
                for tenant in self.store.directory.tenants.values()
                for page in tenant.pages.values()
                if page.parent is None
            ]
        elif body.everything:
            roots += [page for page in pages.values() if page.parent is None]
        elif body.namespace:
            spaces = [
                space
                for space in self.store.directory.namespaces.values()
                if space.seed == body.namespace and (session.admin or space.tenant is session.tenant)
            ]
            if not spaces:
                raise InvalidRequest(f"no namespace {body.namespace.hex()}: see `kvtier ls`")
            roots += [
                page
                for space in spaces
                for page in space.tenant.pages.values()
                if page.namespace is space and page.parent is None
            ]
        return forget_all(self.sessions, session.tenant, roots, answer)

    def _migrate(self, session: Session, _: bytes, body: wire.Migrate, answer: Answer) -> wire.Body | Operation:
        self._accepting()
        operation = Migrating(self.sessions, session, [], self._tier(body.tier), answer, body.keys)
        operation.move = body.move
        return operation

    def _resize(self, session: Session, _: bytes, body: wire.Resize, answer: Answer) -> wire.Body | Operation:
        self._admin(session, "resize a tier")
        tier = self._tier(body.tier)
        promised = sum(tenant.guaranteed.get(tier.index, 0) for tenant in tier.tenants.values())
        if body.capacity < max(promised, 0):
            raise InvalidRequest(
                f"tenants are guaranteed {format_size(promised)} of tier {tier.name}: it cannot have less"
            )
        self.store.room.resize(tier, body.capacity)
        log.info(
            "tier %s has a capacity of %s now",
            *(tier.name, format_size(body.capacity)),
            extra=logs.fields(tier=tier.name, capacity=body.capacity, uid=session.uid),
        )

        def over() -> bool:
            return tier.allocated > tier.capacity

        return Emptying(self.sessions, over, answer, lambda: wire.Resized(tier.capacity, tier.allocated))

    def _drain(self, session: Session, _: bytes, body: wire.Drain, answer: Answer) -> wire.Body | Operation:
        self._admin(session, "drain")
        log.info(
            "draining %s",
            f"tier {body.tier}" if body.tier else "all: new pages are refused until a restart",
            extra=logs.fields(tier=body.tier, uid=session.uid),
        )
        if not body.tier:
            self.draining = True
            self.flush_unsaved()
            tiers = self.store.tiers

            def saving() -> bool:
                return any(tier.unsaved or tier.writing for tier in tiers)

            return Emptying(self.sessions, saving, answer, lambda: wire.Count(sum(len(tier.unsaved) for tier in tiers)))
        tier = self._tier(body.tier)
        before = sum(len(slab.frames) for slab in tier.slabs.values())
        for slab in list(tier.slabs.values()):
            if not slab.leaving:
                self.store.room.vacate(slab)

        def left() -> wire.Body:
            return wire.Count(before - sum(slab.busy for slab in tier.slabs.values()))

        def emptying() -> bool:
            return any(slab.leaving for slab in tier.slabs.values())

        return Emptying(self.sessions, emptying, answer, left)

    def _stats(self, session: Session, _: bytes, body: wire.Stats, __: Answer) -> wire.Body:
        return wire.Report(self.reports.stats())

    def _sessions(self, session: Session, _: bytes, body: wire.Sessions, __: Answer) -> wire.Body:
        return wire.Report(self.reports.sessions(session))

    def _inventory(self, session: Session, _: bytes, body: wire.Inventory, __: Answer) -> wire.Body:
        if body.skip < 0:
            raise InvalidRequest(f"skip {body.skip}: it must not be negative")
        return wire.Report(self.reports.inventory(session, body.namespace, body.skip))

    def _loglevel(self, session: Session, _: bytes, body: wire.LogLevel, __: Answer) -> wire.Body:
        self._admin(session, "change the log level")
        if not body.level:
            return wire.LoggedAt(logs.level())
        if body.level not in get_args(LogLevel):
            raise InvalidRequest(f"no log level {body.level!r}; there are: {', '.join(get_args(LogLevel))}")
        before = logs.set_level(body.level)
        log.info("log level is %s now", body.level, extra=logs.fields(before=before, uid=session.uid))
        return wire.LoggedAt(before)

    def _subscribe(self, session: Session, identity: bytes, _: wire.Subscribe, __: Answer) -> wire.Body:
        self.sessions.subscribers[identity] = session
        return wire.Done()

    def _cancel(self, session: Session, _: bytes, body: wire.Cancel, __: Answer) -> wire.Body:
        if not 0 <= body.channel < 1 << 32:
            raise InvalidRequest(f"channel {body.channel}: channels have 32-bit numbers")
        identity = session.token + body.channel.to_bytes(4, "little")
        operation = session.operations.get((identity, body.request))
        if operation is None:
            return wire.Count(0)
        operation.cancel()
        return wire.Count(1)

    def _ping(self, session: Session, _: bytes, body: wire.Ping, __: Answer) -> wire.Body:
        return wire.Done()

    def _detach(self, session: Session, _: bytes, body: wire.Detach, answer: Answer) -> wire.Body:
        self.attach.detach(session)
        return wire.Done()

    def flush_unsaved(self) -> None:
        """Queue for the tier below all that lives in one that does not outlive the daemon, whatever its queue's bound."""
        for page, below in list(self.unsaved()):
            if not below.closed:
                self.store.save(page, below)

    def unsaved(self) -> Iterator[tuple[Page, Tier]]:
        """Pages that should be in the tier below one that holds them, and are not."""
        for tenant in self.store.directory.tenants.values():
            for page in tenant.pages.values():
                for frame in page.frames:
                    below = frame.tier.below if frame is not None and frame.state is State.READY else None
                    if below is None or page.frames[below.index] is not None:
                        continue
                    admitted = not below.second_use or page.uses > 1
                    if admitted and below.fits(tenant, page.nbytes):
                        yield page, below

    def _seal(self, session: Session, reservation: Reservation, slot: Slot, lease: bool, leased: list[Frame]) -> int:
        """Publish one reserved page; its status."""
        tenant, frame = session.tenant, slot.frame
        assert frame is not None
        tenant.writing.discard(slot.key)
        if slot.key in tenant.pages:
            if not lease:  # otherwise the writer goes on reading its own frame, until it aborts it
                slot.frame = None
                self.store.give(frame)
            return EXISTS
        parent, space, number = tenant.pages.get(slot.parent), reservation.namespace, slot.number
        if parent is None or parent.namespace is not space:
            reachable = number == 0 and slot.parent == space.seed
        else:
            if len(space.sizes) == 1:
                number = parent.number + 1  # pages of one size: what the writer took it for decides nothing
            reachable = parent.number == number - 1
        if not reachable:
            if not lease:
                slot.frame = None
                self.store.give(frame)
            return ORPHAN
        slot.frame = None
        self.store.seal(frame, slot.key, space, number, parent, pinned=lease)
        if lease:
            leased.append(frame)
        return GRANTED

    def _name(self, reservation: Reservation, keys: dict[Slot, bytes], parent: bytes) -> None:
        """Give slots that were reserved without them their keys, and the parents that follow: all or none. `parent` is
        the key of the page before the reservation, where that was not known when it was made."""
        numbered = {slot.number: slot for slot in reservation.slots}
        parents: dict[Slot, bytes] = {}
        for slot in keys:
            before = numbered.get(slot.number - 1)
            if before is not None:
                parents[slot] = keys.get(before) or before.key
                if not parents[slot]:
                    raise InvalidRequest(f"page {slot.number} is committed before page {before.number} has its key")
            elif not slot.parent:
                if len(parent) != page_keys.KEY_BYTES:
                    raise InvalidRequest(f"page {slot.number} needs the key of page {slot.number - 1} as its parent")
                parents[slot] = parent
        for slot, key in keys.items():
            slot.key = key
            slot.parent = parents.get(slot, slot.parent)

    def _slots(self, reservation: Reservation, packed: bytes) -> list[Slot]:
        numbers = wire.unpack_u32(packed)
        if any(number >= len(reservation.slots) for number in numbers) or len(set(numbers)) != len(numbers):
            raise InvalidRequest(f"slots {numbers[:8]} of a reservation of {len(reservation.slots)}")
        if not packed:
            return [slot for slot in reservation.slots if slot.frame is not None]
        return [reservation.slots[number] for number in numbers]

    def _namespace(self, session: Session, number: int) -> OpenNamespace:
        space = self.store.directory.namespaces.get(number)
        if space is None or space.tenant is not session.tenant:
            raise NotOpen(f"namespace {number} is not open to this session: open it, or open it again")
        return space

    def _tier(self, name: str, reader: Session | None = None) -> Tier:
        """The tier of that name, or of that GPU ("cuda:" and its UUID); one that `reader` can use in place."""
        tier = self.tiers.get(name) or next(
            (tier for tier in self.tiers.values() if tier.device and name == f"cuda:{tier.device}"), None
        )
        if tier is None:
            raise InvalidRequest(f"no tier {name!r}; there are: {', '.join(self.tiers)}")
        if reader is not None and tier.index not in reader.readable:
            raise InvalidRequest(
                f'this process cannot use tier {name!r} in place: borrow from another tier or from "any", or attach from a '
                f"process on that GPU"
            )
        return tier

    def _accepting(self) -> None:
        if self.draining:
            raise Draining("the daemon is stopping; treat this as a miss")

    def _admin(self, session: Session, what: str) -> None:
        if not session.admin:
            raise AccessDenied(f"uid {session.uid} may not {what}: be root, the daemon's user, or one of its `admins`")
