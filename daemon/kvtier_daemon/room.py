"""Room in a tier: slabs grown, taken from colder classes, emptied and given back; frames evicted.

    no frame free ──► grow a slab, else take the coldest slab of another class, else evict the coldest tail:
        a page that another tier holds too is dropped at once; one that waits to be saved is saved first;
        one that nothing will save is forgotten

A part of the store, and changes its state through it. Who may have how much is decided in `kvtier_daemon.tiers`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvtier_daemon.jobs import Carve, Grow, Shrink
from kvtier_daemon.slabs import Frame, Slab, SlabClass, State
from kvtier_daemon.tiers import GROWING_AT_ONCE, Tier

if TYPE_CHECKING:
    from kvtier_daemon.store import Store

GROW_RETRY = 5.0
"""Seconds before a medium that refused a slab is asked again."""
LOOK_EVERY = 16
"""Evictions of a class between two looks at whether another class's slab is colder than all of its own."""


class Room:
    """`retire` is told of slabs that sessions should unmap. Slab numbers are not used twice."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.retire: Callable[[Slab], None] = lambda slab: None
        self.next_slab = 1

    def make(self, owner: SlabClass) -> None:
        """Have a frame of `owner` come free, now or soon."""
        tier = owner.tier
        if owner.growing and owner.growing * tier.frames_a_slab(owner.frame_bytes) > len(owner.waiters):
            return
        nbytes = tier.may_grow(owner, self.store.clock())
        if nbytes:
            self._grow(owner, nbytes)
        elif not owner.growing:
            victim = owner.victim()
            owner.misses += 1
            if (victim is None or owner.misses % LOOK_EVERY == 0) and self._steal(owner):
                return
            if victim is not None:
                self.evict(victim)

    def grow_for(self, owner: SlabClass, nbytes: Iterable[int]) -> None:
        """Someone waits for frames of `owner`: grow as many slabs at once as pages of these sizes will want."""
        tier = owner.tier
        per_slab = tier.frames_a_slab(owner.frame_bytes)
        most = itertools.islice(nbytes, GROWING_AT_ONCE * per_slab)
        wanted = sum(each == owner.frame_bytes for each in most)
        while owner.growing * per_slab < wanted:
            slab = tier.may_grow(owner, self.store.clock())
            if not slab:
                return
            self._grow(owner, slab)

    def make_ahead(self, owner: SlabClass) -> None:
        """Make room before it is needed, as far as that costs nobody anything."""
        tier = owner.tier
        if owner.growing:
            return
        nbytes = tier.may_grow(owner, self.store.clock())
        if nbytes:
            self._grow(owner, nbytes)
        elif tier.persistent:
            for _ in range(2 * owner.low - len(owner.free) - owner.counts[State.DRAINING]):
                victim = owner.victim()
                if victim is None:
                    break
                self.evict(victim)

    def can_take(self, owner: SlabClass, touched: int) -> bool:
        """Whether `owner` could have a frame now at no cost to a page used since tick `touched`."""
        if owner.free or owner.growing or owner.tier.may_grow(owner, self.store.clock()):
            return True
        victim = owner.victim()
        return victim is not None and victim.touched < touched

    def vacate(self, slab: Slab, heir: SlabClass | None = None) -> None:
        """Empty `slab`: what another tier holds is dropped, the rest saved below first, leased frames when released."""
        slab.owner.vacate(slab)
        slab.heir = heir
        if slab.busy == 0:
            self.emptied(slab)
            return
        for frame in slab.frames:
            slab.owner.lru.discard(frame)
        heads_first = sorted(slab.frames, key=lambda frame: frame.page.number if frame.page is not None else 0)
        for frame in heads_first:  # giving the last of them back empties the slab
            if frame.state is State.READY:
                self.store.settle(frame)

    def resize(self, tier: Tier, capacity: int) -> None:
        """Give `tier` another capacity. Shrinking goes slab by slab, as they come empty."""
        tier.capacity = capacity
        tier.grow_after = 0.0
        for slab in list(tier.excess()):
            self.vacate(slab)
        self.store.wake_all(tier)

    def unheld(self, slab: Slab) -> None:
        """No session maps `slab` any more."""
        if slab.retired and not slab.holders:
            self.store.post(Shrink(slab.owner.tier, slab))

    def emptied(self, slab: Slab) -> None:
        """What becomes of a leaving slab that is empty now."""
        owner, heir = slab.owner, slab.heir
        tier = owner.tier
        if heir is None and slab.holders and tier.allocated <= tier.capacity:
            heir = owner  # drained: idle workers would keep it mapped, and nobody could have anything in its place
        owner.disown(slab)
        if heir is not None and heir.tenant is owner.tenant and slab.nbytes >= heir.frame_bytes and not tier.closed:
            heir.adopt(slab)
            if tier.persistent:
                self.store.post(Carve(slab))
            for _ in slab.frames:
                self.store.wake(heir)
            return
        del tier.slabs[slab.id]
        slab.retired = True
        if slab.holders:
            self.retire(slab)
        else:
            self.store.post(Shrink(tier, slab))

    def evict(self, victim: Frame) -> None:
        """Have `victim`'s page leave its tier: at once where that loses nothing, else saved below first if it is to be."""
        page = victim.page
        assert page is not None
        below = victim.tier.below
        if self.store.replicas(page) > 1:
            self.store.drop(victim)
            self.store.counters.evicted("demoted" if below is not None else "evicted")
        elif below is not None and page in below.unsaved and not self.store.stalled(below):
            self.store.save(page, below, first=True)
            self.store.pump(below)
        else:
            self.store.forget(page, "evicted" if below is None else "unsaved")

    def leave(self, frame: Frame) -> None:
        """`frame` is in a slab that is to be emptied."""
        page = frame.page
        assert page is not None
        below = frame.tier.below
        if self.store.replicas(page) > 1:
            self.store.drop(frame)
            self.store.counters.evicted("vacated")
        elif below is None or below.closed:
            self.store.forget(page, "vacated")
        elif frame.slab.heir is not None and page not in below.unsaved and not below.queues(page.nbytes):
            self.store.forget(page, "unsaved")  # a slab that another class waits for is as good as evicted
        elif page.frames[below.index] is None:
            self.store.save(page, below, first=True)

    def grown(self, job: Grow) -> None:
        owner = job.owner
        tier = owner.tier
        owner.growing -= 1
        if job.error is not None:
            tier.account(owner.tenant, -job.nbytes)
            tier.grow_after = self.store.clock() + GROW_RETRY
            self.store.counters.grow_failures += 1
        else:
            slab = Slab(job.slab_id, owner, job.nbytes, job.backing)
            tier.slabs[slab.id] = slab
            owner.adopt(slab)
            if tier.persistent:
                self.store.post(Carve(slab))
            if tier.closed or tier.allocated > tier.capacity:
                self.vacate(slab)
        for _ in range(len(owner.waiters)):
            self.store.wake(owner)

    def _grow(self, owner: SlabClass, nbytes: int) -> None:
        owner.growing += 1
        owner.tier.account(owner.tenant, nbytes)
        self.store.post(Grow(owner, self.next_slab, nbytes))
        self.next_slab += 1

    def _steal(self, owner: SlabClass) -> bool:
        """Start to move a colder slab of another class to `owner`; whether one was found."""
        if len(owner.tier.classes) < 2 or any(slab.heir is owner for slab in owner.tier.slabs.values()):
            return False
        slab = owner.tier.coldest_slab(owner)
        if slab is None:
            return False
        self.store.counters.reassigned += 1
        self.vacate(slab, owner)
        return True
