"""What movers are asked to do. A job is data: the store makes it, a mover's thread runs it, the store finishes it.

A job in flight holds its frames at both ends (`copies` on the source, FILLING on the destination), whatever becomes of
the page or the session meanwhile.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier_daemon.directory import Page
    from kvtier_daemon.operations import Operation
    from kvtier_daemon.slabs import Frame, Slab, SlabClass
    from kvtier_daemon.tiers import Tier


class Priority(IntEnum):
    """Who waits for a job: a borrow, a prefetch, nobody."""

    BORROW = 0
    PREFETCH = 1
    WRITE = 2


class Job:
    """`error` says, once it was run, why it failed. `seconds` is how long it took."""

    __slots__ = ("error", "priority", "seconds", "taken")

    def __init__(self, priority: Priority) -> None:
        self.priority = priority
        self.error: Exception | None = None
        self.seconds = 0.0
        self.taken = False


LONGEST = 32 << 20
LONGEST_PEER = 256 << 20
"""Bytes of a run at most, the second between GPUs: some half a millisecond of either link. Whoever waits for a page of a run
waits for all of it; each costs its link some 3 us, 13 between GPUs."""


def longest(origin: Tier, tier: Tier) -> int:
    """Bytes of a run from one tier to the other at most."""
    return LONGEST_PEER if origin.device and tier.device else LONGEST


class Copy(Job):
    """Bytes of each of `pages` from its frame in `sources` to that in `targets`, from the tier `origin` to `tier`; in the
    `background` if nobody waits.

    Several pages are a run: their frames lie side by side, in one slab at either end, so that one call copies them all.
    What a page's move costs beside its bytes is paid once for a run.
    """

    __slots__ = ("background", "longest", "nbytes", "origin", "pages", "sources", "targets", "tier")

    def __init__(
        self, page: Page, source: Frame, target: Frame, priority: Priority, *, background: bool = False
    ) -> None:
        super().__init__(priority)
        self.background = background
        self.pages = [page]
        self.sources = [source]
        self.targets = [target]
        self.origin = source.tier
        self.tier = target.tier
        self.nbytes = page.nbytes
        self.longest = longest(self.origin, self.tier)

    def add(self, page: Page, source: Frame, target: Frame) -> bool:
        """Take one more page, if it follows those that there are at both ends."""
        before, behind = self.sources[-1], self.targets[-1]
        if (
            source.slab is not before.slab
            or source.index != before.index + 1
            or target.slab is not behind.slab
            or target.index != behind.index + 1
            or self.nbytes + page.nbytes > self.longest
        ):
            return False
        self.pages.append(page)
        self.sources.append(source)
        self.targets.append(target)
        self.nbytes += page.nbytes
        return True

    def beside(self, pages: list[Page], start: int, stop: int) -> list[Frame]:
        """The frames of `pages[start:stop]` in the tier that this comes from, one after the other, as long as each follows
        the one before at that end, is the best to copy from, and none is where this goes."""
        found: list[Frame] = []
        origin, there = self.origin.index, self.tier.index
        slab, index = self.sources[-1].slab, self.sources[-1].index
        for number in range(start, stop):
            page = pages[number]
            frames = page.frames
            source = frames[origin]
            index += 1
            if source is None or source.slab is not slab or source.index != index:
                break
            if page.gone or frames[there] is not None or page.ready() is not source:
                break
            found.append(source)
        return found

    def extend(self, pages: list[Page], sources: list[Frame], targets: list[Frame]) -> None:
        """Take more pages, which follow those that there are at both ends."""
        self.pages += pages
        self.sources += sources
        self.targets += targets
        self.nbytes += len(pages) * pages[0].nbytes


class Grow(Job):
    """Make a slab of `nbytes` for `owner`; `backing` is the medium's handle of it."""

    __slots__ = ("backing", "nbytes", "owner", "slab_id")

    def __init__(self, owner: SlabClass, slab_id: int, nbytes: int) -> None:
        super().__init__(Priority.PREFETCH if owner.free else Priority.BORROW)
        self.owner = owner
        self.slab_id = slab_id
        self.nbytes = nbytes
        self.backing: object = None


class Shrink(Job):
    """Give an empty slab that nobody maps back to the medium."""

    __slots__ = ("slab", "tier")

    def __init__(self, tier: Tier, slab: Slab) -> None:
        super().__init__(Priority.WRITE)
        self.tier = tier
        self.slab = slab


class Record(Job):
    """Write in the index of a persistent tier that `target` now holds `page`, as copied from `source`."""

    __slots__ = ("page", "source", "target")

    def __init__(self, page: Page, source: Frame, target: Frame) -> None:
        super().__init__(Priority.WRITE)
        self.page = page
        self.source = source
        self.target = target


class Erase(Job):
    """Take `key` of the namespace `seed` of `tenant` out of the index, so that `frame` may be reused."""

    __slots__ = ("frame", "key", "seed", "tenant")

    def __init__(self, tenant: str, seed: bytes, key: bytes, frame: Frame) -> None:
        super().__init__(Priority.WRITE)
        self.tenant = tenant
        self.seed = seed
        self.key = key
        self.frame = frame


class Carve(Job):
    """Write in the index how `slab` is carved now (it may have gone to another class)."""

    __slots__ = ("slab",)

    def __init__(self, slab: Slab) -> None:
        super().__init__(Priority.WRITE)
        self.slab = slab


class Barrier(Job):
    """Does nothing; finished when all index jobs posted before it, in every persistent tier, are durable."""

    __slots__ = ("awaited", "done", "waiter")

    def __init__(self, waiter: Operation | None = None) -> None:
        super().__init__(Priority.WRITE)
        self.waiter = waiter
        self.done = False
        self.awaited = 1
