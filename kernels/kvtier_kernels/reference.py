"""What the kernels compute, in plain PyTorch and float64, slowly: the definition that tests hold them to.

Reads the same tables of addresses as the kernels do, one unit at a time, and dequantises before it computes, so a
kernel that reads quantised units differs from it by rounding alone. Nothing here is meant to be fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvtier.layout import AttentionLayout, LatentLayout, Layout
from kvtier_kernels.addressing import TAG_BITS, TORCH_DTYPES, read_bytes, tag_of

Pair = tuple[torch.Tensor, torch.Tensor]


def quantise_rows(x: torch.Tensor, dtype: str, over: tuple[int, ...]) -> Pair:
    """Codes and scales of `x` (float32) with one scale for all of the dims `over`, which stay with size 1.

    A group of zeros has scale 0. int4 codes are 1 to 15, zero at 8, and their scales are rounded to bfloat16 first.
    """
    top = {"float8_e4m3fn": 448.0, "int8": 127.0, "int4": 7.0}[dtype]
    scale = x.abs().amax(over, keepdim=True) / top
    if dtype == "int4":
        scale = scale.bfloat16().float()
    y = torch.where(scale > 0, x / scale, torch.zeros_like(x)).clamp(-top, top)
    if dtype == "float8_e4m3fn":
        return y.to(torch.float8_e4m3fn), scale
    codes = y.round()
    return (codes.to(torch.int8), scale) if dtype == "int8" else ((codes + 8).to(torch.uint8), scale)


def pack(k: torch.Tensor, v: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
    """The `unit_stride` bytes of a unit that holds K and V, each `[layers, kv_heads, unit_tokens, head_dim]`."""
    kv = torch.stack((k, v), 1).float()
    if not layout.scales_bytes:
        return _padded([kv.to(TORCH_DTYPES[layout.dtype])], layout)
    if layout.dtype != "int4":
        codes, scale = quantise_rows(kv, layout.dtype, (-2, -1))
        return _padded([codes, scale], layout)
    k_codes, k_scale = quantise_rows(kv[:, 0], "int4", (-2,))
    v_codes, v_scale = quantise_rows(kv[:, 1], "int4", (-1,))
    codes = torch.stack((k_codes, v_codes), 1)
    half = layout.head_dim // 2
    nibbles = codes[..., :half] | (codes[..., half:] << 4)
    scales = torch.cat((k_scale.squeeze(-2), v_scale.squeeze(-1)), -1).bfloat16()
    return _padded([nibbles, scales], layout)


def unpack(raw: torch.Tensor, layout: AttentionLayout, layer: int) -> Pair:
    """K and V of one layer of a unit, float64 `[kv_heads, unit_tokens, head_dim]`; `raw` is its bytes."""
    heads, tokens, dim = layout.kv_heads, layout.unit_tokens, layout.head_dim
    first, last = layout.offset(layer, 0, 0, 0), layout.offset(layer, 1, 0, 0) * 2 - layout.offset(layer, 0, 0, 0)
    codes = raw[first:last]
    if layout.dtype == "int4":
        nibbles = codes.view(2, heads, tokens, dim // 2).to(torch.int16)
        kv = (torch.cat((nibbles & 15, nibbles >> 4), -1) - 8).double()
        at = layout.scale_offset(layer, 0, 0)
        groups = raw[at : at + heads * (dim + tokens) * 2].view(torch.bfloat16).view(heads, dim + tokens).double()
        return kv[0] * groups[:, None, :dim], kv[1] * groups[:, dim:, None]
    kv = codes.view(TORCH_DTYPES[layout.dtype]).view(2, heads, tokens, dim).to(torch.float32).double()
    if layout.scales_bytes:
        at = layout.scale_offset(layer, 0, 0)
        kv = kv * raw[at : at + 2 * heads * 4].view(torch.float32).view(2, heads, 1, 1).double()
    return kv[0], kv[1]


def gather(row: torch.Tensor, length: int, layouts: Sequence[AttentionLayout], layer: int) -> Pair:
    """K and V of the first `length` tokens of a sequence, float64 `[length, kv_heads, head_dim]`."""
    by_tag = {tag_of(layout.dtype): layout for layout in layouts}
    keys, values = [], []
    for entry in row.tolist()[: -(-length // layouts[0].unit_tokens)]:
        layout = by_tag[entry & TAG_BITS] if len(layouts) > 1 else layouts[0]
        k, v = unpack(read_bytes(entry & ~TAG_BITS, layout.unit_bytes, row.device), layout, layer)
        keys.append(k.transpose(0, 1))
        values.append(v.transpose(0, 1))
    if not keys:
        empty = torch.zeros(0, layouts[0].kv_heads, layouts[0].head_dim, dtype=torch.float64, device=row.device)
        return empty, empty
    return torch.cat(keys)[:length], torch.cat(values)[:length]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> Pair:
    """Attention of queries `[n, heads, dim]` at `positions` `[n]` over K and V `[length, kv_heads, dim]`.

    A query sees the keys at its own position and before, of these the last `window`. Logits are `scale * q.k`, capped
    to `softcap * tanh(logit / softcap)`, plus `slope * (key position - query position)`. A sink is one more logit of
    its head, with no value. Returns the output `[n, heads, dim]` and the natural log-sum-exp of the logits, sink
    included, `[n, heads]`; a query that sees nothing gets 0 and -inf.
    """
    q, group = q.double(), q.shape[1] // k.shape[1]
    logits = torch.einsum("nhd,lhd->nhl", q, k.repeat_interleave(group, 1)) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    distance = torch.arange(k.shape[0], device=q.device)[None, :] - positions[:, None]
    if slopes is not None:
        logits = logits + slopes.double()[None, :, None] * distance[:, None, :]
    seen = distance <= 0
    if window:
        seen &= distance > -window
    logits = logits.masked_fill(~seen[:, None, :], -math.inf)
    if sinks is not None:
        logits = torch.cat((logits, sinks.double()[None, :, None].expand(len(q), -1, 1)), -1)
    lse = (
        torch.logsumexp(logits, -1)
        if logits.shape[-1]
        else torch.full(q.shape[:2], -math.inf, device=q.device).double()
    )
    weights = torch.exp(logits - torch.where(lse.isinf(), 0.0, lse)[..., None])[..., : k.shape[0]]
    return torch.einsum("nhl,lhd->nhd", weights, v.repeat_interleave(group, 1)), lse


def decode(
    q: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    layouts: Sequence[AttentionLayout],
    layer: int,
    **options: object,
) -> Pair:
    """Of q `[batch, tokens, heads, dim]`, the last `tokens` of each sequence; output likewise, LSE without dim."""
    out, lse = [], []
    for b, length in enumerate(lengths.tolist()):
        k, v = gather(table[b], length, layouts, layer)
        positions = torch.arange(length - q.shape[1], length, device=q.device)
        o, s = attend(q[b], k, v, positions, **options)  # type: ignore[arg-type]
        out.append(o)
        lse.append(s)
    return torch.stack(out), torch.stack(lse)


def prefill(
    q: torch.Tensor,
    cu_q: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    layouts: Sequence[AttentionLayout],
    layer: int,
    **options: object,
) -> Pair:
    """Of q `[queries, heads, dim]`; sequence b owns rows cu_q[b] to cu_q[b + 1], the last of its context."""
    out, lse = [q.new_zeros(0, *q.shape[1:]).double()], [q.new_zeros(0, q.shape[1]).double()]
    for b, length in enumerate(lengths.tolist()):
        rows = q[int(cu_q[b]) : int(cu_q[b + 1])]
        k, v = gather(table[b], length, layouts, layer)
        o, s = attend(rows, k, v, torch.arange(length - len(rows), length, device=q.device), **options)  # type: ignore[arg-type]
        out.append(o)
        lse.append(s)
    return torch.cat(out), torch.cat(lse)


def latents(row: torch.Tensor, length: int, layout: LatentLayout, layer: int) -> torch.Tensor:
    """Latent and rope of the first `length` tokens of a sequence, float64 `[length, latent + rope]`."""
    first, size = layout.offset(layer, 0), layout.unit_tokens * layout.row_bytes
    units = [
        read_bytes((entry & ~TAG_BITS) + first, size, row.device).view(TORCH_DTYPES[layout.dtype]).double()
        for entry in row.tolist()[: -(-length // layout.unit_tokens)]
    ]
    width = layout.latent + layout.rope
    if not units:
        return torch.zeros(0, width, dtype=torch.float64, device=row.device)
    return torch.cat([unit.view(-1, width) for unit in units])[:length]


def mla(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    layout: LatentLayout,
    layer: int,
    *,
    scale: float,
) -> Pair:
    """Absorbed multi-head latent attention: keys are latent and rope together, values the latent alone.

    Of q_latent `[batch, tokens, heads, latent]` and q_rope `[..., rope]`; output like q_latent.
    """
    out, lse = [], []
    q = torch.cat((q_latent, q_rope), -1)
    for b, length in enumerate(lengths.tolist()):
        rows = latents(table[b], length, layout, layer)[:, None]
        positions = torch.arange(length - q.shape[1], length, device=q.device)
        o, s = attend(q[b], rows, rows, positions, scale=scale)
        out.append(o[..., : layout.latent])
        lse.append(s)
    return torch.stack(out), torch.stack(lse)


def merge_states(outs: torch.Tensor, lses: torch.Tensor, sinks: torch.Tensor | None = None) -> Pair:
    """One attention state of several over disjoint keys: outs `[parts, rows, heads, dim]`, natural lses without dim."""
    lses = lses.double()
    if sinks is not None:
        lses = torch.cat((lses, sinks.double().expand(1, *lses.shape[1:])))
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - torch.where(lse.isinf(), 0.0, lse))[: len(outs), ..., None]
    return (torch.where(weights > 0, outs.double(), 0.0) * weights).sum(0), lse


def rope(
    k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Rotary embedding of k `[tokens, heads, dim]`; cos and sin `[positions, rotary / 2]`, dims past `rotary` kept."""
    half = cos.shape[1]
    c, s = cos[positions][:, None].double(), sin[positions][:, None].double()
    turned = k.double().clone()
    a, b = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    x, y = k[..., a].double(), k[..., b].double()
    turned[..., a], turned[..., b] = x * c - y * s, y * c + x * s
    return turned


def _padded(parts: list[torch.Tensor], layout: Layout) -> torch.Tensor:
    raw = torch.cat([part.contiguous().view(torch.uint8).reshape(-1) for part in parts])
    assert raw.numel() == layout.unit_bytes
    return torch.cat((raw, raw.new_zeros(layout.unit_stride - raw.numel())))
