"""A run of tokens and the pages their KV stands in.

The page table is a list; page i holds what `Schedule.span(i)` says. Pages come from kvtierd: borrowed for what is known
there, reserved for what is to be computed. A page that is whole is published and kept; a fork shares whole pages and copies
the one that is being written. Nothing here waits or asks: what takes a round trip is an errand (`errands`), whose answer is
applied here. Not here: whose tokens they are and when they are computed (`sequence`, `generation`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy

from kvtier.wire import EXISTS, GRANTED
from kvtier_client.namespace import NamespaceClient
from kvtier_client.transformers.errands import Answer
from kvtier_client.transformers.paging import Leftovers, Page


class Source(NamedTuple):
    """Where a fork copies the page from that its parent is writing, and how many tokens of it."""

    page: Page
    tokens: int


class Chain:
    """`computed`: of its tokens, those whose KV stands in pages; `sealed`: of its pages, those that kvtierd has."""

    def __init__(self, space: NamespaceClient, tokens: list[int]) -> None:
        self.space = space
        self.tokens = tokens
        self.computed = 0
        self.pages: list[Page] = []
        self.sealed = 0
        self.source: Source | None = None
        self._row: tuple[tuple[int, int], numpy.ndarray[Any, numpy.dtype[numpy.int64]]] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.computed} of {len(self.tokens)} tokens, {len(self.pages)} pages>"

    @property
    def capacity(self) -> int:
        """Tokens that its pages can hold."""
        return self.space.schedule.span(len(self.pages) - 1).stop if self.pages else 0

    @property
    def whole(self) -> int:
        """Leading pages that are computed to their last token."""
        return self.space.schedule.pages(self.computed)

    def addresses(self) -> numpy.ndarray[Any, numpy.dtype[numpy.int64]]:
        """Of all its units, the first token's first: its row of a table for kernels."""
        stamp = (len(self.pages), Page.moves)
        if self._row is None or self._row[0] != stamp:
            stride = self.space.spec.layout.unit_stride
            units = numpy.array([len(page.units) for page in self.pages], numpy.int64)
            starts = numpy.array([page.address for page in self.pages], numpy.int64)
            within = numpy.arange(units.sum()) - numpy.repeat(numpy.cumsum(units) - units, units)
            self._row = (stamp, numpy.repeat(starts, units) + within * stride)
        return self._row[1]

    def unpublished(self) -> list[Page]:
        """Whole pages that kvtierd does not know yet, unless a fork has them on their way."""
        while self.sealed < self.whole and self.pages[self.sealed].slot < 0:
            self.sealed += 1
        found = self.pages[self.sealed : self.whole]
        return [] if any(page.asked or page.refused for page in found) else found

    def begin(self, answer: Answer) -> None:
        """The first pages are there."""
        self._row = None
        self.pages = answer.borrowed
        self.sealed = len(self.pages)
        self.computed = self.capacity
        self.pages += answer.reserved

    def extend(self, answer: Answer) -> None:
        self.pages += answer.reserved

    def settle(self, pages: list[Page], answer: Answer, leftovers: Leftovers) -> bool:
        """`pages` were published, as far as the answer says; whether any of them stands elsewhere now."""
        moved = False
        for page, status, kept in zip(pages, answer.statuses, answer.kept, strict=True):
            page.asked = False
            if status == GRANTED:
                page.published(kept)
            elif status == EXISTS and page.number < len(answer.instead):
                page.move(answer.instead[page.number], leftovers)
                moved = True
            else:
                # Nothing after it could be found either: what follows stays this worker's alone.
                page.refused = True
        for hold in {*answer.kept}:
            leftovers.unused(hold)
        leftovers.drop(answer.instead)
        return moved

    def share(self, parent: Chain) -> None:
        """Go on from where `parent` is: share what is whole, and note the page that is not as the source to copy from
        once there is a frame for it (`adopt`)."""
        self._row = None
        self.pages = parent.pages[: parent.whole]
        for page in self.pages:
            page.refs += 1
        self.sealed = min(parent.sealed, len(self.pages))
        self.computed = self.capacity
        rest = parent.computed - self.computed
        if rest:
            page = parent.pages[len(self.pages)]
            page.refs += 1
            self.source = Source(page, rest)

    def adopt(self, leftovers: Leftovers) -> None:
        """Copy what the parent had computed of the page that it goes on writing."""
        source = self.source
        assert source is not None and self.capacity >= self.computed + source.tokens
        target = self.pages[source.page.number]
        tokens = self.space.spec.layout.unit_tokens
        units, rest = divmod(source.tokens, tokens)
        target.units[:units] = source.page.units[:units]
        if rest:
            target.units[units, :, :, :, :rest] = source.page.units[units, :, :, :, :rest]
        self.computed += source.tokens
        self.source = None
        leftovers.drop([source.page])

    def clear(self, leftovers: Leftovers) -> None:
        """Let go of all pages."""
        leftovers.drop(self.pages)
        if self.source is not None:
            leftovers.drop([self.source.page])
        self.pages, self.source = [], None
        self.computed = self.sealed = 0

    def check(self) -> None:
        assert 0 <= self.sealed <= self.whole <= len(self.pages), self
        assert self.computed <= self.capacity and self.computed <= len(self.tokens), self
        assert all(page.number == at and page.refs > 0 for at, page in enumerate(self.pages)), self
