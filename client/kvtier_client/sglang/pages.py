"""An engine's pages in kvtierd, under the engine's own keys, copied from and to the engine's own memory.

A page is bytes in one or more *pieces* of the engine's memory; in kvtierd they lie one after another in one frame. So each
piece is copied once, straight from the daemon's memory or to it. Nothing here raises towards the engine: what cannot be
had is a miss, what cannot be stored is left, and while kvtierd is away both cost next to nothing.

The engine's keys name prefixes: whoever has the same key has the same tokens up to there. In kvtierd a page follows the
page before it, which is found again only through it. Where the engine does not say what that is, or it is held no more,
the run that it stores begins a chain of its own: it is found all the same, by its keys.
Not here: what the bytes mean (`identity`), which calls come when (`storage`).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from kvtier.errors import DaemonLost, DeadlineExceeded, KvtierError
from kvtier.keys import KEY_BYTES, Namespace
from kvtier.wire import BUSY, EXISTS, GRANTED, ORPHAN
from kvtier_client.client import Client
from kvtier_client.namespace import NamespaceClient
from kvtier_client.pages import PageView

log = logging.getLogger(__name__)

_REST = 5.0
"""Seconds of misses after a deadline that kvtierd did not meet: who waits for each page of it loses more than it gives."""
_ATTEMPTS = 3
_SMALL = 4 << 20
"""Bytes that are not worth a second thread."""

ResultT = TypeVar("ResultT")


class Pieces(NamedTuple):
    """Where pages lie in the engine's memory: of each page the same number of pieces, one page after another."""

    addresses: Sequence[int]
    sizes: Sequence[int]

    def of(self, page: int, pages: int) -> Iterator[tuple[int, int]]:
        """(address, bytes) of the pieces of page number `page` of `pages`."""
        each = len(self.addresses) // pages
        span = slice(page * each, (page + 1) * each)
        return zip(self.addresses[span], self.sizes[span], strict=True)


class PageStore:
    """The pages of one namespace. Attaches when it is first used, and again whenever kvtierd was away."""

    def __init__(self, spec: Namespace, *, endpoint: str = "", timeout: float = 2.0, threads: int = 2) -> None:
        self.spec = spec
        self.seed = spec.digest()
        self.page_bytes = spec.layout.unit_bytes
        self.endpoint = endpoint
        self.timeout = timeout
        self.threads = threads
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._space: NamespaceClient | None = None
        self._copiers: ThreadPoolExecutor | None = None
        self._closed = False
        self._rest_until = 0.0
        self._well = True

    def key(self, name: str) -> bytes:
        """kvtierd's name of the page that the engine calls `name`."""
        digest = hashlib.blake2b(self.seed, digest_size=KEY_BYTES, person=b"kvtier-engine")
        digest.update(name.encode())
        return digest.digest()

    def held(self, names: Sequence[str]) -> int:
        """How many leading pages are held somewhere. Those on disk start to come up: they are asked for next."""
        keys = [self.key(name) for name in names]
        return self._tried(lambda space: self._find(space, keys), 0) if keys else 0

    def get(self, names: Sequence[str], pieces: Pieces) -> list[bool]:
        """Copy the longest leading run that can be had in time to `pieces`; which pages those were."""
        if not names or not self._fits(names, pieces):
            return [False] * len(names)
        keys = [self.key(name) for name in names]
        got = self._tried(lambda space: self._fetch(space, keys, pieces), 0)
        return [True] * got + [False] * (len(names) - got)

    def put(self, names: Sequence[str], pieces: Pieces, *, after: str = "") -> list[bool]:
        """Store the run of pages `names` from `pieces`; which of them are stored, by this call or another.

        `after` is the page before the first, where the engine knows it and the run does not start at the first token. A
        page that somebody else is storing at this moment counts: it has the same bytes.
        """
        if not names or not self._fits(names, pieces):
            return [False] * len(names)
        keys = [self.key(name) for name in names]
        stored = [False] * len(keys)
        parent = self.key(after) if after else self.seed
        self._tried(lambda space: self._store(space, keys, pieces, parent, stored), None)
        return stored

    def clear(self) -> bool:
        """Forget all pages of this namespace, in every tier and for good."""
        return self._tried(lambda space: space.evict() >= 0, False)

    def close(self) -> None:
        """End the session. Never raises."""
        with self._lock:
            self._closed, self._space = True, None
            client, self._client = self._client, None
            copiers, self._copiers = self._copiers, None
        if copiers is not None:
            copiers.shutdown(wait=True)
        if client is not None:
            client.close()

    def _find(self, space: NamespaceClient, keys: list[bytes]) -> int:
        tiers = space.locate(keys)
        fastest = space.client.current().fastest
        if any(tier != fastest for tier in tiers):
            with contextlib.suppress(KvtierError):
                space.prefetch(keys[: len(tiers)])
        return len(tiers)

    def _fetch(self, space: NamespaceClient, keys: list[bytes], pieces: Pieces) -> int:
        with space.borrow(keys, timeout=self.timeout) as lease:
            self._copy(lease.pages, range(len(lease)), len(keys), pieces, load=True)
            return len(lease)

    def _store(
        self, space: NamespaceClient, keys: list[bytes], pieces: Pieces, parent: bytes, stored: list[bool]
    ) -> None:
        """A run whose parent is gone is stored again as a chain of its own, so that it is not lost with it."""
        at = 0
        for _ in range(_ATTEMPTS):
            start = 0 if parent == self.seed else 1  # any number but 0 does: kvtierd takes the parent's plus one
            with space.reserve(keys[at:], start=start, parent=parent, timeout=self.timeout) as reservation:
                granted = [number - start + at for number in reservation.numbers]
                status = [*reservation.status]
                if granted:
                    self._copy(reservation.pages, granted, len(keys), pieces, load=False)
                    for page, outcome in zip(granted, reservation.commit(), strict=True):
                        status[page - at] = outcome
            for page, outcome in enumerate(status, at):
                stored[page] = outcome in (GRANTED, EXISTS, BUSY)
            if ORPHAN not in status:
                return
            at, parent = at + status.index(ORPHAN), self.seed

    def _copy(
        self, frames: Sequence[PageView], numbers: Sequence[int], pages: int, pieces: Pieces, *, load: bool
    ) -> None:
        """Between `frames` and the pages of those numbers."""
        if not frames:
            return
        with frames[0].holder.attachment.hold():
            jobs = [(frame.address, [*pieces.of(number, pages)]) for frame, number in zip(frames, numbers, strict=True)]
            lanes = min(self.threads, len(jobs)) if len(jobs) * self.page_bytes >= _SMALL else 1
            if lanes > 1:
                list(self._pool().map(lambda lane: _move(jobs[lane::lanes], load), range(lanes)))
            else:
                _move(jobs, load)

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._copiers is None:
                self._copiers = ThreadPoolExecutor(self.threads, thread_name_prefix="kvtier-copy")
            return self._copiers

    def _fits(self, names: Sequence[str], pieces: Pieces) -> bool:
        each, rest = divmod(len(pieces.addresses), len(names))
        sizes = [*pieces.sizes[:each]]
        if each and not rest and sum(sizes) == self.page_bytes and sizes * len(names) == [*pieces.sizes]:
            return True
        log.error(
            "%d pages in %d pieces of %d bytes are not pages of %d bytes: not stored, not loaded",
            *(len(names), len(pieces.addresses), sum(pieces.sizes), self.page_bytes),
        )
        return False

    def _tried(self, action: Callable[[NamespaceClient], ResultT], failed: ResultT) -> ResultT:
        """What `action` gives, or `failed`, said once a time of trouble."""
        if time.monotonic() < self._rest_until:
            return failed
        try:
            result = action(self._attached())
        except KvtierError as error:
            if isinstance(error, DeadlineExceeded):
                self._rest_until = time.monotonic() + _REST
            if self._well:
                log.warning("pages are missed for now: %s", error)
            self._well = False
            return failed
        except Exception:  # a bug of ours must not cost the engine a request
            log.exception("kvtier failed; taken as a miss")
            return failed
        if not self._well:
            log.info("kvtierd serves again")
        self._well = True
        return result

    def _attached(self) -> NamespaceClient:
        space = self._space
        if space is not None:
            return space
        with self._lock:
            if self._closed:
                raise DaemonLost("this store is closed")
            if self._client is None:
                self._client = Client(self.endpoint or None, name="sglang", attach=False)
            if self._space is None:
                self._space = NamespaceClient(self._client, self.spec)
            return self._space


def _move(jobs: Sequence[tuple[int, list[tuple[int, int]]]], load: bool) -> None:
    """memmove, which leaves the interpreter to other threads, a piece at a time."""
    memmove = ctypes.memmove
    for frame, pieces in jobs:
        for address, nbytes in pieces:
            if load:
                memmove(address, frame, nbytes)
            else:
                memmove(frame, address, nbytes)
            frame += nbytes
