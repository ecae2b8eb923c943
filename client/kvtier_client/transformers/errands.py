"""What is asked of kvtierd on behalf of a sequence: in threads of the worker's clerk, never in its loop.

An errand works on what it is given when it is sent, and its answer is applied by the loop (`sequence`). So a decode step
waits for no round trip: pages are reserved before they are needed, and published while the next tokens are computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.errors import KvtierError, OutOfPages
from kvtier.schedule import Schedule
from kvtier_client.namespace import NamespaceClient
from kvtier_client.pages import Reservation
from kvtier_client.transformers.paging import Hold, Leftovers, Page, on_lease, on_reservation

_TIGHT = 1.0
"""Seconds to wait for known pages while frames are short: what does not come in time is computed again."""


@dataclass(slots=True)
class Answer:
    """`borrowed` and `reserved` pages are new. Of pages that were to be published, each has a status, and one of `kept`,
    the lease that holds it if it was GRANTED; `instead` are the chain's pages, if somebody else had published some first.

    `starved`: frames ran out."""

    borrowed: list[Page]
    reserved: list[Page]
    statuses: bytes = b""
    kept: tuple[Hold, ...] = ()
    instead: list[Page] = field(default_factory=list)
    starved: OutOfPages | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """How long an errand may wait for pages and for frames, and in which tier it wants them."""

    tier: str
    borrow: float
    reserve: float


def pages_for(schedule: Schedule, tokens: int) -> int:
    """How many pages it takes to hold them, the last of them maybe not full."""
    return schedule.pages(tokens) + (schedule.covered(tokens) < tokens)


def fetch(space: NamespaceClient, tokens: Sequence[int], goal: int, terms: Terms, tight: bool = False) -> Answer:
    """Borrow what there is of all tokens but the last, and reserve frames for the rest, up to `goal` tokens.

    Of the last token there must be something to compute, or nothing would follow from it. When frames are short (`tight`),
    they are reserved first: leases would keep in place what has to make room for them. Raises DaemonLost.
    """
    keys = space.keys(tokens[:-1])
    known = space.lookup(keys) if tight and keys else 0
    answer = reserve(space, known, goal, terms) if known else Answer([], [])
    if answer.starved is not None:
        return answer
    try:
        if keys:
            try:
                timeout = min(terms.borrow, _TIGHT) if tight else terms.borrow
                lease = space.borrow(keys[: known or None], tier=terms.tier, timeout=timeout)
                answer.borrowed = on_lease(lease) if lease else []
            except OutOfPages as error:
                answer.starved = error
        first = len(answer.borrowed)
        if first < known or not known:
            rest = reserve(space, first, space.schedule.span(known - 1).stop if known else goal, terms)
            gap = known and len(rest.reserved) < known - first
            if gap:  # pages after a gap are of no use
                _return(answer.reserved)
            answer.reserved = rest.reserved + ([] if gap else answer.reserved)
            answer.starved = rest.starved
    except BaseException:
        _return([*answer.borrowed, *answer.reserved])
        raise
    return answer


def reserve(space: NamespaceClient, first: int, goal: int, terms: Terms) -> Answer:
    """Frames for pages from `first` on, until they reach `goal` tokens; fewer, or none, where frames ran out."""
    count = pages_for(space.schedule, goal) - first
    if count <= 0:
        return Answer([], [])
    try:
        reservation = space.reserve_ahead(first, count, tier=_fastest(terms), timeout=terms.reserve)
    except OutOfPages as error:
        return Answer([], [], starved=error)
    return Answer([], on_reservation(reservation))


def publish(
    space: NamespaceClient, tokens: Sequence[int], pages: Sequence[Page], terms: Terms, after: Any = None
) -> Answer:
    """Seal pages that stand in reservations, in the order of their numbers, and keep them leased.

    `after`: an event of the stream that writes them. Where others have published the same tokens first, their pages are
    borrowed `instead`. Raises DaemonLost.
    """
    keys = space.keys(tokens)
    answer = Answer([], [])
    try:
        for reservation, slots, numbers in _runs(pages):
            parent = keys[numbers[0] - 1] if numbers[0] else b""
            status, lease = reservation.commit_and_lease(
                slots, keys=[keys[number] for number in numbers], parent=parent, after=after
            )
            answer.statuses += status
            answer.kept += (Hold(lease),) * len(slots)
        if any(answer.statuses):
            with contextlib.suppress(OutOfPages):
                lease = space.borrow(keys[: pages[-1].number + 1], tier=terms.tier, timeout=terms.borrow)
                answer.instead = on_lease(lease)
    except BaseException:
        for hold in answer.kept:
            hold.unmap()
        raise
    return answer


def part(
    space: NamespaceClient, tokens: Sequence[int], whole: Sequence[Page], leftovers: Leftovers, after: Any = None
) -> None:
    """Publish what is whole and not published yet, keep none of it, and give all back. Never raises: what cannot be
    published is lost to the cache, and nothing else."""
    done: set[tuple[int, int]] = set()
    try:
        if after is not None:
            after.synchronize()
        keys = space.keys(tokens) if whole else []
        for reservation, slots, numbers in _runs(whole):
            parent = keys[numbers[0] - 1] if numbers[0] else b""
            reservation.commit(slots, keys=[keys[number] for number in numbers], parent=parent)
            done |= {(id(reservation), slot) for slot in slots}
    except KvtierError:
        pass
    for which, (_, slots) in leftovers.slots.items():
        slots[:] = [slot for slot in slots if (which, slot) not in done]
    leftovers.give_back()


def _runs(pages: Sequence[Page]) -> list[tuple[Reservation, list[int], list[int]]]:
    """(reservation, slots, numbers) of pages in order, those of one reservation together."""
    runs: list[tuple[Reservation, list[int], list[int]]] = []
    for page in pages:
        of = page.hold.of
        assert isinstance(of, Reservation)
        if not runs or runs[-1][0] is not of:
            runs.append((of, [], []))
        runs[-1][1].append(page.slot)
        runs[-1][2].append(page.number)
    return runs


def _return(pages: Sequence[Page]) -> None:
    leftovers = Leftovers()
    leftovers.drop(pages)
    leftovers.give_back()


def _fastest(terms: Terms) -> str | None:
    """Where new pages are written: the fastest tier, unless a tier is named."""
    return None if terms.tier in ("any", "cuda") else terms.tier
