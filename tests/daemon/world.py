"""A store with a mover that does nothing until told to: memory is a dictionary, time stands still."""

from __future__ import annotations

import itertools

from kvtier.config import Size, TierConfig
from kvtier.errors import KvtierError
from kvtier.keys import Namespace, chain
from kvtier.layout import AttentionLayout
from kvtier.wire import Body
from kvtier_daemon.directory import Directory, OpenNamespace, Page, Tenant
from kvtier_daemon.jobs import Barrier, Carve, Copy, Erase, Grow, Job, Record, Shrink
from kvtier_daemon.operations import Borrowing, Reserving
from kvtier_daemon.sessions import Session, Sessions
from kvtier_daemon.slabs import Frame
from kvtier_daemon.store import SourceLost, Store
from kvtier_daemon.tiers import Tier

UNIT = 4096
LAYOUT = AttentionLayout(layers=1, kv_heads=1, head_dim=64, dtype="float16")


class World:
    """`bytes` is what each frame holds, `index` what the persistent tier's index says."""

    def __init__(self, *units: int, slab: int = 4, persistent: bool = True, **settings: object) -> None:
        """Tiers of so many units each; the last is persistent, the others can be mapped by workers."""
        self.jobs: list[Job] = []
        self.bytes: dict[tuple[int, int, int], object] = {}
        self.index: dict[bytes, tuple[int, int]] = {}
        tiers = []
        for number, size in enumerate(units):
            last = persistent and number == len(units) - 1
            config = TierConfig(
                medium="file" if last else "host",
                capacity=Size(size * UNIT),
                slab=Size(slab * UNIT),
                queue_depth=2,
                **settings,  # type: ignore[arg-type]
            )
            tiers.append(Tier(number, f"tier{number}", config, persistent=last, mappable=not last))
        for upper, lower in itertools.pairwise(tiers):
            upper.below = lower
        self.tiers = tiers
        if len(tiers) > 2:  # as HBM and a disk: what goes from one to the other goes through memory
            tiers[0].direct = {0, *range(1, len(tiers) - 1)}
            tiers[-1].direct = {*range(1, len(tiers))}
        self.directory = Directory(len(tiers))
        self.store = Store(self.directory, tiers, self.jobs.extend)
        self.now = 0.0
        self.store.clock = lambda: self.now
        self.sessions = Sessions(self.store)
        self.tenants: dict[str, Tenant] = {}

    def session(self, tenant: str = "a", **limits: dict[int, int]) -> Session:
        owner = self.directory.tenant(tenant, **limits)
        for tier in self.tiers:
            tier.tenants[owner.id] = owner
        session = Session(self.sessions.new_id(), owner, name="", pid=1, uid=1, process=-1)
        session.readable = frozenset(tier.index for tier in self.tiers if tier.mappable)
        self.sessions.add(session)
        return session

    def namespace(self, session: Session, model: str = "m", **fields: object) -> OpenNamespace:
        spec = Namespace(layout=LAYOUT, model=model, **fields)  # type: ignore[arg-type]
        return self.directory.open(session.tenant, spec)

    def reserve(
        self, session: Session, namespace: OpenNamespace, keys: list[bytes], first: int = 0, tier: int = 0
    ) -> tuple[Reserving, list[Body | KvtierError]]:
        answers: list[Body | KvtierError] = []
        parents = [namespace.seed, *keys]
        pages = [(first + at, key, parents[at]) for at, key in enumerate(keys)][0:]
        operation = Reserving(self.sessions, session, namespace, self.tiers[tier], pages, answers.append)
        operation.advance()
        self.store.run()
        return operation, answers

    def borrow(
        self, session: Session, keys: list[bytes], tier: int | None = 0
    ) -> tuple[Borrowing, list[Body | KvtierError]]:
        answers: list[Body | KvtierError] = []
        where = None if tier is None else self.tiers[tier]
        known = session.tenant.run(keys[:1])
        rest = b"".join(keys[1:]) if known else b""
        operation = Borrowing(self.sessions, session, known, where, answers.append, rest)
        operation.advance()
        self.store.run()
        return operation, answers

    def commit(self, session: Session, operation: Reserving, *, pinned: bool = False) -> list[Page]:
        """Write into every reserved frame what its key says, and publish."""
        pages = []
        reservation = operation.reservation
        for slot in reservation.slots:
            if slot.frame is None:
                continue
            parent = session.tenant.pages.get(slot.parent)
            frame, slot.frame = slot.frame, None
            session.tenant.writing.discard(slot.key)
            orphan = parent is None and slot.parent != reservation.namespace.seed
            if orphan or slot.key in session.tenant.pages:
                self.store.give(frame)
                continue
            self.write(frame, slot.key)
            pages.append(self.store.seal(frame, slot.key, reservation.namespace, slot.number, parent, pinned=pinned))
        if pages:
            self.store.renew(pages[-1])
        session.reservations.pop(reservation.id, None)
        self.store.run()
        return pages

    def store_chain(self, session: Session, namespace: OpenNamespace, keys: list[bytes], tier: int = 0) -> None:
        """Reserve, write and commit `keys`, with all jobs done."""
        operation, answers = self.reserve(session, namespace, keys, tier=tier)
        self.settle()
        if not operation.done:
            operation.expire()
        assert answers
        self.commit(session, operation)
        self.settle()

    def write(self, frame: Frame, value: object) -> None:
        self.bytes[frame.slab.id, frame.index, frame.nbytes] = value

    def read(self, frame: Frame) -> object:
        return self.bytes.get((frame.slab.id, frame.index, frame.nbytes))

    def do(self, job: Job, error: Exception | None = None) -> None:
        """Run one job, or fail it, and let the store take note."""
        self.jobs.remove(job)
        while job in self.jobs:  # hurried jobs stand in the queue twice
            self.jobs.remove(job)
        if job.taken:
            return
        job.taken = True
        job.error = error
        if error is None:
            match job:
                case Copy():
                    for source, target in zip(job.sources, job.targets, strict=True):
                        self.write(target, self.read(source))
                case Record():
                    self.index[job.page.key] = (job.target.slab.id, job.target.index)
                case Erase():
                    self.index.pop(job.key, None)
                case Grow() | Shrink() | Carve() | Barrier():
                    pass
        self.store.finish(job)
        self.store.run()

    def ready_jobs(self) -> list[Job]:
        """Those that could be next: index jobs keep their order."""
        ordered = [job for job in self.jobs if isinstance(job, (Record, Erase, Carve, Barrier))]
        return [job for job in self.jobs if job not in ordered[1:]]

    def settle(self) -> None:
        """Do all jobs."""
        self.store.run()
        while self.jobs:
            self.do(self.ready_jobs()[0])

    def keys(self, namespace: OpenNamespace, pages: int, branch: int = 0) -> list[bytes]:
        """A chain of so many pages; different branches share their first two pages."""
        tokens = [0] * 32 + [branch] * (namespace.spec.schedule.span(max(2, pages)).stop)
        return chain(namespace.spec, tokens)[:pages]


__all__ = ["LAYOUT", "UNIT", "SourceLost", "World"]
