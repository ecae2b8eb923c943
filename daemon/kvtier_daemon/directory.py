"""Which pages there are, per tenant, as the tree that their prefixes form.

A page here is published: sealed bytes under a key, in one or more tiers. Its parent is the page before it, and it is
published too, or the page is the first of its namespace: so a lookup of a chain can stop at the first key it misses.
A page with no frame left is forgotten at once, together with all that follow it, since nothing can reach those.
Not here: frames and their states (`kvtier_daemon.slabs`), and what moves when (`kvtier_daemon.store`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import TYPE_CHECKING

from kvtier.keys import Namespace
from kvtier.presence import PresenceTable
from kvtier_daemon.slabs import READY, Frame

if TYPE_CHECKING:
    from kvtier_daemon.tiers import Tier

_MANY = 1024
"""Namespaces that are let be, empty or not."""


class OpenNamespace:
    """A namespace as this daemon knows it: `id` is what requests name it by, `seed` its digest."""

    __slots__ = ("borrowed", "id", "orders", "pages", "schedule", "seed", "sizes", "spec", "tenant", "tokens")

    def __init__(self, namespace_id: int, tenant: Tenant, spec: Namespace) -> None:
        self.id = namespace_id
        self.tenant = tenant
        self.spec = spec
        self.seed = spec.digest()
        self.schedule = spec.schedule
        orders = range(self.schedule.top_order + 1)
        self.sizes = [spec.page_bytes(order) for order in orders]
        self.tokens = [self.schedule.unit_tokens << order for order in orders]
        self.orders = bytes(map(self.schedule.order, range(self.schedule.pages(17 * self.schedule.cap_tokens))))
        """By page number, for all pages up to the first few of the top order."""
        self.pages = 0
        self.borrowed = 0

    def page_bytes(self, number: int) -> int:
        """Of the frame that page `number` needs."""
        return self.sizes[self.orders[number] if number < len(self.orders) else -1]


class Page:
    """A run of tokens' KV. `frames` has an entry a tier: its replica there or None. `children` is None, one page or a
    set, since most pages have one. `uses` counts commits and borrows."""

    __slots__ = ("children", "frames", "gone", "key", "namespace", "nbytes", "number", "parent", "uses", "waiters")

    def __init__(self, key: bytes, namespace: OpenNamespace, number: int, parent: Page | None, tiers: int) -> None:
        self.key = key
        self.namespace = namespace
        self.number = number
        self.nbytes = namespace.page_bytes(number)
        self.parent = parent
        self.children: Page | set[Page] | None = None
        self.frames: list[Frame | None] = [None] * tiers
        self.gone = False
        self.uses = 1
        self.waiters: list[object] | None = None

    @property
    def tokens(self) -> int:
        namespace = self.namespace
        return namespace.tokens[namespace.orders[self.number] if self.number < len(namespace.orders) else -1]

    def ready(self) -> Frame | None:
        """Its replica in the fastest tier that has one."""
        for frame in self.frames:
            if frame is not None and frame.state is READY:
                return frame
        return None

    def in_reach(self, tier: Tier) -> Frame | None:
        """The fastest replica that one copy brings to `tier`."""
        for frame in self.frames:
            if frame is not None and frame.state is READY and tier.reaches(frame.tier):
                return frame
        return None

    def enter(self, frame: Frame) -> None:
        """`frame` is this page's replica in its tier from now on."""
        index = frame.tier.index
        frame.page = self
        self.frames[index] = frame
        children = self.children
        if isinstance(children, Page):
            frame.kids = 0 if children.frames[index] is None else 1
        elif children is not None:
            frame.kids = sum(kid.frames[index] is not None for kid in children)
        if self.parent is not None and not self.gone:
            above = self.parent.frames[index]
            if above is not None:
                above.kids += 1

    def leave(self, frame: Frame) -> None:
        """`frame` holds this page no more; its parent's frame may be a leaf now."""
        assert frame.page is self
        index = frame.tier.index
        frame.slab.owner.lru.discard(frame)
        frame.page = None
        frame.kids = 0
        self.frames[index] = None
        if not self.gone:
            self.left(index)

    def left(self, index: int) -> None:
        """This page is in tier `index` no more; the frame of its parent there may be a leaf now."""
        above = self.parent.frames[index] if self.parent is not None else None
        if above is None:
            return
        above.kids -= 1
        if not above.kids and above.state is READY and not above.pins and not above.slab.leaving:
            above.slab.owner.lru.add_coldest(above)

    def kids(self) -> Iterator[Page]:
        children = self.children
        if isinstance(children, Page):
            yield children
        elif children is not None:
            yield from children


class Tenant:
    """One user of the daemon, with its own pages, slabs and limits (bytes by tier index)."""

    __slots__ = ("guaranteed", "id", "limit", "name", "namespaces", "pages", "presence", "writing")

    def __init__(self, tenant_id: int, name: str, guaranteed: dict[int, int], limit: dict[int, int]) -> None:
        self.id = tenant_id
        self.name = name
        self.guaranteed = guaranteed
        self.limit = limit
        self.pages: dict[bytes, Page] = {}
        self.presence = PresenceTable()
        """The keys of `pages`, for its workers to look up by themselves."""
        self.namespaces: dict[bytes, OpenNamespace] = {}
        self.writing: set[bytes] = set()
        """Keys that a reservation will publish."""

    def run(self, keys: list[bytes]) -> list[Page]:
        """The longest leading run of `keys` that is published. Changes nothing."""
        pages = self.pages
        found: list[Page] = []
        page: Page | None = None
        for key in keys:
            # What follows a page is most often its only child: that costs no search.
            next_page = page.children if page is not None else None
            if isinstance(next_page, Page) and next_page.key == key:
                page = next_page
            else:
                page = pages.get(key)
                if page is None:
                    break
            found.append(page)
        return found

    def count(self, keys: list[bytes]) -> int:
        """The length of that run."""
        return len(list(takewhile(self.pages.__contains__, keys)))


class Directory:
    """All tenants and their trees of pages."""

    def __init__(self, tiers: int) -> None:
        self.tiers = tiers
        self.tenants: dict[str, Tenant] = {}
        self.namespaces: dict[int, OpenNamespace] = {}
        self._next = 1
        self._many = _MANY

    def tenant(
        self, name: str, guaranteed: dict[int, int] | None = None, limit: dict[int, int] | None = None
    ) -> Tenant:
        """The tenant of that name, new with these limits if it was not known."""
        tenant = self.tenants.get(name)
        if tenant is None:
            tenant = Tenant(len(self.tenants) + 1, name, guaranteed or {}, limit or {})
            self.tenants[name] = tenant
        return tenant

    def open(self, tenant: Tenant, spec: Namespace) -> OpenNamespace:
        """The tenant's namespace with these fields; opening it twice gives the same one."""
        seed = spec.digest()
        opened = tenant.namespaces.get(seed)
        if opened is None:
            opened = OpenNamespace(self._next, tenant, spec)
            self._next += 1
            tenant.namespaces[seed] = self.namespaces[opened.id] = opened
        return opened

    @property
    def crowded(self) -> bool:
        """Whether there are twice as many namespaces as `close_empty` left the last time."""
        return len(self.namespaces) >= self._many

    def close_empty(self, held: set[OpenNamespace]) -> None:
        """Close the namespaces that have no pages and are not in `held`: a salt a user, they would add up for ever."""
        for space in list(self.namespaces.values()):
            if not space.pages and space not in held:
                del self.namespaces[space.id], space.tenant.namespaces[space.seed]
        self._many = max(_MANY, 2 * len(self.namespaces))

    def publish(self, key: bytes, namespace: OpenNamespace, number: int, parent: Page | None) -> Page:
        """A new page under `key`, which must be free."""
        page = Page(key, namespace, number, parent, self.tiers)
        tenant = namespace.tenant
        tenant.pages[key] = page
        tenant.presence.add(key)
        namespace.pages += 1
        if parent is not None:
            children = parent.children
            if children is None:
                parent.children = page
            elif isinstance(children, Page):
                parent.children = {children, page}
            else:
                children.add(page)
        return page

    def unpublish(self, page: Page) -> list[Page]:
        """Take `page` and all that follow it out of the tree; returns them, deepest first."""
        parent = page.parent
        if parent is not None and parent.children is not None:
            if isinstance(parent.children, Page):
                parent.children = None
            else:
                parent.children.discard(page)
        order = [page]
        for member in order:
            order.extend(member.kids())
        tenant = page.namespace.tenant
        for member in order:
            del tenant.pages[member.key]
            tenant.presence.discard(member.key)
            member.namespace.pages -= 1
            member.gone = True
            member.children = None
        order.reverse()
        return order

    def check(self) -> None:
        """Assert what must always hold."""
        for tenant in self.tenants.values():
            tenant.presence.check(tenant.pages)
            for key, page in tenant.pages.items():
                assert page.key == key and not page.gone
                assert any(frame is not None for frame in page.frames), "a page with no frame is still published"
                assert not (tenant.writing & {key}), "a published key is being written"
                if page.parent is not None:
                    assert not page.parent.gone and page in set(page.parent.kids())
                    assert page.number == page.parent.number + 1
                for index, frame in enumerate(page.frames):
                    if frame is not None:
                        assert frame.page is page and frame.tier.index == index
                        resident = sum(kid.frames[index] is not None for kid in page.kids())
                        assert frame.kids == resident, (frame.kids, resident)
