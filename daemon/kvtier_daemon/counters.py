"""What the daemon counts. Plain numbers that only grow, kept by the state thread and read by `stats` and metrics."""

from __future__ import annotations

import bisect
from typing import Any

BUCKETS = (
    1e-5,
    2.5e-5,
    5e-5,
    1e-4,
    2.5e-4,
    5e-4,
    1e-3,
    2.5e-3,
    5e-3,
    1e-2,
    2.5e-2,
    5e-2,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
"""Upper bounds, in seconds, of the latency histograms."""


class Latency:
    """A histogram of seconds."""

    __slots__ = ("buckets", "count", "seconds")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BUCKETS) + 1)
        self.count = 0
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.buckets[bisect.bisect_left(BUCKETS, seconds)] += 1
        self.count += 1
        self.seconds += seconds

    def quantile(self, share: float) -> float:
        """The upper bound of the bucket that the quantile falls in; 0 where nothing was counted."""
        wanted = share * self.count
        for bound, number in zip((*BUCKETS, float("inf")), self.buckets, strict=True):
            wanted -= number
            if number and wanted <= 0:
                return min(bound, 2 * BUCKETS[-1])
        return 0.0


class Moves:
    """Copies from one tier to another, for one reason."""

    __slots__ = ("bytes", "failed", "pages", "seconds")

    def __init__(self) -> None:
        self.pages = 0
        self.bytes = 0
        self.seconds = 0.0
        self.failed = 0


class Counters:
    """`hits` and `hit_tokens` have an entry a tier: pages (tokens) that a borrow leased there without waiting for a
    copy, or for which it waited, counted under the tier they came from. A hit is also a request, so no share of them
    can pass 1: both are counted when the request is answered, never one of them earlier. `missed_tokens` are those of
    pages asked for and not lent."""

    def __init__(self, tiers: int) -> None:
        self.lookups = 0
        self.lookup_keys = 0
        self.lookup_found = 0
        self.borrows = 0
        self.requested = 0
        self.hits = [0] * tiers
        self.hit_tokens = [0] * tiers
        self.missed_tokens = 0
        self.commits = 0
        self.committed_tokens = 0
        self.reserved = 0
        self.exists = 0
        self.busy = 0
        self.out_of_pages = 0
        self.evictions: dict[str, int] = {}
        self.moves: dict[tuple[int, int, str], Moves] = {}
        self.lost = 0
        self.checksum_failures = 0
        self.unsaved = 0
        self.reassigned = 0
        self.grow_failures = 0
        self.attached = 0
        self.deaths = 0
        self.protocol_errors = 0
        self.events_dropped = 0
        self.latency: dict[str, Latency] = {}
        self.errors: dict[str, int] = {}

    def asked(self, pages: int, missed_tokens: int) -> None:
        """A borrow of so many pages is answered."""
        self.requested += pages
        self.missed_tokens += missed_tokens

    def evicted(self, reason: str, pages: int = 1) -> None:
        self.evictions[reason] = self.evictions.get(reason, 0) + pages

    def moved(
        self, path: tuple[int, int, str], pages: int, nbytes: int, seconds: float, error: Exception | None
    ) -> None:
        """`path` is (from tier, to tier, why)."""
        moves = self.moves.get(path)
        if moves is None:
            moves = self.moves[path] = Moves()
        if error is not None:
            moves.failed += pages
        else:
            moves.pages += pages
            moves.bytes += nbytes
            moves.seconds += seconds

    def paths(self) -> dict[tuple[int, int], Moves]:
        """The moves by path, whatever their reasons."""
        paths: dict[tuple[int, int], Moves] = {}
        for (source, target, _), moves in sorted(self.moves.items()):
            path = paths.setdefault((source, target), Moves())
            path.pages += moves.pages
            path.bytes += moves.bytes
            path.seconds += moves.seconds
            path.failed += moves.failed
        return paths

    def took(self, verb: str, seconds: float) -> None:
        latency = self.latency.get(verb)
        if latency is None:
            latency = self.latency[verb] = Latency()
        latency.add(seconds)

    def failed(self, code: str) -> None:
        self.errors[code] = self.errors.get(code, 0) + 1

    def report(self) -> dict[str, Any]:
        """All of it by name, for `stats`; moves and latencies are reported by who knows the tiers' names."""
        plain = {name: value for name in dir(self) if isinstance(value := getattr(self, name), int)}
        return plain | {
            "hits": list(self.hits),
            "hit_tokens": list(self.hit_tokens),
            "evictions": dict(self.evictions),
            "errors": dict(self.errors),
        }
