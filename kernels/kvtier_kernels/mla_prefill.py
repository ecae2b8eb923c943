"""Prefill over latent units, the ordinary way: gather the latents, expand K and V of each head, and attend.

Absorbed, a prefill row costs 3.4 times the arithmetic of expanded attention, which is what bounds it; so the page-table
work is one gather, and the rest is dense products, which libraries do best. `gather_latents` is that gather, for an
engine that has its own dense attention; `mla_prefill` goes on with PyTorch's.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl

from kvtier.errors import InvalidRequest
from kvtier.layout import LatentLayout
from kvtier_kernels import checks, tuning
from kvtier_kernels.addressing import TORCH_DTYPES
from kvtier_kernels.tiles import ADDRESS_BITS


@triton.jit(
    do_not_specialize=["layer", "width", "most_units", "s_table"],
    do_not_specialize_on_alignment=["TABLE", "LENGTHS", "CU"],
)
def gather_latents_kernel(
    TABLE, LENGTHS, CU, OUT, layer, width, most_units, s_table,
    ROW: tl.constexpr, PADDED: tl.constexpr, U: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    sequence = (tl.program_id(0) // most_units).to(tl.int64)
    unit = tl.program_id(0) % most_units
    token = tl.program_id(1) * 16 + tl.arange(0, 16)
    begin = tl.load(CU + sequence)
    room = tl.load(CU + sequence + 1) - begin
    length = tl.minimum(tl.minimum(tl.load(LENGTHS + sequence), width * U), room)
    if unit * U >= length:
        return
    entry = tl.load(TABLE + sequence * s_table + unit) & ADDRESS_BITS
    i = tl.arange(0, PADDED)
    mask = (unit * U + token < length)[:, None] & (i < ROW)[None, :]
    rows = tl.multiple_of(entry.to(tl.pointer_type(STORED)), 16) + (layer.to(tl.int64) * U + token) * ROW
    out = OUT + (begin + unit * U + token).to(tl.int64) * ROW
    tl.store(out[:, None] + i[None, :], tl.load(rows[:, None] + i[None, :], mask=mask), mask=mask)


def gather_latents(
    table: torch.Tensor,
    lengths: torch.Tensor,
    cu_k: torch.Tensor,
    layout: LatentLayout,
    layer: int,
    *,
    tokens: int,
    check: bool | None = None,
) -> torch.Tensor:
    """The latent rows of all sequences one after another, `[tokens, latent + rope]` in the layout's dtype.

    cu_k: int32 `[batch + 1]`, where each sequence's rows start; it ends at `tokens`. lengths and the table as in
    `decode`. Rows of a sequence past its length stay 0. Raises InvalidRequest before the launch.
    """
    checks.within(layer, layout)
    checks.table(table, lengths, len(table), layout.unit_tokens)
    checks.bounds(table, lengths, (layout,), check)
    if cu_k.dtype != torch.int32 or cu_k.shape != (len(lengths) + 1,):
        raise InvalidRequest(f"cu_k is {cu_k.dtype} {tuple(cu_k.shape)}: want int32 [{len(lengths) + 1}]")
    checks.same_device(table, lengths=lengths, cu_k=cu_k)
    row = layout.latent + layout.rope
    out = torch.zeros(tokens, row, dtype=TORCH_DTYPES[layout.dtype], device=table.device)
    if tokens and table.numel():
        gather_latents_kernel[(table.numel(), layout.unit_tokens // 16)](
            table, lengths, cu_k, out, layer, table.shape[1], table.shape[1], table.stride(0), ROW=row,
            PADDED=triton.next_power_of_2(row), U=layout.unit_tokens, STORED=tuning.FLOATS[layout.dtype], num_warps=4,
        )  # fmt: skip
    return out


def mla_prefill(
    q: torch.Tensor,
    counts: list[int],
    table: torch.Tensor,
    lengths: list[int],
    layout: LatentLayout,
    layer: int,
    *,
    up_k: torch.Tensor,
    up_v: torch.Tensor,
    scale: float,
    check: bool | None = None,
) -> torch.Tensor:
    """Causal attention of ragged query chunks over latent units, K and V expanded.

    q: `[queries, heads, nope + rope]`, not absorbed; counts: rows of each sequence, the last of its context. lengths:
    of each context; both are on the host, since shapes depend on them. up_k: `[heads, nope, latent]`, up_v: `[heads,
    value, latent]`, the model's up-projections. Returns `[queries, heads, value]`. Not for CUDA graphs. Raises
    InvalidRequest for counts past a context or shapes that do not match.
    """
    heads, nope = up_k.shape[:2]
    if q.dim() != 3 or q.shape != (sum(counts), heads, nope + layout.rope) or len(counts) != len(lengths):
        raise InvalidRequest(f"q has shape {tuple(q.shape)}: want {(sum(counts), heads, nope + layout.rope)}")
    if up_k.shape[2] != layout.latent or up_v.shape[::2] != (heads, layout.latent):
        raise InvalidRequest(f"up_k {tuple(up_k.shape)}, up_v {tuple(up_v.shape)}: want {layout.latent} latent columns")
    if any(count > length for count, length in zip(counts, lengths, strict=True)):
        raise InvalidRequest(f"counts {counts} pass the contexts' lengths {lengths}")
    starts = [0, *itertools.accumulate(lengths)]
    host = torch.tensor(lengths, dtype=torch.int32, device=table.device)
    cu_k = torch.tensor(starts, dtype=torch.int32, device=table.device)
    rows = gather_latents(table, host, cu_k, layout, layer, tokens=starts[-1], check=check).to(q.dtype)
    parts = [q.new_empty(0, heads, up_v.shape[1])]
    for b, chunk in enumerate(q.split(counts)):
        latent, rope = rows[starts[b] : starts[b + 1]].split([layout.latent, layout.rope], -1)
        k = torch.cat((torch.einsum("lc,hdc->hld", latent, up_k), rope.expand(heads, -1, -1)), -1)
        v = torch.einsum("lc,hdc->hld", latent, up_v)
        seen = torch.ones(len(chunk), len(latent), dtype=torch.bool, device=q.device).tril(len(latent) - len(chunk))
        attended = torch.nn.functional.scaled_dot_product_attention(
            chunk.transpose(0, 1)[None], k[None], v[None], attn_mask=seen, scale=scale
        )
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)
