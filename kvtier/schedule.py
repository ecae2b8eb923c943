"""Where a sequence is cut into pages: sizes follow the position in the sequence, never the request.

A page that starts at token t holds 2**k units, with 2**k units <= max(1 unit, t/16 tokens), up to a cap. So every
request of a namespace cuts its tokens at the same places and prefixes are shared whatever their length; what does not
fill a page stays under max(1 unit, 1/16 of the length); and a context of 1M tokens is about 4,000 pages.

From that rule: order 0 serves the first 32 pages, each order after it 16 pages, and the last order all the rest. Both
directions (page number to tokens, tokens to page number) are therefore arithmetic, with no table.

Not here: what a unit holds (`kvtier.layout`) and how a page is named (`kvtier.keys`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from kvtier.errors import LayoutError

_FIRST = 32
_EACH = 16
"""Pages of order 0, and of every order between it and the last: t/16 doubles after 16 pages of the size it allows."""


class Span(NamedTuple):
    """The tokens [start, stop) that one page of 2**order units holds."""

    start: int
    stop: int
    order: int


class Schedule(msgspec.Struct, frozen=True):
    """The cuts of one namespace. `cap_tokens` bounds a page; it is a power of two of units."""

    unit_tokens: int = 16
    cap_tokens: int = 256

    def __post_init__(self) -> None:
        units, rest = divmod(self.cap_tokens, self.unit_tokens)
        if rest or units < 1 or units & (units - 1):
            raise LayoutError(
                f"cap_tokens {self.cap_tokens} is not {self.unit_tokens} (a unit) times a power of two; "
                f"the nearest that is: {self.unit_tokens * max(1, 1 << max(0, units.bit_length() - 1))}"
            )

    @property
    def top_order(self) -> int:
        return (self.cap_tokens // self.unit_tokens).bit_length() - 1

    def order(self, page: int) -> int:
        """Of page number `page`: it holds 2**order units."""
        if page < _FIRST:
            return 0
        return min(1 + (page - _FIRST) // _EACH, self.top_order)

    def tokens(self, first: int, count: int) -> int:
        """Of `count` pages from number `first` on."""
        return self.span(first + count - 1).stop - self.span(first).start if count else 0

    def span(self, page: int) -> Span:
        """Of page number `page`, counted from 0."""
        order = self.order(page)
        size = self.unit_tokens << order
        if order == 0:
            start = page * size
        else:
            start = _EACH * size + (page - self._first_page(order)) * size
        return Span(start, start + size, order)

    def pages(self, tokens: int) -> int:
        """How many whole pages the first `tokens` tokens fill."""
        units = tokens // self.unit_tokens
        order = min(max(0, (units // _EACH).bit_length() - 1), self.top_order)
        if order == 0:
            return units
        return self._first_page(order) + (units >> order) - _EACH

    def covered(self, tokens: int) -> int:
        """How many of the first `tokens` tokens lie in whole pages."""
        count = self.pages(tokens)
        return self.span(count - 1).stop if count else 0

    def spans(self, tokens: int) -> Iterator[Span]:
        """Of every whole page of the first `tokens` tokens, in order."""
        return map(self.span, range(self.pages(tokens)))

    @staticmethod
    def _first_page(order: int) -> int:
        return _FIRST + (order - 1) * _EACH
