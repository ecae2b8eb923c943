"""Where a borrow gets a page, when there is a choice. The cost rule for pages that another GPU holds is here.

What is asked for "any" is lent where it lies, in the fastest tier that the worker can read in place; what lies in none
is brought to the slowest of those. For the next time, what was lent from slower memory than the worker's own GPU's then
rises there: at once while that has frames to spare, on its second borrow when it has not, so that what is used once
pushes nothing out.

What is asked for in one GPU's memory and lies in another's can be read in place over the link, replicated, or moved.
A decode step reads every page of its context once, and a replica costs about one such read (1.04, measured on two H200;
docs/performance.md): from the second step on it is the cheaper choice. So a page is replicated wherever a frame can be had
that costs nobody a page used more recently than this one; else it is read in place. It is moved (the other replica dropped)
where the GPU that it came from has no free frame left and nobody there holds it.
"""

from __future__ import annotations

from kvtier_daemon.directory import Page
from kvtier_daemon.jobs import Priority
from kvtier_daemon.slabs import READY, Frame
from kvtier_daemon.store import Store
from kvtier_daemon.tiers import Tier

_SECOND_BORROW = 3
"""`Page.uses` then: its commit was one."""


def place(store: Store, page: Page, wanted: Tier | None, readable: frozenset[int]) -> Tier:
    """The tier to lend `page` in, to a worker that asked for `wanted` (None: any) and can read `readable` in place."""
    if wanted is None:
        usable = [tier for tier in store.tiers if tier.index in readable]
        return next((tier for tier in usable if page.frames[tier.index] is not None), usable[-1])
    if not readable or page.frames[wanted.index] is not None:
        return wanted
    there = _on_peer(page, wanted, readable)
    if there is None:
        return wanted
    owner = store.class_of(wanted, page.namespace.tenant, page.nbytes)
    return wanted if store.room.can_take(owner, there.touched) else there.tier


def leave_crowded(store: Store, run: list[Page], tier: Tier) -> None:
    """`run` is lent in `tier` now: what of it came from a GPU that has no frame free leaves there."""
    if not tier.device:
        return
    crowded = {
        owner
        for other in store.tiers
        if other.device and other is not tier
        for owner in other.classes.values()
        if not owner.free
    }
    if not crowded:
        return
    replicas = [frame for page in reversed(run) if page.frames[tier.index] is not None for frame in page.frames]
    store.shed([frame for frame in replicas if frame is not None and frame.slab.owner in crowded])


def rise(store: Store, run: list[Page], home: Tier) -> None:
    """`run` was lent where it lies: what is not in `home`, the memory of the worker's own GPU, goes there meanwhile."""
    for page in run:
        if page.frames[home.index] is not None:
            continue
        owner = store.class_of(home, page.namespace.tenant, page.nbytes)
        to_spare = len(owner.free) > owner.low or home.may_grow(owner, store.clock())
        if not to_spare and page.uses < _SECOND_BORROW:
            return  # a tier holds heads of chains: what follows would not be found there
        if page.gone or store.fetch(page, home, Priority.PREFETCH) is None:
            return


def _on_peer(page: Page, wanted: Tier, readable: frozenset[int]) -> Frame | None:
    """The replica of `page` on another GPU that this worker can read."""
    if not wanted.device:
        return None
    for frame in page.frames:
        if frame is not None and frame.state is READY and frame.tier.device and frame.tier.index in readable:
            return frame
    return None
