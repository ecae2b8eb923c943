"""One sample of a request, as the worker runs it.

    WAITING ── fetch ──► RUNNING ── finished, cancelled ──► ENDED
       ▲                    │
       └──── preempted ─────┘     its whole pages stay in kvtierd, which may demote them; it borrows them again

It has one errand at a time. Not here: its tokens and pages (`chain`).
"""

from __future__ import annotations

import enum
from concurrent.futures import Future
from typing import Any

import torch

from kvtier_client.namespace import NamespaceClient
from kvtier_client.transformers.chain import Chain
from kvtier_client.transformers.errands import pages_for
from kvtier_client.transformers.requests import Request


class State(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


class Sequence(Chain):
    """`limit`: tokens, the prompt's included, after which it ends. `slot`: its row in tables on the device, -1 for none.

    `age` orders sequences by arrival, later ones above. `lacking`: it cannot go on for want of frames. `starved_since`:
    when it was first kept from getting further than it ever was.
    """

    def __init__(
        self, request: Request, sample: int, space: NamespaceClient, tokens: list[int], limit: int, device: torch.device
    ) -> None:
        super().__init__(space, tokens)
        self.request = request
        self.sample = sample
        self.limit = limit
        self.state = State.WAITING
        self.errand: Future[Any] | None = None
        self.age = (0, sample)
        self.lacking = False
        self.starved_since: float | None = None
        self._furthest = 0
        self.slot = -1
        seed = request.sampling.seed
        self.generator = None if seed is None else torch.Generator(device).manual_seed(seed + sample)

    @property
    def left(self) -> int:
        """Tokens that are there and not computed."""
        return len(self.tokens) - self.computed

    @property
    def samples(self) -> int:
        """How many sequences it is going to be: the first pass over a prompt is one of all its samples."""
        return self.request.sampling.n if len(self.tokens) == self.request.prompt_tokens else 1

    def goal(self, ahead: int) -> int:
        """Tokens it wants frames for. The last token of all is never computed, for nothing follows it."""
        return max(len(self.tokens), min(len(self.tokens) + ahead, self.limit - 1))

    def short_of(self, ahead: int) -> bool:
        return pages_for(self.space.schedule, self.goal(ahead)) > len(self.pages)

    def advance(self, count: int) -> None:
        """So many tokens more are computed."""
        self.computed += count
        if self.computed > self._furthest:
            self._furthest = self.computed
            self.starved_since = None

    def fork(self, sample: int, device: torch.device) -> Sequence:
        """Another sample of the request, that goes on from here."""
        child = Sequence(self.request, sample, self.space, list(self.tokens), self.limit, device)
        child.share(self)
        child.age = (self.age[0], sample)
        child.state = State.RUNNING
        return child
