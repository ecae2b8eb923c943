"""Device code that turns a tile of a unit into float32 and back, in any stored precision.

A tile is all tokens of one (layer, K or V, kv head) of a unit, held as two halves of the head dim, since int4 packs dim
i with dim i + head_dim / 2. Encoding follows `reference.quantise_rows`: scales from the largest magnitude, codes
rounded to nearest even. What is rounded here is rounded once a page, so it is done in plain arithmetic that every
architecture has.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtier_kernels.tiles import ADDRESS_BITS
from kvtier_kernels.widening import FLOAT, FLOAT8, INT4, INT8, widen

ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it leaves float32 no bits below the units


@triton.jit
def round_even(x):
    return (x + ROUNDER) - ROUNDER


@triton.jit
def float8_bits(y):
    """The e4m3 code of |y| <= 448, as uint8."""
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    small = round_even(tl.abs(y) * 512.0).to(tl.int32)
    code = tl.where(size >= 0x3C800000, normal, small)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def ratio(x, scale):
    """x / scale, 0 where the scale is: the group is all zeros."""
    return tl.where(scale > 0, tl.div_rn(x, tl.where(scale > 0, scale, 1.0)), 0.0)


@triton.jit
def largest(KIND: tl.constexpr):
    if KIND == FLOAT8:
        return 448.0
    elif KIND == INT8:
        return 127.0
    else:
        return 7.0


@triton.jit
def place(
    entry,
    layer,
    layers,
    kv,
    head,
    HK: tl.constexpr,
    D: tl.constexpr,
    U: tl.constexpr,
    KIND: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Addresses of a tile's first row and of its scales."""
    ROW: tl.constexpr = D // 2 if KIND == INT4 else D * BYTES
    base = entry & ADDRESS_BITS
    cell = (layer.to(tl.int64) * 2 + kv) * HK + head
    payload = layers.to(tl.int64) * (2 * HK * U * ROW)
    if KIND == INT4:
        scales = payload + ((layer.to(tl.int64) * HK + head) * (D + U) + kv * D) * 2
    else:
        scales = payload + cell * 4
    return base + cell * (U * ROW), base + scales


@triton.jit
def read_scales(at, KV: tl.constexpr, token, live, D: tl.constexpr, H: tl.constexpr, KIND: tl.constexpr):
    """Scales of the halves of a tile, each broadcastable to it: one, or for int4 one a channel (K) or a token (V)."""
    i = tl.arange(0, H)
    if KIND == FLOAT:
        one = tl.full([1, 1], 1.0, tl.float32)
        return one, one
    elif KIND == INT4:
        table = at.to(tl.pointer_type(tl.bfloat16))
        if KV == 0:
            channels = (i < D // 2) & (tl.max(live.to(tl.int32), 0) > 0)
            low = tl.load(table + i, mask=channels, other=0.0).to(tl.float32)
            high = tl.load(table + i + D // 2, mask=channels, other=0.0).to(tl.float32)
            rows = tl.zeros_like(token).to(tl.float32)[:, None]
            return low[None, :] + rows, high[None, :] + rows
        else:
            rows = tl.load(table + token, mask=live, other=0.0).to(tl.float32)[:, None]
            columns = tl.zeros_like(i).to(tl.float32)[None, :]
            return rows + columns, rows + columns
    else:
        one = tl.load(at.to(tl.pointer_type(tl.float32)), mask=tl.max(live.to(tl.int32), 0) > 0, other=0.0)
        full = tl.zeros([1, 1], tl.float32) + one
        return full, full


@triton.jit
def read_codes(at, token, live, D: tl.constexpr, H: tl.constexpr, KIND: tl.constexpr, STORED: tl.constexpr):
    """Codes of a tile as float32 halves, 0 for tokens that are not `live`."""
    i = tl.arange(0, H)
    mask = live[:, None] & (i < D // 2)[None, :]
    table = tl.multiple_of(at.to(tl.pointer_type(STORED)), 16)
    if KIND == INT4:
        x = tl.load(table + token[:, None] * (D // 2) + i[None, :], mask=mask, other=0x88)
        return (x & 15).to(tl.float32) - 8.0, (x >> 4).to(tl.float32) - 8.0
    else:
        rows = table + token[:, None] * D + i[None, :]
        low = tl.load(rows, mask=mask, other=0)
        high = tl.load(rows + D // 2, mask=mask, other=0)
        return widen(low, KIND, tl.float32, False), widen(high, KIND, tl.float32, False)


@triton.jit
def fit_scales(low, high, KV: tl.constexpr, KIND: tl.constexpr):
    """Scales that codes of this tile need, shaped as `read_scales` shapes them (float8, int8) or as the tile (int4)."""
    if KIND == FLOAT:
        one = tl.full([1, 1], 1.0, tl.float32)
        return one, one
    elif KIND == INT4:
        if KV == 0:
            a = tl.max(tl.abs(low), 0)[None, :] + tl.zeros_like(low)
            b = tl.max(tl.abs(high), 0)[None, :] + tl.zeros_like(high)
        else:
            a = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))[:, None] + tl.zeros_like(low)
            b = a
        a = tl.div_rn(a, tl.full(a.shape, 7.0, tl.float32)).to(tl.bfloat16).to(tl.float32)
        b = tl.div_rn(b, tl.full(b.shape, 7.0, tl.float32)).to(tl.bfloat16).to(tl.float32)
        return a, b
    else:
        top = tl.maximum(tl.max(tl.max(tl.abs(low), 1), 0), tl.max(tl.max(tl.abs(high), 1), 0))
        top = tl.zeros([1, 1], tl.float32) + top
        scale = tl.div_rn(top, tl.full([1, 1], largest(KIND), tl.float32))
        return scale, scale


@triton.jit
def write_codes(
    at, token, live, low, high, a, b, D: tl.constexpr, H: tl.constexpr, KIND: tl.constexpr, STORED: tl.constexpr
):
    """Encode float32 halves with scales a and b, to the tile's rows that are `live`."""
    i = tl.arange(0, H)
    mask = live[:, None] & (i < D // 2)[None, :]
    table = tl.multiple_of(at.to(tl.pointer_type(STORED)), 16)
    if KIND == FLOAT:
        rows = table + token[:, None] * D + i[None, :]
        tl.store(rows, low.to(STORED), mask=mask)
        tl.store(rows + D // 2, high.to(STORED), mask=mask)
    else:
        top = largest(KIND)
        x = tl.minimum(tl.maximum(ratio(low, a + tl.zeros_like(low)), -top), top)
        y = tl.minimum(tl.maximum(ratio(high, b + tl.zeros_like(high)), -top), top)
        if KIND == INT4:
            first = (round_even(x) + 8.0).to(tl.int32)
            second = (round_even(y) + 8.0).to(tl.int32)
            packed = (first | (second << 4)).to(tl.uint8)
            tl.store(table + token[:, None] * (D // 2) + i[None, :], packed, mask=mask)
        else:
            rows = table + token[:, None] * D + i[None, :]
            if KIND == INT8:
                tl.store(rows, round_even(x).to(tl.int8), mask=mask)
                tl.store(rows + D // 2, round_even(y).to(tl.int8), mask=mask)
            else:
                tl.store(rows, float8_bits(x), mask=mask)
                tl.store(rows + D // 2, float8_bits(y), mask=mask)


@triton.jit
def write_scales(at, KV: tl.constexpr, token, live, a, b, D: tl.constexpr, H: tl.constexpr, KIND: tl.constexpr):
    """Store scales as `fit_scales` shaped them; int4's per token only where `live`."""
    i = tl.arange(0, H)
    if KIND == INT4:
        table = at.to(tl.pointer_type(tl.bfloat16))
        if KV == 0:
            # Every row of the tile holds the same scale of a channel.
            tl.store(table + i, tl.max(a, 0).to(tl.bfloat16), mask=i < D // 2)
            tl.store(table + i + D // 2, tl.max(b, 0).to(tl.bfloat16), mask=i < D // 2)
        else:
            tl.store(table + token, tl.max(a, 1).to(tl.bfloat16), mask=live)
    elif KIND != FLOAT:
        tl.store(at.to(tl.pointer_type(tl.float32)), tl.max(tl.max(a, 1), 0))
