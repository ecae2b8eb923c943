"""One sample of a request: its tokens, how many of them are computed, and the pages their KV stands in.

Its page table is a list; page i holds what `Schedule.span(i)` says. Pages come from kvtierd: borrowed for what is known
there, reserved ahead for what is to be computed. A page that became whole is published at once and kept; a fork shares
whole pages and copies the one that is being written. All methods are the loop's, and none of them waits: what takes a
round trip is an errand, of which a sequence has one at a time.

    WAITING ── fetch ──► RUNNING ── finished, cancelled ──► ENDED
       ▲                    │
       └──── preempted ─────┘     its whole pages stay in kvtierd, which may demote them; it borrows them again
"""

from __future__ import annotations

import enum
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from kvtier.wire import EXISTS, GRANTED
from kvtier_client.namespace import NamespaceClient
from kvtier_client.transformers.errands import Answer, pages_for
from kvtier_client.transformers.paging import Hold, Leftovers, Page
from kvtier_client.transformers.requests import Request


class State(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


class Source(NamedTuple):
    """Where a fork copies the page from that its parent is writing, and how many tokens of it."""

    page: Page
    tokens: int


class Sequence:
    """`limit`: tokens, the prompt's included, after which it ends."""

    def __init__(
        self, request: Request, sample: int, space: NamespaceClient, tokens: list[int], limit: int, device: torch.device
    ) -> None:
        self.request = request
        self.sample = sample
        self.space = space
        self.tokens = tokens
        self.limit = limit
        self.state = State.WAITING
        self.computed = 0
        self.pages: list[Page] = []
        self.sealed = 0
        self.sealable = True
        self.source: Source | None = None
        self.errand: Future[Any] | None = None
        self.arrived = 0.0
        self.starved_since: float | None = None
        self.slot = -1
        seed = request.sampling.seed
        self.generator = None if seed is None else torch.Generator(device).manual_seed(seed + sample)

    def __repr__(self) -> str:
        return f"<Sequence: {self.computed} of {len(self.tokens)} tokens, {len(self.pages)} pages, {self.state.name}>"

    @property
    def capacity(self) -> int:
        """Tokens that its pages can hold."""
        return self.space.schedule.span(len(self.pages) - 1).stop if self.pages else 0

    @property
    def left(self) -> int:
        """Tokens that are there and not computed."""
        return len(self.tokens) - self.computed

    @property
    def whole(self) -> int:
        """Leading pages that are computed to their last token."""
        return self.space.schedule.pages(self.computed)

    def goal(self, ahead: int) -> int:
        """Tokens it wants frames for. The last token of all is never computed, for nothing follows it."""
        return max(len(self.tokens), min(len(self.tokens) + ahead, self.limit - 1))

    def short_of(self, ahead: int) -> bool:
        return pages_for(self.space.schedule, self.goal(ahead)) > len(self.pages)

    def unpublished(self) -> list[Page]:
        """Whole pages that kvtierd does not know yet, unless a fork has them on their way."""
        while self.sealed < self.whole and self.pages[self.sealed].slot < 0:
            self.sealed += 1
        found = self.pages[self.sealed : self.whole] if self.sealable else []
        return [] if any(page.asked for page in found) else found

    def begin(self, answer: Answer) -> None:
        """The first pages are there."""
        self.pages = answer.borrowed
        self.sealed = len(self.pages)
        self.computed = self.capacity
        self.pages += answer.reserved
        self.state = State.RUNNING

    def extend(self, answer: Answer) -> None:
        self.pages += answer.reserved

    def settle(self, pages: list[Page], answer: Answer, leftovers: Leftovers) -> bool:
        """`pages` were published, as far as the answer says; whether any of them stands elsewhere now."""
        moved = False
        instead = None if answer.instead is None else Hold(answer.instead)
        for page, status, kept in zip(pages, answer.statuses, answer.kept, strict=True):
            page.asked = False
            if status == GRANTED:
                page.published(kept)
            elif status == EXISTS and answer.instead is not None and page.number < len(answer.instead):
                assert instead is not None
                page.move(answer.instead[page.number], instead, leftovers)
                moved = True
            else:
                # Nothing after it could be found either: what follows is this sequence's alone.
                self.sealable = False
        if answer.instead is not None and not moved:
            leftovers.leases.append(answer.instead)
        return moved

    def fork(self, request: Request, sample: int, device: torch.device) -> Sequence:
        """Another sample that goes on from here. It shares what is computed, and needs a frame for the page that is not
        whole; that is copied when the frame is there (`adopt`)."""
        child = Sequence(request, sample, self.space, list(self.tokens), self.limit, device)
        child.pages = self.pages[: self.whole]
        for page in child.pages:
            page.refs += 1
        child.sealed = min(self.sealed, len(child.pages))
        child.sealable = self.sealable
        child.computed = child.capacity
        rest = self.computed - child.computed
        if rest:
            page = self.pages[len(child.pages)]
            page.refs += 1
            child.source = Source(page, rest)
        child.state = State.RUNNING
        return child

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
        self.sealable = True

    def check(self) -> None:
        assert 0 <= self.sealed <= self.whole <= len(self.pages), self
        assert self.computed <= self.capacity and self.computed <= len(self.tokens), self
        assert all(page.number == at and page.refs > 0 for at, page in enumerate(self.pages)), self
