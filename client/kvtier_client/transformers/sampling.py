"""How the next token is chosen from logits: by Transformers' own processors, in the order `generate` applies them.

Rows of a batch that want the same are processed together. Logits are float32 from here on, as in `generate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvtier.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a request wants. `temperature` 0 is greedy, and then nothing but `repetition_penalty` has a say.

    `stop_tokens` are added to the model's own end-of-sequence ids, which `ignore_eos` leaves out. With `seed`, sample i
    is drawn from a generator of its own, seeded with seed + i: the same tokens in every run on the same device, whatever
    else is in the batch. `logprobs`: how many alternatives to report with each token (0: the token's own only).
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    n: int = 1
    stop_tokens: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        wrong = [
            f"{name} is {getattr(self, name)}: {rule}"
            for name, holds, rule in (
                ("max_tokens", self.max_tokens >= 1, "at least 1"),
                ("temperature", self.temperature >= 0, "0 (greedy) or more"),
                ("top_p", 0 < self.top_p <= 1, "above 0, up to 1 (off)"),
                ("top_k", self.top_k >= 0, "0 (off) or more"),
                ("min_p", 0 <= self.min_p < 1, "from 0 (off) to below 1"),
                ("repetition_penalty", self.repetition_penalty > 0, "above 0; 1 is off"),
                ("n", self.n >= 1, "at least 1"),
                ("logprobs", self.logprobs is None or self.logprobs >= 0, "None, or 0 or more"),
            )
            if not holds
        ]
        if wrong:
            raise InvalidRequest("; ".join(wrong))

    @property
    def warpers(self) -> list[Any]:
        """Of what does not depend on the tokens so far."""
        if self.temperature == 0:
            return []
        found: list[Any] = []
        if self.temperature != 1:
            found.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            found.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            found.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            found.append(MinPLogitsWarper(self.min_p))
        return found


class Row(NamedTuple):
    """One row of logits to choose from: what its request wants, its tokens so far, its generator if it is seeded."""

    sampling: Sampling
    tokens: Sequence[int]
    generator: torch.Generator | None


class Choice(NamedTuple):
    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


def choose(logits: torch.Tensor, rows: Sequence[Row]) -> list[Choice]:
    """A token for each row of `logits` `[rows, vocabulary]`."""
    logits = logits.float()
    if all(row.sampling.temperature == 0 and plain(row.sampling) for row in rows):
        return [Choice(token, None, ()) for token in logits.argmax(-1).tolist()]
    scores = logits.clone()
    alike: dict[tuple[float, ...], list[int]] = {}
    for at, row in enumerate(rows):
        wanted = row.sampling
        if wanted.repetition_penalty != 1:
            ids = torch.tensor([list(row.tokens)], device=logits.device)
            scores[at : at + 1] = RepetitionPenaltyLogitsProcessor(wanted.repetition_penalty)(ids, scores[at : at + 1])
        alike.setdefault((wanted.temperature, wanted.top_k, wanted.top_p, wanted.min_p), []).append(at)
    chosen = torch.empty(len(rows), dtype=torch.long, device=logits.device)
    for members in alike.values():
        wanted, index = rows[members[0]].sampling, torch.tensor(members, device=logits.device)
        group = scores[index]
        if wanted.temperature == 0:
            chosen[index] = group.argmax(-1)
            continue
        for warper in wanted.warpers:
            group = warper(None, group)
        probabilities = group.softmax(-1)
        for at, member in enumerate(members):
            generator = rows[member].generator
            if generator is not None:
                chosen[member] = torch.multinomial(probabilities[at], 1, generator=generator)[0]
        free = [at for at, member in enumerate(members) if rows[member].generator is None]
        if free:
            chosen[index[free]] = torch.multinomial(probabilities[free], 1)[:, 0]
    return _told(logits, chosen, rows)


def plain(sampling: Sampling) -> bool:
    """Whether the model's logits alone decide, and nobody asks about them."""
    return sampling.repetition_penalty == 1 and sampling.logprobs is None


def _told(logits: torch.Tensor, chosen: torch.Tensor, rows: Sequence[Row]) -> list[Choice]:
    tokens = chosen.tolist()
    asked = [at for at, row in enumerate(rows) if row.sampling.logprobs is not None]
    choices = [Choice(token, None, ()) for token in tokens]
    if asked:
        logprobs = logits[asked].log_softmax(-1)
        own = logprobs.gather(1, chosen[asked][:, None])[:, 0].tolist()
        most = max(rows[at].sampling.logprobs or 0 for at in asked)
        best, ids = (found.tolist() for found in logprobs.topk(most)) if most else ([[]] * len(asked),) * 2
        for row, at in enumerate(asked):
            count = rows[at].sampling.logprobs or 0
            top = tuple(zip(ids[row][:count], best[row][:count], strict=True))
            choices[at] = Choice(tokens[at], own[row], top)
    return choices
