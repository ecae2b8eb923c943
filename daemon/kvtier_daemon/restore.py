"""Start-up: the directory is rebuilt from what an earlier daemon recorded, before anyone is served.

What does not fit the tier's capacity any more goes, coldest slabs first; what cannot be reached (its prefix is gone)
or read goes too, and is erased from the index in one transaction. Recency is that of the recording, with every page at
least as young as the pages that follow it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from kvtier.sizes import format_size
from kvtier_daemon.directory import OpenNamespace, Page, Tenant
from kvtier_daemon.index import Contents, Index, PageRecord
from kvtier_daemon.media import FileMedium
from kvtier_daemon.slabs import Slab, State
from kvtier_daemon.store import Store
from kvtier_daemon.tiers import Tier

log = logging.getLogger(__name__)


class Restored(NamedTuple):
    pages: int
    lost_pages: int
    lost_slabs: int


def restore(
    store: Store, tier: Tier, medium: FileMedium, index: Index, tenant_named: Callable[[str], Tenant]
) -> Restored:
    """Fill `tier` with what its index says. Blocks; call before the first request."""
    contents = index.read()
    kept = _adopt(store, tier, medium, contents, tenant_named)
    spaces = {
        number: store.directory.open(tenant_named(tenant), spec)
        for number, (tenant, spec) in contents.namespaces.items()
    }
    pages, lost = _plant(store, tier, contents.pages, spaces)
    _order(store, tier, pages)
    lost_slabs = set(contents.slabs) - kept
    index.rewrite(lost, lost_slabs)
    medium.remove_others(kept)
    if lost or lost_slabs:
        log.warning(
            "tier %s: %d pages and %d slabs of the last run were left behind: no room in %s, or not readable",
            *(tier.name, len(lost), len(lost_slabs), format_size(tier.capacity)),
        )
    return Restored(len(pages), len(lost), len(lost_slabs))


def _adopt(
    store: Store, tier: Tier, medium: FileMedium, contents: Contents, tenant_named: Callable[[str], Tenant]
) -> set[int]:
    """Take over the slabs that fit, first those whose pages were used most recently in the mean; their ids.

    Not by the youngest page: in a full tier a new page takes the frame of the oldest, and so lies among old ones.
    """
    pages: dict[int, tuple[int, int]] = {}
    for record in contents.pages:
        number, total = pages.get(record.slab, (0, 0))
        pages[record.slab] = (number + 1, total + record.stamp)
    mean = {slab_id: total / number for slab_id, (number, total) in pages.items()}
    kept = set()
    for slab_id in sorted(contents.slabs, key=lambda slab_id: mean.get(slab_id, -1.0), reverse=True):
        nbytes, frame_bytes, tenant_name = contents.slabs[slab_id]
        store.room.next_slab = max(store.room.next_slab, slab_id + 1)
        tenant = tenant_named(tenant_name)
        most = tier.capacity - tier.allocated - tier.promised_to_others(tenant)
        if nbytes > most or tier.held(tenant) + nbytes > tenant.limit.get(tier.index, tier.capacity):
            continue
        backing = medium.adopt(slab_id, nbytes)
        if backing is None:
            log.warning("tier %s: %s is missing or short", tier.name, medium.path(slab_id))
            continue
        owner = tier.slab_class(tenant, frame_bytes)
        slab = Slab(slab_id, owner, nbytes, backing)
        tier.slabs[slab_id] = slab
        tier.account(tenant, nbytes)
        owner.adopt(slab)
        kept.add(slab_id)
    return kept


def _plant(
    store: Store, tier: Tier, records: list[PageRecord], spaces: dict[int, OpenNamespace]
) -> tuple[list[tuple[Page, PageRecord]], list[tuple[int, bytes]]]:
    """Publish the recorded pages whose slab and prefix are there. (page, record), and what is lost."""
    planted: list[tuple[Page, PageRecord]] = []
    lost: list[tuple[int, bytes]] = []
    slabs = tier.slabs
    records.sort(key=lambda record: record.number)
    for record in records:
        namespace_id, key, parent_key, number, slab_id, frame_index, checksum, _ = record
        space = spaces.get(namespace_id)
        slab = slabs.get(slab_id)
        if space is None or slab is None or frame_index >= len(slab.frames):
            lost.append((namespace_id, key))
            continue
        pages = space.tenant.pages
        parent = pages.get(parent_key)
        frame = slab.frames[frame_index]
        if parent is not None:
            reachable = parent.number == number - 1 and parent.namespace is space
        else:
            reachable = number == 0 and parent_key == space.seed
        if slab.owner.frame_bytes != space.spec.page_bytes(space.spec.schedule.order(number)):
            reachable = False
        if not reachable or frame.state is not State.FREE or slab.owner.tenant is not space.tenant:
            lost.append((namespace_id, key))
            continue
        page = pages.get(key)
        if page is None:
            page = store.directory.publish(key, space, number, parent)
        page.frames[tier.index] = frame
        frame.page = page
        frame.checksum = checksum
        frame.generation = 1
        frame.become(State.READY)
        slab.busy += 1
        if parent is not None:
            above = parent.frames[tier.index]
            if above is not None:
                above.kids += 1
        planted.append((page, record))
    for owner in tier.classes.values():
        owner.free = [frame for frame in owner.free if frame.state is State.FREE]
    return planted, lost


def _order(store: Store, tier: Tier, planted: list[tuple[Page, PageRecord]]) -> None:
    """Put the pages in order of recency, tails first."""
    youngest: dict[bytes, int] = {}
    for _, record in reversed(planted):  # deepest first
        stamp = max(record.stamp, youngest.get(record.key, 0))
        youngest[record.key] = stamp
        if stamp > youngest.get(record.parent, 0):
            youngest[record.parent] = stamp
    planted.sort(key=lambda entry: (youngest[entry[1].key], -entry[1].number))
    for page, record in planted:
        frame = page.frames[tier.index]
        assert frame is not None
        frame.touched = youngest[record.key]
        frame.slab.touched = max(frame.slab.touched, frame.touched)
        frame.slab.owner.lru.add(frame)
    if planted:
        store.tick = max(store.tick, max(youngest.values()))
