"""Frames, the slabs that hold them, and the slab classes that own the slabs.

A slab is one contiguous region of a tier's medium, carved into frames of one size for one tenant (a slab class), as
memcached's slabs are. A frame is a slot of a slab; with a page in it, it is that page's replica in the tier. Every
frame is in exactly one `State`, and a class counts its frames by state, so that

    free + reserved + filling + ready + draining + quarantined = all frames

holds by construction. State changes go through `Frame.become` and `SlabClass.take`, `take_beside`, `filled` and `give` alone.
Not here: who may have a slab and which frame leaves next to another class (`kvtier_daemon.tiers`).
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from kvtier.wire import pack_handle
from kvtier_daemon.recency import Recency

if TYPE_CHECKING:
    from kvtier_daemon.directory import Page, Tenant
    from kvtier_daemon.jobs import Copy
    from kvtier_daemon.operations import Operation
    from kvtier_daemon.tiers import Tier

_ORDERED = 4096
"""Free frames that are kept in the order of their addresses."""


class State(IntEnum):
    """Of a frame. RESERVED: a worker writes in it. FILLING: a copy into it is under way. DRAINING: leaving, until the
    index has forgotten it. QUARANTINED: its dead writer's process may still write in it."""

    FREE = 0
    RESERVED = 1
    FILLING = 2
    READY = 3
    DRAINING = 4
    QUARANTINED = 5


FREE: Final = State.FREE
FILLING: Final = State.FILLING
READY: Final = State.READY
"""Those that are asked for a page's every move, which costs a lookup where a member is named by its class."""


class Frame:
    """A slot of a slab.

    `pins` counts leases and the borrows that wait for it; `copies` the copies that read it; `kids` the page's child
    pages that have a frame in the same tier. Only with all three at 0 may a READY frame be emptied. `copy` is the one
    under way into it. `colder`, `warmer` and `listed` are its place in the recency order.
    """

    __slots__ = (
        "checksum",
        "colder",
        "copies",
        "copy",
        "generation",
        "index",
        "kids",
        "listed",
        "page",
        "pins",
        "slab",
        "state",
        "tier",
        "touched",
        "warmer",
    )

    def __init__(self, slab: Slab, index: int) -> None:
        self.slab = slab
        self.tier: Tier = slab.owner.tier
        self.index = index
        self.state = FREE
        self.generation = 0
        self.page: Page | None = None
        self.pins = 0
        self.copies = 0
        self.copy: Copy | None = None
        self.kids = 0
        self.touched = 0
        self.checksum = 0
        self.colder: Frame | None = None
        self.warmer: Frame | None = None
        self.listed = False

    @property
    def offset(self) -> int:
        return self.index * self.slab.owner.frame_bytes

    @property
    def nbytes(self) -> int:
        return self.slab.owner.frame_bytes

    def handle(self) -> bytes:
        """A `kvtier.wire.Handle`, packed."""
        slab = self.slab
        nbytes = slab.owner.frame_bytes
        return pack_handle(slab.id, self.generation, self.index * nbytes, nbytes)

    def become(self, state: State) -> None:
        owner = self.slab.owner
        owner.count(self.state, state, 1)
        if self.pins:
            owner.leased += (state is READY) - (self.state is READY)
        self.state = state


class Slab:
    """`backing` is the medium's own handle of the region. `holders` are the sessions that may have it mapped; `touched`
    is when any of its frames last was. A `leaving` slab takes no new pages; empty, it goes to `heir`, or it is
    `retired`: it waits for its holders and then goes back to the medium."""

    __slots__ = (
        "backing",
        "busy",
        "frames",
        "heir",
        "holders",
        "id",
        "leaving",
        "nbytes",
        "owner",
        "retired",
        "touched",
    )

    def __init__(self, slab_id: int, owner: SlabClass, nbytes: int, backing: Any) -> None:
        self.id = slab_id
        self.owner = owner
        self.nbytes = nbytes
        self.backing = backing
        self.frames: list[Frame] = []
        self.busy = 0
        self.touched = 0
        self.leaving = False
        self.retired = False
        self.heir: SlabClass | None = None
        self.holders: set[int] = set()

    def vacatable(self) -> bool:
        """Whether every frame could leave soon: none is held or written by anyone. Nor is one being filled: what came
        would leave at once, and its page be copied here again for ever if it has to leave where it is."""
        movable = (FREE, READY)
        return not self.leaving and all(frame.state in movable and not frame.pins for frame in self.frames)


class SlabClass:
    """All slabs of one (tier, tenant, frame size): the free frames, the recency order of the others, who waits.

    `lru` holds READY frames without pins, coldest first. A frame found with kids at the cold end is set aside (it is in
    no list) until its last kid has left the tier; that is the leaf-only rule, and it keeps every tier prefix-closed.
    """

    __slots__ = (
        "counts",
        "disordered",
        "frame_bytes",
        "free",
        "growing",
        "leased",
        "low",
        "lru",
        "misses",
        "rate",
        "slabs",
        "taken",
        "tenant",
        "tier",
        "waiters",
    )

    def __init__(self, tier: Tier, tenant: Tenant, frame_bytes: int) -> None:
        self.tier = tier
        self.tenant = tenant
        self.frame_bytes = frame_bytes
        self.slabs: list[Slab] = []
        self.free: list[Frame] = []
        self.lru = Recency()
        self.waiters: deque[Operation] = deque()
        self.counts = [0] * len(State)
        self.disordered = False
        self.growing = 0
        self.leased = 0
        """READY frames with pins."""
        self.taken = 0
        self.misses = 0
        self.rate = 0.0
        self.low = 1
        """How many free frames to keep ahead of demand."""

    def count(self, before: int, after: int, frames: int) -> None:
        """So many frames went from one state to another."""
        self.counts[before] -= frames
        self.counts[after] += frames

    def adopt(self, slab: Slab) -> None:
        """Carve `slab` into free frames of this class."""
        slab.owner = self
        slab.leaving = False
        slab.heir = None
        slab.busy = 0
        slab.frames = [Frame(slab, index) for index in range(slab.nbytes // self.frame_bytes)]
        self.slabs.append(slab)
        self.counts[FREE] += len(slab.frames)
        self.free.extend(reversed(slab.frames))

    def disown(self, slab: Slab) -> None:
        """Let go of an empty slab."""
        assert slab.busy == 0
        self.slabs.remove(slab)
        self.counts[FREE] -= len(slab.frames)
        if not slab.leaving:
            self.free = [frame for frame in self.free if frame.slab is not slab]
        slab.frames = []  # frames name their slab: what names each other is freed by a full collection alone

    def vacate(self, slab: Slab) -> None:
        """From now on, frames of `slab` that come free stay empty."""
        slab.leaving = True
        self.free = [frame for frame in self.free if frame.slab is not slab]

    def take(self, state: State) -> Frame | None:
        """A free frame, now in `state`; None if there is none."""
        if not self.free:
            return None
        frame = self.free.pop()
        frame.slab.busy += 1
        frame.touched = 0
        frame.generation += 1
        frame.state = state
        self.count(FREE, state, 1)
        self.taken += 1
        return frame

    def take_beside(self, frame: Frame, most: int) -> list[Frame]:
        """The free frames that follow `frame` one after the other and would be taken next, `most` at most, now FILLING."""
        taken: list[Frame] = []
        slab, index, free = frame.slab, frame.index, self.free
        while free and len(taken) < most:
            following = free[-1]
            index += 1
            if following.slab is not slab or following.index != index:
                break
            free.pop()
            following.touched = 0
            following.generation += 1
            following.state = FILLING
            taken.append(following)
        slab.busy += len(taken)
        self.count(FREE, FILLING, len(taken))
        self.taken += len(taken)
        return taken

    def filled(self, frames: list[Frame]) -> None:
        """`frames` of this class, FILLING until now, are READY."""
        for frame in frames:
            frame.state = READY
            if frame.pins:
                self.leased += 1
        self.count(FILLING, READY, len(frames))

    def give(self, frame: Frame) -> None:
        """Make `frame`, which holds nothing any more, free."""
        assert frame.page is None and not frame.pins and not frame.copies
        frame.become(FREE)
        frame.kids = 0
        frame.slab.busy -= 1
        if not frame.slab.leaving:
            self.free.append(frame)
            self.disordered = True

    def victim(self) -> Frame | None:
        """The least recently used frame that may leave, tails of chains before their heads."""
        for frame in self.lru:
            if frame.copies:
                continue
            if not frame.kids:
                return frame
            self.lru.discard(frame)
        return None

    def forecast(self, seconds: float) -> None:
        """Note what was taken in the last `seconds`; `low` becomes what the next quarter second is expected to take."""
        self.rate += (self.taken / seconds - self.rate) * min(1.0, seconds / 2)
        self.taken = 0
        self.low = max(1, min(int(self.rate * 0.25), sum(self.counts) // 8))
        if self.disordered:
            self._order()

    def _order(self) -> None:
        """Have the frames to be taken next lie side by side where they can: pages that are taken together are then
        copied together."""
        self.disordered = False
        following = self.free[-_ORDERED:]
        following.sort(key=lambda frame: (frame.slab.id, frame.index), reverse=True)
        self.free[-_ORDERED:] = following

    def check(self) -> None:
        """Assert what must always hold."""
        frames = [frame for slab in self.slabs for frame in slab.frames]
        for state in State:
            assert self.counts[state] == sum(frame.state is state for frame in frames), state
        assert self.leased == sum(bool(frame.pins) and frame.state is READY for frame in frames)
        assert all(frame.state is FREE and not frame.slab.leaving for frame in self.free)
        assert len(set(self.free)) == len(self.free)
        for frame in frames:
            assert frame.pins >= 0 and frame.copies >= 0 and frame.kids >= 0
            held = frame.state in (FILLING, READY)
            assert held == (frame.page is not None) or frame.state is State.DRAINING, frame.state
            if frame.listed:
                assert frame.state is READY and not frame.pins and not frame.slab.leaving
            elif frame.state is READY and not frame.pins and not frame.slab.leaving:
                assert frame.kids or frame.copies, "a frame that could leave is in no list"
        for slab in self.slabs:
            assert slab.busy == sum(frame.state is not FREE for frame in slab.frames)
