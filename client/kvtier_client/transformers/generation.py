"""A cache for `model.generate`: the prompt's known prefix is borrowed, what is new is computed into pages and published.

    with GenerationCache(model, client, **inputs) as cache:
        model.generate(**inputs, past_key_values=cache)

Attention reads the pages where they lie; the model keeps no KV of its own. Batches may be padded on the left, be expanded
(`num_return_sequences`, beams) and be reordered (beam search): rows that share a past share its pages, and copy the page
that is being written. Where kvtierd has no frames, or is lost, the rest goes to memory of this process, and the text is
the same. Not for assisted decoding, which takes tokens back.

Not here: a server's loop (`worker`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch

from kvtier.errors import DaemonLost, Draining, InvalidRequest, KvtierError
from kvtier_client.client import Client
from kvtier_client.namespace import NamespaceClient
from kvtier_client.transformers import attention, errands
from kvtier_client.transformers.attention import Part
from kvtier_client.transformers.batches import make_batch
from kvtier_client.transformers.chain import Chain
from kvtier_client.transformers.errands import Answer, Terms, pages_for
from kvtier_client.transformers.model import check_device, describe, open_namespace
from kvtier_client.transformers.paging import Leftovers, in_own_memory

_LOG = logging.getLogger(__name__)
_AHEAD = 64
"""Tokens that frames are reserved for beyond those at hand: a round trip every so many tokens."""


class GenerationCache(attention.PagedCache):
    """`input_ids` `[batch, length]` are those that `generate` will be given, in full, and `attention_mask` likewise.

    `cached_tokens` says by row how much of the prompt came from kvtierd. `space` saves opening the namespace again, for
    more than one generation; or `revision` and others as in `open_namespace`. A context manager: on the way in the model
    is given this package's attention, on the way out its own, and all pages go back. Raises InvalidRequest for masks
    that are not padding on the left, LayoutError for a model that cannot run on pages, DaemonLost.
    """

    def __init__(
        self,
        model: Any,
        client: Client,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        space: NamespaceClient | None = None,
        tier: str | None = None,
        **naming: Any,
    ) -> None:
        check_device(model, client)
        self.model = model
        self.space = space or open_namespace(client, model, **naming)
        super().__init__(describe(model, unit_tokens=self.space.spec.layout.unit_tokens).layout)
        if self.layout != self.space.spec.layout:
            raise InvalidRequest(f"the namespace is of {self.space.spec.layout}, the model's KV is {self.layout}")
        self._terms = Terms(tier or ("cuda" if model.device.type == "cuda" else "any"), borrow=10.0, reserve=0.5)
        self._width = input_ids.shape[1]
        pads = _padding(input_ids, attention_mask)
        self._pads = pads
        self._chains = [Chain(self.space, row[pad:]) for row, pad in zip(input_ids.tolist(), pads, strict=True)]
        self._hooks: list[Any] = []
        self._own_memory = False
        for chain in self._chains:
            self._fetch(chain)
        self.cached_tokens = [chain.computed for chain in self._chains]
        self.length = min(
            min(pad + chain.computed for pad, chain in zip(pads, self._chains, strict=True)), self._width - 1
        )

    def __repr__(self) -> str:
        return f"<GenerationCache: {len(self._chains)} rows of {self.length} tokens>"

    # What Transformers asks

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        chosen = torch.arange(len(self._chains))[indices.cpu()]
        self._select(chosen.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(len(self._chains)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise InvalidRequest("pages that are written are not taken back: no assisted decoding with this cache")

    def reset(self) -> None:
        raise InvalidRequest("a GenerationCache is for one generation: make another")

    # Before and after each forward pass

    def __enter__(self) -> Self:
        attention.lend(self.model)
        self._hooks = [
            self.model.register_forward_pre_hook(self._before, with_kwargs=True),
            self.model.register_forward_hook(self._after, with_kwargs=True),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        attention.take_back(self.model)
        self.close()

    def close(self) -> None:
        """Publish what is whole and give all pages back. Never raises."""
        for chain in self._chains:
            whole = [] if self._own_memory else chain.unpublished()
            leftovers = Leftovers()
            tokens = chain.tokens[: chain.computed]
            for page in whole:
                page.refs += 1
            chain.clear(leftovers)
            leftovers.drop(whole)
            errands.part(self.space, tokens, [page for page in whole if not page.refs], leftovers, self._event())
        self._chains = []

    def _before(self, _: Any, arguments: tuple[Any, ...], given: dict[str, Any]) -> None:
        if self not in (given.get("past_key_values"), given.get("cache")):
            return
        ids = given.get("input_ids")
        if ids is None:
            raise InvalidRequest("a GenerationCache needs input_ids: embeddings have no keys")
        rows = ids.tolist()
        if len(rows) != len(self._chains) and len(rows) % max(1, len(self._chains)) == 0:
            self.batch_repeat_interleave(len(rows) // len(self._chains))
        if len(rows) != len(self._chains):
            raise InvalidRequest(f"this cache is of {len(self._chains)} rows, and the model is given {len(rows)}")
        parts = []
        stop = self.length + ids.shape[1]
        for row, (chain, pad, new) in enumerate(zip(self._chains, self._pads, rows, strict=True)):
            start = max(self.length - pad, 0)
            skipped = start - (self.length - pad)
            _follow(chain, start, new[skipped:])
            self._frames(chain, stop - pad)
            if stop > pad:
                parts.append(Part(chain, start, stop - pad - start, row * ids.shape[1] + skipped))
        self.over(make_batch(self.layout, parts, self.model.device))

    def _after(self, _: Any, arguments: tuple[Any, ...], given: dict[str, Any], out: Any) -> None:
        if self not in (given.get("past_key_values"), given.get("cache")):
            return
        self.length += given["input_ids"].shape[1]
        for chain, pad in zip(self._chains, self._pads, strict=True):
            chain.computed = max(chain.computed, self.length - pad)
            self._publish(chain)

    # Pages

    def _fetch(self, chain: Chain) -> None:
        try:
            chain.begin(errands.fetch(self.space, chain.tokens, len(chain.tokens), self._terms))
        except (DaemonLost, Draining) as error:
            self._manage_without(error)

    def _frames(self, chain: Chain, tokens: int) -> None:
        """Frames for so many tokens, in memory of this process where there is no other."""
        while chain.capacity < tokens:
            answer = self._ask(errands.reserve, self.space, len(chain.pages), tokens + _AHEAD, self._terms)
            if answer is None or not answer.reserved:
                if answer is not None:
                    self._manage_without(answer.starved)
                schedule, first = self.space.schedule, len(chain.pages)
                count = pages_for(schedule, tokens) - first
                answer = Answer([], in_own_memory(self.layout, schedule, first, count, self.model.device))
            chain.extend(answer)

    def _publish(self, chain: Chain) -> None:
        pages = [] if self._own_memory else chain.unpublished()
        if not pages:
            return
        answer = self._ask(
            errands.publish, self.space, chain.tokens[: chain.computed], pages, self._terms, self._event()
        )
        if answer is not None:
            leftovers = Leftovers()
            chain.settle(pages, answer, leftovers)
            leftovers.give_back(self._event())

    def _ask(self, errand: Any, *arguments: Any) -> Answer | None:
        """None if kvtierd is lost, now or before."""
        if self._own_memory:
            return None
        try:
            answer: Answer = errand(*arguments)
        except (DaemonLost, Draining) as error:
            self._manage_without(error)
            return None
        return answer

    def _manage_without(self, error: KvtierError | None) -> None:
        _LOG.warning("no pages from kvtierd (%s): this generation goes on in memory of its own", error)
        self._own_memory = True

    def _select(self, rows: Sequence[int]) -> None:
        """Row i goes on from what is row `rows[i]` now."""
        leftovers = Leftovers()
        old, taken = self._chains, set[int]()
        chosen = []
        for row in rows:
            if row not in taken:
                taken.add(row)
                chosen.append(old[row])
                continue
            chain = Chain(self.space, list(old[row].tokens))
            chain.share(old[row])
            if chain.source is not None:
                self._frames(chain, chain.computed + chain.source.tokens)
                chain.adopt(leftovers)
            chosen.append(chain)
        for row in set(range(len(old))) - taken:
            old[row].clear(leftovers)
        self._chains = chosen
        self._pads = [self._pads[row] for row in rows]
        with contextlib.suppress(KvtierError):
            leftovers.give_back(self._event())

    def _event(self) -> Any:
        device = self.model.device
        return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _padding(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[int]:
    """Of each row, how many tokens on the left are none."""
    if mask is None:
        return [0] * input_ids.shape[0]
    if mask.shape != input_ids.shape:
        raise InvalidRequest(f"attention_mask is {tuple(mask.shape)}, input_ids are {tuple(input_ids.shape)}")
    seen = mask.bool()
    pads = [int(pad) for pad in (~seen).sum(1)]
    if any(not row[pad:].all() for row, pad in zip(seen, pads, strict=True)):
        raise InvalidRequest(
            "attention_mask hides tokens that are not padding on the left: pad with padding_side='left'"
        )
    if max(pads, default=0) >= input_ids.shape[1]:
        raise InvalidRequest("a row is nothing but padding")
    return pads


def _follow(chain: Chain, start: int, new: list[int]) -> None:
    """The model is given `new` as tokens `start` and on of the chain: those that it has, or that come next."""
    known = chain.tokens[start : start + len(new)]
    if start > len(chain.tokens) or known != new[: len(known)]:
        raise InvalidRequest("the model is given other tokens than this cache was made for: make one for each prompt")
    chain.tokens += new[len(known) :]
