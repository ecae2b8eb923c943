"""A batch over pages with plain PyTorch: keys and values of a sequence are gathered, a layer at a time, and attended to.

What the CPU runs. It is one copy of a sequence's KV of one layer at a time, and no more is ever in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvtier.layout import AttentionLayout
from kvtier_client.transformers.attention import Options, Part
from kvtier_client.transformers.chain import Chain
from kvtier_client.transformers.errands import pages_for


class _Piece(NamedTuple):
    """Rows [first, stop) of the batch go to tokens [at, at + rows) of each unit in `units`."""

    units: torch.Tensor
    at: int
    first: int
    stop: int


class GatherBatch:
    """See `attention.Batch`."""

    def __init__(self, layout: AttentionLayout, parts: Sequence[Part]) -> None:
        self.layout = layout
        self._rows: list[tuple[int, int, int, list[torch.Tensor]]] = []
        self._pieces: list[_Piece] = []
        for part in parts:
            chain, end = part.chain, part.start + part.count
            used = chain.pages[: pages_for(chain.space.schedule, end)]
            self._rows.append((part.row, part.row + part.count, end, [page.units for page in used]))
            written = max(0, chain.computed - part.start)
            self._cut(chain, part.start + written, end, part.row + written)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        tokens = self.layout.unit_tokens
        for units, at, first, stop in self._pieces:
            for kv, rows in enumerate((k, v)):
                run = rows[first:stop].transpose(0, 1)  # [head, token, dim]
                if len(units) == 1:
                    units[0, layer, kv, :, at : at + stop - first] = run
                else:
                    units[:, layer, kv] = run.unflatten(1, (len(units), tokens)).transpose(0, 1)

    def attend(self, layer: int, q: torch.Tensor, options: Options) -> torch.Tensor:
        out = torch.zeros_like(q)
        for first, stop, length, pages in self._rows:
            k, v = (
                torch.cat([units[:, layer, kv].transpose(0, 1) for units in pages], 1).flatten(1, 2)[:, :length]
                for kv in (0, 1)
            )
            out[first:stop] = attend(q[first:stop].transpose(0, 1), k, v, options).transpose(0, 1)
        return out

    def _cut(self, chain: Chain, start: int, end: int, row: int) -> None:
        """Where tokens [start, end) go: parts of units one by one, whole units of a page together."""
        tokens = self.layout.unit_tokens
        schedule = chain.space.schedule
        while start < end:
            number = schedule.pages(start)
            page = schedule.span(number)
            units = chain.pages[number].units
            unit, at = divmod(start - page.start, tokens)
            whole = (min(end, page.stop) - start) // tokens if at == 0 else 0
            taken = whole * tokens if whole else min(tokens - at, end - start)
            self._pieces.append(_Piece(units[unit : unit + max(1, whole)], at, row, row + taken))
            start += taken
            row += taken


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> torch.Tensor:
    """Queries `[head, n, dim]`, the last n tokens of keys and values `[kv head, length, dim]`; causal."""
    n, length = q.shape[1], k.shape[1]
    if options.window is not None and length > options.window + n - 1:
        k, v = k[:, 1 - options.window - n :], v[:, 1 - options.window - n :]
        length = k.shape[1]
    mask = None
    causal = n == length and n > 1 and (options.window is None or options.window >= length)
    if n > 1 and not causal:
        behind = torch.arange(length - n, length, device=q.device)[:, None] - torch.arange(length, device=q.device)
        mask = behind >= 0
        if options.window is not None:
            mask &= behind < options.window
    if options.softcap is None and options.sinks is None:
        return scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, is_causal=causal, scale=options.scale, enable_gqa=True
        )[0]
    return _spelled_out(q, k, v, mask, causal, options)


def _spelled_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, options: Options
) -> torch.Tensor:
    """With what PyTorch's fused attention does not know: capped logits, and sinks."""
    group = q.shape[0] // k.shape[0]
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    logits = (q @ k.repeat_interleave(group, 0).transpose(1, 2)) * scale
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    if causal:
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.to(logits.dtype)[:, None, None].expand(-1, q.shape[1], 1)
        logits = torch.cat((logits, sinks), -1)
    weights = logits.softmax(-1, dtype=torch.float32).to(q.dtype)[..., : k.shape[1]]
    return weights @ v.repeat_interleave(group, 0)
