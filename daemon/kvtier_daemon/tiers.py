"""A tier: how much of a medium there is, which slab classes share it, and which slab goes to whom.

Decides, and does no I/O: the store acts on what is decided here. A tenant's guarantee in a tier is kept free for it
whether it uses it or not, so it can always be had; a tenant's limit is never passed.
Not here: frames inside a class (`kvtier_daemon.slabs`), copies between tiers (`kvtier_daemon.store`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvtier.config import TierConfig
from kvtier_daemon.slabs import Slab, SlabClass, State

if TYPE_CHECKING:
    from kvtier_daemon.directory import Page, Tenant
    from kvtier_daemon.operations import Operation

GRANULE = 2 << 20
"""Bytes. cudaMalloc rounds to this, and smaller allocations share what an IPC handle exports."""
GROWING_AT_ONCE = 4
"""Slabs that one class may have under construction."""


class Tier:
    """`persistent` tiers outlive the daemon and have an index; workers can map the slabs of `mappable` ones; `device` is
    the UUID of the GPU whose memory it is.

    `unsaved` are pages held above this tier that still wait for their copy in it, in the order of their commits;
    `writing` counts such copies under way.
    """

    def __init__(
        self, index: int, name: str, config: TierConfig, *, persistent: bool, mappable: bool, device: str = ""
    ) -> None:
        self.device = device
        self.index = index
        self.name = name
        self.section = name
        """Of the settings; tiers of several GPUs may share one."""
        self.config = config
        self.persistent = persistent
        self.mappable = mappable
        self.capacity: int = config.capacity
        self.write_queue: int = config.write_queue
        self.second_use = config.admission == "second-use"
        """Whether pages that were used but once are not copied here."""
        self.allocated = 0
        self.holdings: dict[int, int] = {}
        self.below: Tier | None = None
        self.direct: set[int] | None = None
        """Indices of the tiers that it exchanges pages with in one copy; None: all. Others go through host memory."""
        self.classes: dict[tuple[int, int], SlabClass] = {}
        self._asked: SlabClass | None = None
        """What was asked for last, and is most often asked for next."""
        self.slabs: dict[int, Slab] = {}
        self.tenants: dict[int, Tenant] = {}
        self.unsaved: OrderedDict[Page, None] = OrderedDict()
        self.unsaved_bytes = 0
        self.writing = 0
        self.waiting: dict[Operation, int] = {}
        """Who waited for frames at the last beat, and how many each held."""
        self.progressed = 0.0
        """Monotonic time of the last copy into this tier that ended, or of when the first of a row was queued."""
        self.closed = False
        """Whether new frames are refused: the tier is drained or its medium is gone."""
        self.grow_after = 0.0
        """Monotonic time before which growing is not tried again, after the medium refused."""

    def reaches(self, other: Tier) -> bool:
        """Whether one copy brings a page from here to `other`, or back."""
        return self.direct is None or other.index in self.direct

    def slab_class(self, tenant: Tenant, frame_bytes: int) -> SlabClass:
        found = self._asked
        if found is not None and found.frame_bytes == frame_bytes and found.tenant is tenant:
            return found
        key = (tenant.id, frame_bytes)
        found = self.classes.get(key)
        if found is None:
            self.tenants[tenant.id] = tenant
            found = self.classes[key] = SlabClass(self, tenant, frame_bytes)
        self._asked = found
        return found

    def slab_bytes(self, frame_bytes: int) -> int:
        """Of a new slab for frames of that size: whole frames, at least one; on a GPU, what cudaMalloc rounds it to."""
        if self.device:
            return -(-max(self.config.slab, frame_bytes) // GRANULE) * GRANULE
        return max(1, self.config.slab // frame_bytes) * frame_bytes

    def frames_a_slab(self, frame_bytes: int) -> int:
        return max(1, self.slab_bytes(frame_bytes) // frame_bytes)

    def held(self, tenant: Tenant) -> int:
        """Bytes of slabs that `tenant` has or is getting."""
        return self.holdings.get(tenant.id, 0)

    def account(self, tenant: Tenant, nbytes: int) -> None:
        """`tenant` has `nbytes` more (or less) of the tier."""
        self.allocated += nbytes
        self.holdings[tenant.id] = self.held(tenant) + nbytes

    def fits(self, tenant: Tenant, frame_bytes: int) -> bool:
        """Whether the tier could ever hold such a frame for that tenant."""
        most = self.capacity
        if tenant.limit:
            most = min(most, tenant.limit.get(self.index, most))
        if len(self.tenants) > 1:
            most -= self.promised_to_others(tenant, held=False)
        return frame_bytes <= most

    def queues(self, nbytes: int) -> bool:
        """Whether so much more may wait to be copied here."""
        return self.unsaved_bytes + nbytes <= self.write_queue

    def may_grow(self, owner: SlabClass, now: float) -> int:
        """Bytes of the slab that `owner` may have now; 0 if none."""
        nbytes = self.slab_bytes(owner.frame_bytes)
        if self.closed or now < self.grow_after or owner.growing >= GROWING_AT_ONCE:
            return 0
        limit = owner.tenant.limit.get(self.index)
        if limit is not None and self.held(owner.tenant) + nbytes > limit:
            return 0
        free = self.capacity - self.allocated - self.promised_to_others(owner.tenant)
        if nbytes > free:
            step = GRANULE if self.device else owner.frame_bytes
            nbytes = free // step * step if self.held(owner.tenant) == 0 else 0
            if nbytes < owner.frame_bytes:
                return 0
        return max(0, nbytes)

    def coldest_slab(self, owner: SlabClass) -> Slab | None:
        """The slab that another class should give up to `owner`, if any: one that could be emptied now and was last
        touched before anything that `owner` could evict itself."""
        oldest = next((frame.touched for frame in owner.lru if not frame.kids and not frame.copies), None)
        limit = owner.tenant.limit.get(self.index)
        for slab in sorted(self.slabs.values(), key=lambda slab: slab.touched if slab.busy else -1):
            if oldest is not None and slab.busy and slab.touched >= oldest:
                break
            other = slab.owner
            if other is owner or not slab.vacatable():
                continue
            if other.tenant is owner.tenant:
                if slab.nbytes >= owner.frame_bytes:
                    return slab
                continue
            floor = other.tenant.guaranteed.get(self.index, 0)
            within = limit is None or self.held(owner.tenant) + slab.nbytes <= limit
            if within and self.held(other.tenant) - slab.nbytes >= floor:
                return slab
        return None

    def excess(self) -> Iterator[Slab]:
        """The slabs to vacate so that the tier comes down to its capacity, the emptiest and coldest first."""
        over = self.allocated - self.capacity - sum(slab.nbytes for slab in self.slabs.values() if slab.leaving)
        order = sorted(
            (slab for slab in self.slabs.values() if not slab.leaving),
            key=lambda slab: (not slab.vacatable(), slab.touched),
        )
        for slab in order:
            if over <= 0:
                return
            over -= slab.nbytes
            yield slab

    def bytes_in(self, state: State) -> int:
        return sum(owner.counts[state] * owner.frame_bytes for owner in self.classes.values())

    def leased_bytes(self) -> int:
        return sum(owner.leased * owner.frame_bytes for owner in self.classes.values())

    def check(self) -> None:
        """Assert what must always hold."""
        assert self.allocated >= sum(slab.nbytes for slab in self.slabs.values())
        assert self.unsaved_bytes == sum(page.nbytes for page in self.unsaved)
        assert self.writing >= 0
        assert self.allocated == sum(self.holdings.values())
        for owner in self.classes.values():
            owner.check()
            assert all(slab.id in self.slabs for slab in owner.slabs)

    def promised_to_others(self, tenant: Tenant, *, held: bool = True) -> int:
        """Bytes of guarantees to other tenants that are not taken up yet (`held`), or all of them."""
        return sum(
            max(0, other.guaranteed.get(self.index, 0) - (self.held(other) if held else 0))
            for other in self.tenants.values()
            if other is not tenant
        )
