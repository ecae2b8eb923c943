"""Random histories of the store, against a dictionary: every key maps to the bytes committed under it, or to nothing."""

from __future__ import annotations

import os
from typing import Any, ClassVar, cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.config import Size
from kvtier.errors import KvtierError
from kvtier.wire import Borrowed, Commit, Committed, Pinned, Reserved, pack_u32
from kvtier_daemon.directory import Tenant
from kvtier_daemon.jobs import Copy, Grow, Record
from kvtier_daemon.operations import Borrowing, Operation, Pinning, Prefetching, Reserving, forget_all
from kvtier_daemon.sessions import Session
from kvtier_daemon.slabs import Frame, State
from kvtier_daemon.store import SourceLost
from kvtier_daemon.verbs import Verbs
from tests.daemon.world import UNIT, World

CHAINS = 4
PAGES = 34  # two of them of the second order


class StoreMachine(RuleBasedStateMachine):
    units = (24, 32, 48)

    settings: ClassVar[dict[str, object]] = {}
    limits: ClassVar[dict[str, dict[str, dict[int, int]]]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.world = World(*self.units, **self.settings)  # type: ignore[arg-type]
        self.members: list[Session] = [
            self.world.session(name, **self.limits.get(name, {})) for name in ("a", "a", "b")
        ]
        self.verbs = Verbs(self.world.sessions, cast(Any, None), cast(Any, None))
        self.resized = False
        self.ahead: list[tuple[Session, Reserving, int]] = []
        self.branches: dict[int, int] = {}
        """Of reservations without keys: which chain they are for."""
        self.pins: dict[int, list[tuple[Frame, object]]] = {}
        self.spaces = [self.world.namespace(member) for member in self.members]
        for tenant in self.world.directory.tenants.values():
            os.close(tenant.presence.share(tenant.pages))
        self.chains = [self.world.keys(self.spaces[0], PAGES, branch) for branch in range(CHAINS)]
        self.open: list[tuple[Session, Reserving]] = []
        self.waiting: list[tuple[Operation, list[object]]] = []
        self.leases: dict[int, tuple[Session, list[tuple[Frame, object]]]] = {}
        self.dead: list[int] = []

    def _note(self, session: Session, operation: Operation, answers: list[object]) -> None:
        if not operation.done:
            self.waiting.append((operation, answers))
            session.operations[b"", id(operation)] = operation
        else:
            self._answered(session, operation, answers)

    def _answered(self, session: Session, operation: Operation, answers: list[object]) -> None:
        assert len(answers) == 1, "every request gets exactly one answer"
        answer = answers[0]
        if isinstance(operation, Reserving) and isinstance(answer, Reserved) and answer.reservation:
            if operation.pages[0][1]:
                self.open.append((session, operation))
            else:
                self.ahead.append((session, operation, self.branches.pop(id(operation))))
        if isinstance(operation, Pinning) and isinstance(answer, Pinned) and answer.pages:
            _, frames = self.world.sessions.pins[answer.pin]
            self.pins[answer.pin] = [(frame, self.world.read(frame)) for frame in frames]
        if isinstance(operation, Borrowing) and isinstance(answer, Borrowed) and answer.lease:
            frames = session.leases[answer.lease]
            for frame, page in zip(frames, operation.pages, strict=True):
                assert self.world.read(frame) == page.key, "a borrow was given the wrong bytes"
            self.leases[answer.lease] = (session, [(frame, self.world.read(frame)) for frame in frames])

    def _poll(self) -> None:
        still = []
        for operation, answers in self.waiting:
            if operation.done:
                self._answered(operation.session, operation, answers)  # type: ignore[attr-defined]
            else:
                still.append((operation, answers))
        self.waiting = still

    @rule(
        who=st.integers(0, 2),
        branch=st.integers(0, CHAINS - 1),
        start=st.integers(0, PAGES - 1),
        n=st.integers(1, 12),
        tier=st.integers(0, 1),
    )
    def reserve(self, who: int, branch: int, start: int, n: int, tier: int) -> None:
        session, space = self.members[who], self.spaces[who]
        keys = self.chains[branch]
        start = min(start, session.tenant.count(keys))
        parents = [space.seed, *keys]
        answers: list[object] = []
        pages = [(at, keys[at], parents[at]) for at in range(start, min(start + n, PAGES))]
        operation = Reserving(self.world.sessions, session, space, self.world.tiers[tier], pages, answers.append)
        operation.advance()
        self.world.store.run()
        self._note(session, operation, answers)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), pinned=st.booleans(), abort=st.booleans())
    def commit(self, data: st.DataObject, pinned: bool, abort: bool) -> None:
        session, operation = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if abort:
            self.world.sessions.abandon(session, operation.reservation, operation.reservation.slots)
            self.world.store.run()
            return
        pages = self.world.commit(session, operation, pinned=pinned)
        frames = [frame for page in pages for frame in page.frames if frame is not None and frame.pins]
        if pinned and frames:
            lease = self.world.sessions.grant(session, frames)
            self.leases[lease] = (session, [(frame, self.world.read(frame)) for frame in frames])

    @rule(who=st.integers(0, 2), branch=st.integers(0, CHAINS - 1), n=st.integers(1, 12), tier=st.integers(0, 1))
    def reserve_ahead(self, who: int, branch: int, n: int, tier: int) -> None:
        """Frames for pages whose keys are not known yet."""
        session, space = self.members[who], self.spaces[who]
        keys = self.chains[branch]
        start = min(session.tenant.count(keys), PAGES - 1)
        parents = [keys[start - 1] if start else space.seed, *[b""] * n]
        answers: list[object] = []
        pages = [(start + at, b"", parents[at]) for at in range(min(n, PAGES - start))]
        operation = Reserving(self.world.sessions, session, space, self.world.tiers[tier], pages, answers.append)
        self.branches[id(operation)] = branch
        operation.advance()
        self.world.store.run()
        self._note(session, operation, answers)

    @precondition(lambda self: self.ahead)
    @rule(data=st.data(), lease=st.booleans())
    def commit_with_keys(self, data: st.DataObject, lease: bool) -> None:
        session, operation, branch = self.ahead.pop(data.draw(st.integers(0, len(self.ahead) - 1)))
        slots = list(operation.reservation.slots)
        order = data.draw(st.permutations(range(len(slots))))
        keys = [self.chains[branch][slots[at].number] for at in order]
        for at, key in zip(order, keys, strict=True):
            frame = slots[at].frame
            assert frame is not None
            self.world.write(frame, key)
        body = Commit(operation.reservation.id, pack_u32(order), b"".join(keys), lease)
        answer = cast(Committed, self.verbs._commit(session, b"", body, lambda _: None))
        assert len(answer.status) == len(slots)
        if answer.lease:
            frames = session.leases[answer.lease]
            self.leases[answer.lease] = (session, [(frame, self.world.read(frame)) for frame in frames])
        self.world.sessions.abandon(session, operation.reservation, operation.reservation.slots)
        self.world.store.run()

    @rule(who=st.integers(0, 2), branch=st.integers(0, CHAINS - 1), n=st.integers(1, 6), tier=st.integers(0, 1))
    def pin(self, who: int, branch: int, n: int, tier: int) -> None:
        session = self.members[who]
        answers: list[object] = []
        run = session.tenant.run(self.chains[branch][:n])
        if run:
            operation = Pinning(self.world.sessions, session, run, self.world.tiers[tier], answers.append)
            operation.advance()
            self.world.store.run()
            self._note(session, operation, answers)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin = data.draw(st.sampled_from(sorted(self.pins)))
        del self.pins[pin]
        tenant, _ = self.world.sessions.pins[pin]
        self.world.sessions.unpin(tenant, pin)
        self.world.store.run()

    @rule(who=st.integers(0, 2), branch=st.integers(0, CHAINS - 1), n=st.integers(1, PAGES), tier=st.integers(0, 1))
    def prefetch(self, who: int, branch: int, n: int, tier: int) -> None:
        run = self.members[who].tenant.run(self.chains[branch][:n])
        Prefetching(self.world.store, run, self.world.tiers[tier]).advance()
        self.world.store.run()

    @rule(
        who=st.integers(0, 2),
        branch=st.integers(0, CHAINS - 1),
        n=st.integers(1, PAGES),
        tier=st.sampled_from([0, 1, None]),
    )
    def borrow(self, who: int, branch: int, n: int, tier: int | None) -> None:
        session = self.members[who]
        operation, answers = self.world.borrow(session, self.chains[branch][:n], tier)
        self._note(session, operation, answers)  # type: ignore[arg-type]

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        session, _ = self.leases.pop(lease)
        self.world.sessions.release(session, lease)
        self.world.store.run()
        with pytest.raises(KvtierError):
            self.world.sessions.release(session, lease)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), cancel=st.booleans())
    def deadline(self, data: st.DataObject, cancel: bool) -> None:
        operation, _ = self.waiting[data.draw(st.integers(0, len(self.waiting) - 1))]
        operation.cancel() if cancel else operation.expire()
        self.world.store.run()

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data(), failing=st.integers(0, 9))
    def work(self, data: st.DataObject, failing: int) -> None:
        jobs = self.world.ready_jobs()
        job = jobs[data.draw(st.integers(0, len(jobs) - 1))]
        error: Exception | None = None
        if failing == 0 and isinstance(job, (Copy, Record, Grow)):
            error = OSError(5, "injected")
        if failing == 1 and isinstance(job, Copy) and job.origin.persistent:
            error = SourceLost("injected")
        self.world.do(job, error)

    @rule()
    def work_hard(self) -> None:
        """With every job done, a borrow waits for nothing but frames."""
        self.world.settle()
        for operation, _ in self.waiting:
            if isinstance(operation, Borrowing) and not operation.done:
                assert operation.starved is not None, "a borrow was forgotten"

    @rule(who=st.integers(0, 2), branch=st.integers(0, CHAINS - 1), at=st.integers(0, PAGES - 1))
    def evict(self, who: int, branch: int, at: int) -> None:
        session = self.members[who]
        page = session.tenant.pages.get(self.chains[branch][at])
        if page is not None:
            answers: list[object] = []
            operation = forget_all(self.world.sessions, session.tenant, [page], answers.append)
            operation.advance()
            self.world.store.run()
            self.world.settle()
            assert operation.done
            assert session.tenant.count(self.chains[branch]) <= at
            for tier in self.world.tiers:
                if tier.persistent and session.tenant.name == "a":
                    for key in self.chains[branch][at:]:
                        assert key not in self.world.index or key in self.members[2].tenant.pages

    @rule(tier=st.integers(0, 2), units=st.integers(4, 48))
    def resize(self, tier: int, units: int) -> None:
        self.resized = True
        self.world.store.room.resize(self.world.tiers[tier], units * 4096)
        self.world.store.run()

    @rule(who=st.integers(0, 2), clean=st.booleans(), alive=st.booleans())
    def death(self, who: int, clean: bool, alive: bool) -> None:
        session = self.members[who]
        self.world.sessions.end(session, clean=clean, alive=alive)
        self.world.store.run()
        self._poll()
        self.dead.append(session.id)
        self.open = [(owner, operation) for owner, operation in self.open if owner is not session]
        self.ahead = [entry for entry in self.ahead if entry[0] is not session]
        self.leases = {lease: entry for lease, entry in self.leases.items() if entry[0] is not session}
        self.members[who] = self.world.session(session.tenant.name)

    @rule()
    def bury(self) -> None:
        for session in self.dead:
            self.world.sessions.buried(session)
        self.dead = []
        self.world.store.run()

    @rule()
    def beat(self) -> None:
        self.world.now += 10
        self.world.store.beat()
        self.world.store.run()

    @invariant()
    def holds(self) -> None:
        self._poll()
        world = self.world
        world.store.check()
        for tier in world.tiers:
            total = sum(slab.nbytes // slab.owner.frame_bytes for slab in tier.slabs.values())
            assert sum(sum(owner.counts) for owner in tier.classes.values()) == total
        for frames in [*(frames for _, frames in self.leases.values()), *self.pins.values()]:
            for frame, value in frames:
                assert frame.state is State.READY and frame.pins, "a leased frame was let go"
                assert world.read(frame) == value, "a leased frame was overwritten"
        for tenant in world.directory.tenants.values():
            for tier in world.tiers:
                assert tier.held(tenant) <= tenant.limit.get(tier.index, 1 << 62), "a limit was passed"
            for key, page in tenant.pages.items():
                for replica in page.frames:
                    if replica is not None and replica.state is State.READY:
                        assert world.read(replica) == key, "a page holds another's bytes"

    def teardown(self) -> None:
        """Whatever happened: let go of everything, and everything can be evicted."""
        self._poll()
        for operation, _ in self.waiting:
            operation.cancel()
        for member in self.members:
            self.world.sessions.end(member, clean=True, alive=True)
        for session in self.dead:
            self.world.sessions.buried(session)
        for pin in self.pins:
            self.world.sessions.unpin(self.world.sessions.pins[pin][0], pin)
        self.world.settle()
        for tenant in self.world.directory.tenants.values():
            roots = [page for page in tenant.pages.values() if page.parent is None]
            forget_all(self.world.sessions, tenant, roots, lambda _: None).advance()
        self.world.settle()
        for tier in self.world.tiers:
            for owner in tier.classes.values():
                assert sum(owner.counts) == owner.counts[State.FREE], "a frame leaked"
        assert not self.world.index
        self.world.store.check()
        for tenant in self.world.directory.tenants.values():
            assert tenant.presence.nbytes, "its presence table was given up"
            tenant.presence.withdraw()


class SmallStoreMachine(StoreMachine):
    """So tight that every reservation evicts."""

    units = (8, 8, 12)


class StrictStoreMachine(StoreMachine):
    """One tenant has a limit and the other a guarantee; little may wait to be written, and only what is used twice."""

    units = (24, 32, 48)
    settings: ClassVar[dict[str, object]] = {"admission": "second-use", "write_queue": Size(6 * UNIT)}
    limits: ClassVar[dict[str, dict[str, dict[int, int]]]] = {
        "a": {"limit": {0: 16 * UNIT, 1: 20 * UNIT, 2: 24 * UNIT}},
        "b": {"guaranteed": {0: 4 * UNIT, 1: 4 * UNIT, 2: 4 * UNIT}},
    }

    @precondition(lambda self: not self.resized and not self.waiting)
    @rule()
    def the_guarantee_can_be_had(self) -> None:
        """Once what is under way is done and nothing of its own is held, `b` gets a frame in every tier that it may
        write in, whoever holds what."""
        session = self.members[2]
        mine = [session.leases, session.reservations, [pin for pin in self.pins if self._pin_of(pin) is session.tenant]]
        if any(mine) or self.world.sessions.quarantine:
            return
        self.world.settle()
        for tier in (0, 1):
            operation, answers = self.world.reserve(session, self.spaces[2], [b"x" * 16], 0, tier)
            for _ in range(4):
                self.world.settle()
                self.world.now += 10
                self.world.store.beat()
                self.world.store.run()
            assert operation.done and len(answers) == 1
            assert isinstance(answers[0], Reserved) and answers[0].reservation, answers
            self.world.sessions.abandon(session, operation.reservation, operation.reservation.slots)
            self.world.store.run()

    def _pin_of(self, pin: int) -> Tenant:
        return self.world.sessions.pins[pin][0]


TestStrictStore = StrictStoreMachine.TestCase
TestStrictStore.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSmallStore = SmallStoreMachine.TestCase
TestSmallStore.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
