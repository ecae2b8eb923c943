"""A namespace as a worker uses it: keys of its tokens, and the verbs on its pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvtier import keys as page_keys
from kvtier import wire
from kvtier.errors import DaemonLost, NotOpen
from kvtier.keys import Namespace
from kvtier_client.pages import Lease, Reservation

if TYPE_CHECKING:
    from kvtier_client.attachment import Attachment
    from kvtier_client.client import Client, Pending

_TIMEOUT = 5.0


class NamespaceClient:
    """The pages of one namespace. Made by `Client.namespace`; survives a restart of the daemon."""

    def __init__(self, client: Client, spec: Namespace) -> None:
        self.client = client
        self.spec = spec
        self.schedule = spec.schedule
        self.seed = spec.digest()
        self._opened: tuple[Attachment, int] | None = None
        self._open(client.current())

    def keys(self, tokens: Sequence[int], media: Iterable[tuple[int, bytes]] = ()) -> list[bytes]:
        """The key of every whole page of `tokens`; see `kvtier.keys.chain`."""
        return page_keys.chain(self.spec, tokens, media, seed=self.seed)

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading pages are held somewhere. Neither pins nor refreshes them: what a borrow gets may be less.

        Told by the presence table of the tenant, without asking the daemon, but for the first time and now and then.
        """
        found = self.client.present(keys)
        if found is None:
            return self.client.call("lookup", wire.Lookup(b"".join(keys)), wire.Found).pages
        return found

    def locate(self, keys: Sequence[bytes]) -> list[str]:
        """The fastest tier of each page of the leading run."""
        attachment = self.client.current()
        found = self.client.on(attachment, "lookup", wire.Lookup(b"".join(keys), True), wire.Found)
        return [attachment.tiers[tier] for tier in found.tiers]

    def borrow(self, keys: Sequence[bytes], *, tier: str = "any", timeout: float = _TIMEOUT) -> Lease:
        """Lease the longest leading run that can be had in `tier` within `timeout` seconds, bringing it there.

        `tier` is a tier's name, "cuda" (the memory of the client's GPU) or "any" (wherever the page lies, if this process
        can read it there). An empty lease is a miss. Raises OutOfPages when not even one page got a frame, DaemonLost.
        """
        attachment = self.client.current()
        body = wire.Borrow(b"".join(keys), attachment.named(tier))
        answer = self.client.on(attachment, "borrow", body, wire.Borrowed, timeout=timeout)
        return Lease(self, attachment, answer.lease, answer.handles, answer.origins)

    def submit_borrow(self, keys: Sequence[bytes], *, tier: str = "any", timeout: float = _TIMEOUT) -> Pending[Lease]:
        """As `borrow`, waited for later."""

        def finish(attachment: Attachment, body: Any) -> Lease:
            answer = wire.convert(body, wire.Borrowed)
            return Lease(self, attachment, answer.lease, answer.handles, answer.origins)

        body = wire.Borrow(b"".join(keys), self.client.current().named(tier))
        return self.client.submit("borrow", body, finish, timeout=timeout)

    def reserve(
        self,
        keys: Sequence[bytes],
        *,
        start: int = 0,
        parent: bytes | None = None,
        tier: str | None = None,
        timeout: float = _TIMEOUT,
    ) -> Reservation:
        """Frames to write the pages `keys[start:]` in, `keys` being the chain from page 0. With `parent`, the key of page
        `start` - 1, `keys` are those from page `start` on only.

        `tier` None is the fastest. Raises OutOfPages when not one frame came free in time, DaemonLost.
        """
        if parent is None:
            parent, keys = keys[start - 1] if start else self.seed, keys[start:]
        return self._reserve(start, len(keys), parent, b"".join(keys), tier, timeout)

    def reserve_ahead(
        self, first: int, count: int, parent: bytes | None = None, *, tier: str | None = None, timeout: float = _TIMEOUT
    ) -> Reservation:
        """Frames for pages `first` to `first + count` whose tokens are not known yet; their keys are given at commit.

        `parent` is the key of the page before; None where there is none, or it is not known yet either, and then it is
        given at commit too.
        """
        return self._reserve(first, count, parent or (b"" if first else self.seed), b"", tier, timeout)

    def prefetch(self, keys: Sequence[bytes], *, tier: str | None = None) -> int:
        """Start bringing the leading run to `tier` (None: the fastest); how many pages are there or on their way."""
        attachment = self.client.current()
        body = wire.Prefetch(b"".join(keys), tier or attachment.fastest)
        return self.client.on(attachment, "prefetch", body, wire.Count).count

    def pin(self, keys: Sequence[bytes], *, tier: str | None = None, timeout: float = _TIMEOUT) -> wire.Pinned:
        """Hold the leading run in `tier` beyond this session, until `Client.unpin`."""
        attachment = self.client.current()
        body = wire.Pin(b"".join(keys), tier or attachment.fastest)
        return self.client.on(attachment, "pin", body, wire.Pinned, timeout=timeout)

    def migrate(self, keys: Sequence[bytes], tier: str, *, move: bool = False, timeout: float = 60.0) -> int:
        """Copy the leading run to `tier`; with `move`, leave it in no faster one. How many pages are there."""
        body = wire.Migrate(b"".join(keys), tier, move)
        return self.client.call("migrate", body, wire.Count, timeout=timeout).count

    def evict(self, keys: Sequence[bytes] | None = None, *, timeout: float = 60.0) -> int:
        """Forget these pages and all that follow them (None: the whole namespace), in every tier and for good."""
        if keys is None:
            return self.client.evict(namespace=self.seed, timeout=timeout)
        return self.client.call("evict", wire.Evict(b"".join(keys)), wire.Count, timeout=timeout).count

    def _reserve(
        self, first: int, count: int, parent: bytes, keys: bytes, tier: str | None, timeout: float
    ) -> Reservation:
        attachment = self.client.current()
        if count <= 0:
            return Reservation(self, attachment, first, 0, b"", b"")
        body = wire.Reserve(self._open(attachment), tier or attachment.fastest, first, count, parent, keys)
        try:
            answer = self.client.on(attachment, "reserve", body, wire.Reserved, timeout=timeout)
        except NotOpen:
            self._opened = None
            body.namespace = self._open(attachment)
            answer = self.client.on(attachment, "reserve", body, wire.Reserved, timeout=timeout)
        return Reservation(self, attachment, first, answer.reservation, answer.status, answer.handles)

    def _open(self, attachment: Attachment) -> int:
        """The daemon's number of this namespace; opened, with its layout proven, once an attachment."""
        opened = self._opened
        if opened is not None and opened[0] is attachment:
            return opened[1]
        with attachment.opening:
            try:
                attachment.probe(self.spec.layout)
            except DaemonLost:
                self.client.lost(attachment)  # or the next call would be made with it again
                raise
            body = wire.Open(self.spec, self.seed, self.spec.layout.fingerprint(), True)
            number = self.client.on(attachment, "open", body, wire.Opened).namespace
        self._opened = (attachment, number)
        return number
