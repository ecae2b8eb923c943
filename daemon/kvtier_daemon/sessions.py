"""Sessions and what they hold. All that a session holds dies with it: leases at once, reservations after its process.

A frame that a dead worker had reserved may still be written to by its GPU, or by a child that outlived it; it is
quarantined until the kernel says that the process is gone.
Not here: the sockets by which a session is reached (`kvtier_daemon.attach`, `kvtier_daemon.server`).
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from kvtier.errors import StaleHandle
from kvtier.wire import TOKEN_BYTES
from kvtier_daemon.directory import OpenNamespace, Tenant
from kvtier_daemon.slabs import Frame, State
from kvtier_daemon.store import Store

if TYPE_CHECKING:
    from kvtier_daemon.operations import Operation
    from kvtier_daemon.tiers import Tier


class Slot:
    """A reserved frame for page number `number`; `key` and the `parent` key are known now or at commit."""

    __slots__ = ("frame", "key", "number", "parent")

    def __init__(self, frame: Frame, number: int, key: bytes, parent: bytes) -> None:
        self.frame: Frame | None = frame
        self.number = number
        self.key = key
        self.parent = parent


class Reservation:
    """Frames that one session writes. A slot whose frame is None is committed or aborted."""

    __slots__ = ("id", "namespace", "slots")

    def __init__(self, reservation_id: int, namespace: OpenNamespace) -> None:
        self.id = reservation_id
        self.namespace = namespace
        self.slots: list[Slot] = []

    @property
    def open(self) -> bool:
        return any(slot.frame is not None for slot in self.slots)


class Session:
    """One attached process. `process` is its pidfd, -1 if the kernel gave none."""

    __slots__ = (
        *(
            "admin",
            "gone",
            "home",
            "id",
            "leases",
            "name",
            "notices",
            "operations",
            "pid",
            "probe",
            "process",
            "read_only",
            "readable",
        ),
        *("requests", "reservations", "since", "slabs", "space", "tenant", "token", "uid"),
    )

    def __init__(self, session_id: int, tenant: Tenant, *, name: str, pid: int, uid: int, process: int) -> None:
        self.id = session_id
        self.tenant = tenant
        self.name = name
        self.pid = pid
        self.uid = uid
        self.process = process
        self.token = b"\1" + secrets.token_bytes(TOKEN_BYTES - 1)  # libzmq keeps ids that start with 0 to itself
        self.admin = False
        self.read_only = False
        self.readable: frozenset[int] = frozenset()
        """Indices of the tiers whose slabs its process can read in place."""
        self.home: Tier | None = None
        """The memory of its own GPU."""
        self.leases: dict[int, list[Frame]] = {}
        self.reservations: dict[int, Reservation] = {}
        self.operations: dict[tuple[bytes, int], Operation] = {}
        self.slabs: set[int] = set()
        self.space: OpenNamespace | None = None
        """The namespace that it opened last."""
        self.notices = 0
        self.requests = 0
        self.since = 0.0
        self.probe: tuple[int, bytes] | None = None
        self.gone = False


class Sessions:
    """All sessions, the ids of their leases, pins and reservations, and the quarantine of the dead."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.by_id: dict[int, Session] = {}
        self.by_token: dict[bytes, Session] = {}
        self.subscribers: dict[bytes, Session] = {}
        """Channels that are told of pages that come and go, and whose they are."""
        self.pins: dict[int, tuple[Tenant, list[Frame]]] = {}
        self.quarantine: dict[int, list[Frame]] = {}
        self._next = (secrets.randbits(30) << 32) + 1
        """Ids start anywhere, so that one kept from another life of the daemon is not taken for a new one."""

    def new_id(self) -> int:
        self._next += 1
        return self._next

    def add(self, session: Session) -> None:
        self.by_id[session.id] = session
        self.by_token[session.token] = session
        self.store.counters.attached += 1

    def grant(self, session: Session, frames: list[Frame]) -> int:
        """A lease on `frames`, which are pinned already; 0 for none."""
        if not frames:
            return 0
        lease = self.new_id()
        session.leases[lease] = frames
        return lease

    def release(self, session: Session, lease: int) -> int:
        """End a lease; how many pages it held. Raises StaleHandle for one that is not this session's."""
        frames = session.leases.pop(lease, None)
        if frames is None:
            raise StaleHandle(f"lease {lease} is not held by this session: it was released, or is of another session")
        self._unpin(frames)
        return len(frames)

    def unpin(self, tenant: Tenant, pin: int) -> int:
        """End an operator's pin. Raises StaleHandle for one that is not this tenant's."""
        owner, frames = self.pins.get(pin, (None, []))
        if owner is not tenant:
            raise StaleHandle(f"pin {pin} is not of tenant {tenant.name}: see `kvtier ls`")
        del self.pins[pin]
        self._unpin(frames)
        return len(frames)

    def reservation(self, session: Session, reservation_id: int) -> Reservation:
        """Raises StaleHandle for one that has ended or is not this session's."""
        reservation = session.reservations.get(reservation_id)
        if reservation is None:
            raise StaleHandle(f"reservation {reservation_id} is not this session's, or all its pages are committed")
        return reservation

    def abandon(self, session: Session, reservation: Reservation, slots: list[Slot]) -> int:
        """Give reserved frames back unpublished; how many."""
        given = 0
        for slot in slots:
            if slot.frame is not None:
                self.store.give(slot.frame)
                slot.frame = None
                session.tenant.writing.discard(slot.key)
                given += 1
        if not reservation.open:
            session.reservations.pop(reservation.id, None)
        return given

    def spaces(self) -> set[OpenNamespace]:
        """The namespaces that requests and reservations are about: what sessions may still publish pages in."""
        found: set[OpenNamespace] = set()
        for session in self.by_id.values():
            found.update(reservation.namespace for reservation in session.reservations.values())
            found.update(filter(None, (operation.space for operation in session.operations.values())))
            if session.space is not None:
                found.add(session.space)
        return found

    def end(self, session: Session, *, clean: bool, alive: bool) -> None:
        """The session is over. Its leases are released now; its reserved frames are freed if it ended in order
        (`clean`) or its process is gone, and quarantined while that is `alive`."""
        if session.gone:
            return
        session.gone = True
        del self.by_id[session.id], self.by_token[session.token]
        self.subscribers = {channel: other for channel, other in self.subscribers.items() if other is not session}
        if session.probe is not None:
            os.close(session.probe[0])
            session.probe = None
        for operation in list(session.operations.values()):
            operation.cancel()
        for lease in list(session.leases):
            self.release(session, lease)
        held = []
        for reservation in list(session.reservations.values()):
            if clean or not alive:
                self.abandon(session, reservation, reservation.slots)
                continue
            for slot in reservation.slots:
                if slot.frame is not None:
                    slot.frame.become(State.QUARANTINED)
                    session.tenant.writing.discard(slot.key)
                    held.append(slot.frame)
        session.reservations.clear()
        if held:
            self.quarantine[session.id] = held
        if not clean:
            self.store.counters.deaths += 1

    def buried(self, session_id: int) -> int:
        """The process of an ended session is gone: nothing writes in its frames any more. How many came free."""
        frames = self.quarantine.pop(session_id, [])
        for frame in frames:
            self.store.give(frame)
        return len(frames)

    def _unpin(self, frames: list[Frame]) -> None:
        """Tails first, so that the head of a chain ends up the more recent."""
        self.store.tick += 1
        for frame in reversed(frames):
            frame.touched = frame.slab.touched = self.store.tick
            self.store.unpin(frame)
