"""What a forward pass takes on: decided from counts alone, so that it can be tried out without a model or a daemon.

Every running sequence is fed what it lacks: one token when it decodes, a chunk of its prompt when it does not. Those that
decode come first, so that long prompts do not hold up answers; what the budget leaves goes to prompts, oldest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Runnable(Protocol):
    @property
    def left(self) -> int:
        """Tokens to compute."""

    @property
    def computed(self) -> int: ...

    @property
    def capacity(self) -> int:
        """Tokens that there are frames for."""


RunnableT = TypeVar("RunnableT", bound=Runnable)


def plan(running: Sequence[RunnableT], budget: int) -> list[tuple[RunnableT, int]]:
    """(sequence, tokens) for the next pass, at most `budget` tokens; `running` is in order of arrival.

    A sequence that lacks frames for a token waits, and holds up nobody.
    """
    work: list[tuple[RunnableT, int]] = []
    for sequence in running:
        if sequence.left == 1 and sequence.capacity > sequence.computed and budget > 0:
            work.append((sequence, 1))
            budget -= 1
    for sequence in running:
        count = min(sequence.left, sequence.capacity - sequence.computed, budget)
        if sequence.left > 1 and count > 0:
            work.append((sequence, count))
            budget -= count
    return work
