"""Append: write the K and V of new tokens into their sequences' units, in whatever precision those are stored.

Runs after the projections and before attention: lengths already count the new tokens, which are the last of each
sequence. Rotary embedding of K can be fused. In float units a token's row is written and nothing else is touched. A
quantised unit is rewritten by one program per head: its scale grows where the new tokens need it to (never shrinks
while the unit fills), and tokens that are there already are re-coded only then. A unit's first token starts it afresh.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvtier.errors import InvalidRequest, LayoutError
from kvtier.layout import AttentionLayout, LatentLayout
from kvtier_kernels import checks, codec, tuning
from kvtier_kernels.addressing import TORCH_DTYPES
from kvtier_kernels.quantise import codec_of, element_bytes
from kvtier_kernels.widening import FLOAT


@triton.jit
def turn(x, rows, live, position, dim, COS, SIN, R: tl.constexpr, INTERLEAVED: tl.constexpr, lanes):
    """Rotary embedding of x, whose dims are `dim` of the rows at pointers `rows`; dims from R on stay."""
    if INTERLEAVED:
        partner = dim ^ 1
        angle = dim // 2
        sign = tl.where(dim % 2 == 0, -1.0, 1.0)
    else:
        partner = tl.where(dim < R // 2, dim + R // 2, dim - R // 2)
        angle = dim % (R // 2)
        sign = tl.where(dim < R // 2, -1.0, 1.0)
    turned = live[:, None] & lanes[None, :] & (dim < R)[None, :]
    other = tl.load(rows[:, None] + partner[None, :], mask=turned, other=0.0).to(tl.float32)
    at = position.to(tl.int64)[:, None] * (R // 2) + angle[None, :]
    cos = tl.load(COS + at, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(SIN + at, mask=turned, other=0.0).to(tl.float32)
    return x * cos + sign[None, :] * other * sin


@triton.jit(
    do_not_specialize=["layer", "layers", "width", "most_units", "s_table"],
    do_not_specialize_on_alignment=["CU", "TABLE", "LENGTHS"],
)
def append_kernel(
    K, V, CU, TABLE, LENGTHS, COS, SIN, layer, layers, width, most_units, s_kt, s_kh, s_vt, s_vh, s_table,
    HK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, U: tl.constexpr, KIND: tl.constexpr, STORED: tl.constexpr,
    BYTES: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    sequence = (tl.program_id(0) // most_units).to(tl.int64)
    head = tl.program_id(1)
    begin = tl.load(CU + sequence)
    count = tl.load(CU + sequence + 1) - begin
    length = tl.load(LENGTHS + sequence)
    start = length - count
    column = start // U + tl.program_id(0) % most_units
    if (count <= 0) | (start < 0) | (column * U >= length) | (column >= width):
        return
    entry = tl.load(TABLE + sequence * s_table + column)
    token = tl.arange(0, U)
    position = column * U + token
    new = (position >= start) & (position < length)
    kept = position < start
    row = (begin + position - start).to(tl.int64)
    if tl.program_id(2) == 0:
        append_tile(
            K + row * s_kt + head * s_kh, entry, new, kept, position, layer, layers, 0, head, COS, SIN,
            HK, D, H, U, KIND, STORED, BYTES, R, INTERLEAVED,
        )  # fmt: skip
    else:
        append_tile(
            V + row * s_vt + head * s_vh, entry, new, kept, position, layer, layers, 1, head, COS, SIN,
            HK, D, H, U, KIND, STORED, BYTES, 0, INTERLEAVED,
        )  # fmt: skip


@triton.jit
def append_tile(
    rows, entry, new, kept, position, layer, layers, KV: tl.constexpr, head, COS, SIN,
    HK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, U: tl.constexpr, KIND: tl.constexpr, STORED: tl.constexpr,
    BYTES: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token = tl.arange(0, U)
    i = tl.arange(0, H)
    lanes = i < D // 2
    mask = new[:, None] & lanes[None, :]
    low = tl.load(rows[:, None] + i[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(rows[:, None] + (i + D // 2)[None, :], mask=mask, other=0.0).to(tl.float32)
    if R > 0:
        low = turn(low, rows, new, position, i, COS, SIN, R, INTERLEAVED, lanes)
        high = turn(high, rows, new, position, i + D // 2, COS, SIN, R, INTERLEAVED, lanes)
    at, scales = codec.place(entry, layer, layers, KV, head, HK, D, U, KIND, BYTES)
    if KIND == FLOAT:
        one = tl.full([1, 1], 1.0, tl.float32)
        codec.write_codes(at, token, new, low, high, one, one, D, H, KIND, STORED)
    else:
        old_low, old_high = codec.read_codes(at, token, kept, D, H, KIND, STORED)
        old_a, old_b = codec.read_scales(scales, KV, token, kept, D, H, KIND)
        a, b = codec.fit_scales(low, high, KV, KIND)
        a = tl.maximum(a, old_a)
        b = tl.maximum(b, old_b)
        low = tl.where(new[:, None], low, old_low * old_a)
        high = tl.where(new[:, None], high, old_high * old_b)
        written = new | kept
        codec.write_codes(at, token, written, low, high, a, b, D, H, KIND, STORED)
        codec.write_scales(scales, KV, token, written, a, b, D, H, KIND)


@triton.jit(
    do_not_specialize=["layer", "width", "most_new", "s_table"],
    do_not_specialize_on_alignment=["CU", "TABLE", "LENGTHS"],
)
def append_latent_kernel(
    LATENT, ROPE, CU, TABLE, LENGTHS, layer, width, most_new, s_lt, s_rt, s_table,
    L: tl.constexpr, LP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, U: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    sequence = (tl.program_id(0) // most_new).to(tl.int64)
    begin = tl.load(CU + sequence)
    count = tl.load(CU + sequence + 1) - begin
    length = tl.load(LENGTHS + sequence)
    index = tl.program_id(0) % most_new
    position = length - count + index
    if (index >= count) | (position < 0) | (position // U >= width):
        return
    entry = tl.load(TABLE + sequence * s_table + position // U)
    base = tl.multiple_of((entry & -8).to(tl.pointer_type(STORED)), 16)
    row = base + (layer.to(tl.int64) * U + position % U) * (L + R)
    source = (begin + index).to(tl.int64)
    i = tl.arange(0, LP)
    j = tl.arange(0, RP)
    tl.store(row + i, tl.load(LATENT + source * s_lt + i, mask=i < L).to(STORED), mask=i < L)
    tl.store(row + L + j, tl.load(ROPE + source * s_rt + j, mask=j < R).to(STORED), mask=j < R)


def append(
    k: torch.Tensor,
    v: torch.Tensor,
    cu_new: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    layout: AttentionLayout,
    layer: int,
    *,
    most_new: int,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
    check: bool | None = None,
) -> None:
    """Write K and V of each sequence's new tokens at the end of its units.

    k, v: `[new, kv_heads, head_dim]`, floats, any strides but contiguous rows. cu_new: int32 `[batch + 1]`, where each
    sequence's rows start. lengths: int32 `[batch]`, the new tokens included, so row i of a sequence goes to position
    length - count + i. All units touched are stored as `layout.dtype`; nobody else may be writing or reading them.
    most_new: at least the largest count. cos, sin: float32 `[positions, rotary / 2]`, to turn K by first, in halves
    (GPT-NeoX) or interleaved pairs (GPT-J); dims from `rotary` on are not turned.

    Float values are rounded to the dtype; quantised units as the module says. A token whose position is past the
    table's width is dropped when unchecked; see `decode` for `check` and for what is raised.
    """
    _ragged_rows(k, cu_new, table, lengths, layout, layer, most_new, check)
    want = (k.shape[0], layout.kv_heads, layout.head_dim)
    for name, x in (("k", k), ("v", v)):
        if x.shape != want:
            raise InvalidRequest(f"{name} has shape {tuple(x.shape)}: want {want}")
        checks.rows(x, name)
    checks.layouts((layout,), layer)
    rotary = 0
    if (cos is None) != (sin is None):
        raise InvalidRequest("cos and sin come together")
    if cos is not None and sin is not None:
        rotary = cos.shape[1] * 2 if cos.dim() == 2 else -1
        if sin.shape != cos.shape or not 0 < rotary <= layout.head_dim or cos.dtype != torch.float32 != sin.dtype:
            raise InvalidRequest(
                f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)}: want float32 [positions, rotary / 2]"
            )
        if not (cos.is_contiguous() and sin.is_contiguous()):
            raise InvalidRequest("cos and sin must be contiguous")
    checks.same_device(k, v=v, cu_new=cu_new, table=table, lengths=lengths, cos=cos, sin=sin)
    if not len(k) or not most_new:
        return
    units = (most_new + layout.unit_tokens - 2) // layout.unit_tokens + 1
    append_kernel[(len(lengths) * units, layout.kv_heads, 2)](
        k, v, cu_new, table, lengths, cos, sin, layer, layout.layers, table.shape[1], units, *k.stride()[:2],
        *v.stride()[:2], table.stride(0), **shape(layout), R=rotary, INTERLEAVED=interleaved,
        num_warps=4 if layout.unit_tokens * layout.head_dim <= 8192 else 8,
    )  # fmt: skip


def append_latent(
    latent: torch.Tensor,
    rope: torch.Tensor,
    cu_new: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    layout: LatentLayout,
    layer: int,
    *,
    most_new: int,
    check: bool | None = None,
) -> None:
    """`append` for latent units: latent `[new, latent]` and rope `[new, rope]`, rope already turned."""
    _ragged_rows(latent, cu_new, table, lengths, layout, layer, most_new, check)
    for name, x, dim in (("latent", latent, layout.latent), ("rope", rope, layout.rope)):
        if x.shape != (len(latent), dim):
            raise InvalidRequest(f"{name} has shape {tuple(x.shape)}: want {(len(latent), dim)}")
        checks.rows(x, name)
    checks.same_device(latent, rope=rope, cu_new=cu_new, table=table, lengths=lengths)
    if len(latent) and most_new:
        append_latent_kernel[(len(lengths) * most_new,)](
            latent, rope, cu_new, table, lengths, layer, table.shape[1], most_new, latent.stride(0), rope.stride(0),
            table.stride(0), **latent_shape(layout), num_warps=2,
        )  # fmt: skip


def shape(layout: AttentionLayout) -> dict[str, Any]:
    """The constants that a variant of `append_kernel` is compiled for, rotary embedding aside."""
    stored = codec_of(layout)
    return {
        "HK": layout.kv_heads,
        "D": layout.head_dim,
        "H": triton.next_power_of_2(layout.head_dim // 2),
        "U": layout.unit_tokens,
        "KIND": stored.kind,
        "STORED": stored.element,
        "BYTES": element_bytes(layout),
    }


def latent_shape(layout: LatentLayout) -> dict[str, Any]:
    """The constants that a variant of `append_latent_kernel` is compiled for."""
    return {
        "L": layout.latent,
        "LP": triton.next_power_of_2(layout.latent),
        "R": layout.rope,
        "RP": triton.next_power_of_2(layout.rope),
        "U": layout.unit_tokens,
        "STORED": tuning.FLOATS[layout.dtype],
    }


def _ragged_rows(
    rows: torch.Tensor,
    cu: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    layout: AttentionLayout | LatentLayout,
    layer: int,
    most: int,
    check: bool | None,
) -> None:
    checks.within(layer, layout)
    checks.table(table, lengths, len(table), layout.unit_tokens)
    checks.ragged(cu, len(lengths), len(rows), most, lengths, checks.bounds(table, lengths, (layout,), check))
    if TORCH_DTYPES.get(layout.dtype) is None:
        raise LayoutError(f"dtype {layout.dtype} is none that kernels write")
