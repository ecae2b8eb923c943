"""Device code that decode and prefill share: tiles of K and V read by address, widened, and folded into a softmax.

A tile is BLOCK tokens of one kv head. Where a unit holds whole tiles the tile's rows are contiguous; where tiles span
units (`unit_tokens` 16) each row has an address of its own. Quantised units are widened in registers (`widening`).
Scales never touch K or V where they need not:

- float8, int8: K's scale multiplies the scores; V's is kept out of the accumulator, which is held in units of the
  current tile's scale and re-based by the same multiplication that re-bases the softmax.
- int4: K's channel scales multiply the queries (decode) or the keys (prefill, and tiles of several units); V's token
  scales multiply the probabilities.

Scores are in powers of two. A masked score is finite, so that no row ever computes inf - inf; a row that saw no key
keeps that finite maximum and is recognised by it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtier_kernels.widening import FLOAT, INT4, widen, widen_nibbles

MASKED = tl.constexpr(-1.0e30)
NOTHING = tl.constexpr(-1.0e29)  # a maximum below this never saw an unmasked score
ADDRESS_BITS = tl.constexpr(-8)  # clears the tag of a table entry


@triton.jit
def load_queries(rows, seen, stride_d, D: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr):
    """Query rows at pointers `rows`, as one or (int4) two halves in the type scores are computed in, and their factor.

    float16 cannot hold every bfloat16, so rows headed for it are divided by a power of two first.
    """
    d = tl.arange(0, W)
    if KIND == INT4:
        half = D // 2
        lanes = seen[:, None] & (d < half)[None, :]
        low = tl.load(rows[:, None] + d[None, :] * stride_d, mask=lanes, other=0.0)
        high = tl.load(rows[:, None] + (d + half)[None, :] * stride_d, mask=lanes, other=0.0)
        return low.to(tl.bfloat16), high.to(tl.bfloat16), 1.0
    else:
        q = tl.load(rows[:, None] + d[None, :] * stride_d, mask=seen[:, None] & (d < D)[None, :], other=0.0)
        if KIND == FLOAT:
            return q, q, 1.0
        else:
            wide = q.to(tl.float32)
            top = tl.max(tl.abs(wide), 1)
            power = tl.exp2(tl.ceil(tl.log2(tl.maximum(top, 1.0e-30))))
            q = (wide / power[:, None]).to(tl.float16)
            return q, q, power[:, None]


@triton.jit
def load_scales(
    entry,
    alive,
    some,
    inside,
    at_k,
    D: tl.constexpr,
    W: tl.constexpr,
    HK: tl.constexpr,
    KIND: tl.constexpr,
    SPAN: tl.constexpr,
):
    """K's scales (two halves for int4) and V's of the tile whose entry, or entries of its rows, are given.

    `at_k` is the offset of K's scales of this layer and head; `some`: the tile
    has a row to be read at all. V's are -1 (float8, int8) or 0 (int4) where not `alive`.
    """
    if KIND == FLOAT:
        return 1.0, 1.0, 1.0
    elif KIND == INT4:
        base = tl.multiple_of(((entry & ADDRESS_BITS) + at_k).to(tl.pointer_type(tl.bfloat16)), 16)
        d = tl.arange(0, W)
        lanes = d < D // 2
        v = tl.load(base + D + inside, mask=alive, other=0.0)
        if SPAN:
            low = tl.load(base[:, None] + d[None, :], mask=alive[:, None] & lanes[None, :], other=0.0)
            high = tl.load(base[:, None] + (d + D // 2)[None, :], mask=alive[:, None] & lanes[None, :], other=0.0)
        else:
            low = tl.load(base + d, mask=lanes & some, other=0.0)
            high = tl.load(base + d + D // 2, mask=lanes & some, other=0.0)
        return low, high, v
    else:
        base = ((entry & ADDRESS_BITS) + at_k).to(tl.pointer_type(tl.float32))
        if SPAN:
            k = tl.load(base, mask=alive, other=0.0)
            return k, k, tl.load(base + HK, mask=alive, other=-1.0)
        else:
            k = tl.load(base, mask=some, other=0.0)
            return k, k, tl.load(base + HK, mask=some, other=-1.0)


@triton.jit
def some_alive(tile, length, entry, BLOCK: tl.constexpr, SPAN: tl.constexpr, MIXED: tl.constexpr, TAG: tl.constexpr):
    """Whether a tile of one unit has a row to be read: said of its first, as a scalar, where a reduction would wait."""
    some = tile * BLOCK < length
    if MIXED and not SPAN:
        some = some & ((entry & 7) == TAG)
    return some


@triton.jit
def piece_dim(piece, column, D: tl.constexpr, KIND: tl.constexpr, PIECES: tl.constexpr):
    """The head dim that a column of an accumulator holds; `piece` says which of the accumulators."""
    if PIECES <= 2:
        return piece * (D // PIECES) + column
    elif KIND == INT4:
        return (piece // 2) * (D // 2) + 2 * column + piece % 2
    else:
        return 4 * column + piece


@triton.jit
def attend(
    q0, q1, factor, positions, slopes, m, l, acc0, acc1, unit,
    row, first, last, length, layer, layers, head, softcap, window,
    HK: tl.constexpr, D: tl.constexpr, W: tl.constexpr, C: tl.constexpr, U: tl.constexpr, BLOCK: tl.constexpr,
    PIECES: tl.constexpr, KIND: tl.constexpr, STORED: tl.constexpr, TAG: tl.constexpr, MIXED: tl.constexpr,
    EDGE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    FAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fold tiles `first` to `last` of a sequence into the state (m, l, acc0, acc1, unit) and return it.

    `row` points to the sequence's table row; the caller keeps `length` within it. `factor` takes a product of queries
    and codes to base-2 logits. `unit` is the V scale that the accumulators are counted in. Float units use acc0 alone.
    int4's high codes are in acc1. EDGE: tiles may pass the length, and are then masked before they are loaded: what lies
    in an unused slot may be NaN, and zero times NaN is NaN.
    """
    SPAN: tl.constexpr = U % BLOCK != 0
    GUARD: tl.constexpr = EDGE or MIXED
    WIDTH: tl.constexpr = D // 2 if KIND == INT4 else D  # stored elements of a row
    HEAD: tl.constexpr = U * WIDTH * (STORED.primitive_bitwidth // 8)
    CARRY: tl.constexpr = KIND != FLOAT and not (KIND == INT4 and SPAN)
    d = tl.arange(0, W)
    c = tl.arange(0, C)
    n0 = tl.arange(0, BLOCK)
    at = (layer.to(tl.int64) * (2 * HK) + head) * HEAD
    if KIND == INT4:
        at_scales = layers.to(tl.int64) * (2 * HK * HEAD) + (layer.to(tl.int64) * HK + head) * ((D + U) * 2)
    else:
        at_scales = layers.to(tl.int64) * (2 * HK * HEAD) + (layer.to(tl.int64) * (2 * HK) + head) * 4
    end = tl.maximum(length - 1, 0)
    # What a tile's addresses come from is loaded one tile ahead, and straight from the table: a value handed down
    # through two iterations keeps the compiler from overlapping loads of K and V with arithmetic at all.
    entry = tl.load(row + entry_index(first, n0, end, U, BLOCK))
    ahead = entry
    k0, k1, vs = 1.0, 1.0, 1.0
    if CARRY:
        ahead = tl.load(row + entry_index(first + 1, n0, end, U, BLOCK))
        n = first * BLOCK + n0
        alive = n < length
        if MIXED:
            alive = alive & ((entry & 7) == TAG)
        k0, k1, vs = load_scales(
            entry,
            alive,
            some_alive(first, length, entry, BLOCK, SPAN, MIXED, TAG),
            n % U,
            at_scales,
            D,
            W,
            HK,
            KIND,
            SPAN,
        )
    for j in tl.range(first, last, num_stages=STAGES):
        n = j * BLOCK + n0
        alive = n < length
        if MIXED:
            alive = alive & ((entry & 7) == TAG)
        address = (entry & ADDRESS_BITS) + at
        k_base = tl.multiple_of(address.to(tl.pointer_type(STORED)), 16)
        v_base = tl.multiple_of((address + HK * HEAD).to(tl.pointer_type(STORED)), 16)
        if SPAN:
            token = n % U
        else:
            token = (j * BLOCK) % U + n0
        k_at = (k_base + token * WIDTH)[:, None] + d[None, :]
        v_at = (v_base + token * WIDTH)[:, None] + c[None, :]
        if GUARD:
            k = tl.load(k_at, mask=alive[:, None] & (d < WIDTH)[None, :], other=0.0)
        elif WIDTH != W:
            k = tl.load(k_at, mask=(d < WIDTH)[None, :], other=0.0)
        else:
            k = tl.load(k_at)
        vt = vs
        if KIND == INT4:
            low, high = widen_nibbles(k, FAST)
            if SPAN:
                # A scale a channel and a unit: too many to carry, and read with the tile they cost no stage.
                s0, s1, vt = load_scales(entry, alive, True, n % U, at_scales, D, W, HK, KIND, SPAN)
                s = tl.dot(q0, tl.trans(low * s0))
                s = tl.dot(q1, tl.trans(high * s1), s)
            else:
                s = tl.dot(q0, tl.trans(low * k0[None, :]))
                s = tl.dot(q1, tl.trans(high * k1[None, :]), s)
            s = s * factor
        elif KIND == FLOAT:
            s = tl.dot(q0, tl.trans(k.to(q0.dtype)), input_precision="ieee") * factor
        else:
            s = tl.dot(q0, tl.trans(widen(k, KIND, tl.float16, FAST)))
            if SPAN:
                s = s * (factor * k0[None, :])
            else:
                s = s * (factor * k0)
        if SOFTCAP:
            s = (softcap * 1.4426950408889634) * (1.0 - 2.0 / (tl.exp2(s * (2.0 / softcap)) + 1.0))
        if ALIBI:
            s += slopes[:, None] * (n[None, :] - positions[:, None]).to(tl.float32)
        if GUARD:
            s = tl.where(alive[None, :], s, MASKED)
        if CAUSAL:
            s = tl.where(n[None, :] <= positions[:, None], s, MASKED)
        if WINDOW:
            s = tl.where(n[None, :] > positions[:, None] - window, s, MASKED)
        top = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - top[:, None])
        fade = tl.exp2(m - top)
        l = l * fade + tl.sum(p, 1)
        m = top
        if GUARD:
            v = tl.load(v_at, mask=alive[:, None] & (c < WIDTH)[None, :], other=0.0)
        elif WIDTH != C:
            v = tl.load(v_at, mask=(c < WIDTH)[None, :], other=0.0)
        else:
            v = tl.load(v_at)
        if KIND == FLOAT:
            acc0 = tl.dot(p.to(q0.dtype), v.to(q0.dtype), acc0 * fade[:, None], input_precision="ieee")
        else:
            if KIND == INT4:
                weights = (p * vt.to(tl.float32)[None, :]).to(tl.bfloat16)
            else:
                if SPAN:
                    tile = tl.max(vt, 0)
                    tile = tl.where(tile > 0, tl.maximum(tile, 1.0e-20), unit)
                    p = p * (tl.maximum(vt, 0.0) / tile)[None, :]
                else:
                    tile = tl.where(vt > 0, tl.maximum(vt, 1.0e-20), unit)
                fade = fade * (unit / tile)
                unit = tile
                weights = p.to(tl.float16)
            if PIECES == 1:
                acc0 = tl.dot(weights, widen(v, KIND, tl.float16, FAST), acc0 * fade[:, None])
            else:
                low, high = widen_nibbles(v, FAST)
                acc0 = tl.dot(weights, low, acc0 * fade[:, None])
                acc1 = tl.dot(weights, high, acc1 * fade[:, None])
        if CARRY:
            alive = n + BLOCK < length
            if MIXED:
                alive = alive & ((ahead & 7) == TAG)
            k0, k1, vs = load_scales(
                ahead,
                alive,
                some_alive(j + 1, length, ahead, BLOCK, SPAN, MIXED, TAG),
                (n + BLOCK) % U,
                at_scales,
                D,
                W,
                HK,
                KIND,
                SPAN,
            )
            ahead = tl.load(row + entry_index(j + 2, n0, end, U, BLOCK))
        entry = tl.load(row + entry_index(j + 1, n0, end, U, BLOCK))
    return m, l, acc0, acc1, unit


@triton.jit
def attend_whole(
    q, factor, m, l, acc, row, first, last, length, layer, head,
    HK: tl.constexpr, D: tl.constexpr, W: tl.constexpr, U: tl.constexpr, BLOCK: tl.constexpr, STORED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """`attend` over whole tiles of float units, without options: what nearly all of a prefill is.

    `factor` must be positive: the maximum is taken of raw products, and scaling is fused into the exponent.
    """
    d = tl.arange(0, W)
    n0 = tl.arange(0, BLOCK)
    HEAD: tl.constexpr = U * D * (STORED.primitive_bitwidth // 8)
    at = (layer.to(tl.int64) * (2 * HK) + head) * HEAD
    end = tl.maximum(length - 1, 0)
    entry = tl.load(row + entry_index(first, n0, end, U, BLOCK))
    for j in tl.range(first, last, num_stages=STAGES):
        k = load_whole(entry, at, j, n0, d, D, W, U, BLOCK, STORED)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        top = tl.maximum(m, tl.max(s, 1) * factor)
        p = tl.exp2(s * factor - top[:, None])
        fade = tl.exp2(m - top)
        l = l * fade + tl.sum(p, 1)
        m = top
        v = load_whole(entry, at + HK * HEAD, j, n0, d, D, W, U, BLOCK, STORED)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision="ieee")
        entry = tl.load(row + entry_index(j + 1, n0, end, U, BLOCK))
    return m, l, acc


@triton.jit
def load_whole(
    entry, at, tile, n0, d, D: tl.constexpr, W: tl.constexpr, U: tl.constexpr, BLOCK: tl.constexpr, STORED: tl.constexpr
):
    """A tile of K or V of float units, none of its tokens masked."""
    base = tl.multiple_of(((entry & ADDRESS_BITS) + at).to(tl.pointer_type(STORED)), 16)
    if U % BLOCK != 0:
        rows = base + ((tile * BLOCK + n0) % U) * D
    else:
        rows = base + ((tile * BLOCK) % U + n0) * D
    if W != D:
        return tl.load(rows[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(rows[:, None] + d[None, :])


@triton.jit
def entry_index(tile, n0, end, U: tl.constexpr, BLOCK: tl.constexpr):
    """Column of the table for a tile, or for each of its rows where it spans units; never past token `end`."""
    if U % BLOCK != 0:
        return tl.minimum(tile * BLOCK + n0, end) // U
    else:
        return tl.minimum(tile * BLOCK, end) // U


@triton.jit
def settle(m, l, unit, sink, SINKS: tl.constexpr):
    """The factor that makes an accumulator an output, and the base-2 log-sum-exp; (0, -inf) for rows without a key."""
    seen = m > NOTHING
    l = tl.where(seen, l, 1.0)
    lse = tl.where(seen, m + tl.log2(l), float("-inf"))
    factor = tl.where(seen, unit / l, 0.0)
    if SINKS:
        lse, share = add_sink(lse, sink)
        factor = factor * share
    return factor, lse


@triton.jit
def add_sink(lse, sink):
    """A base-2 log-sum-exp with one more logit, and the share that stays with what it had before."""
    top = tl.maximum(lse, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    both = tl.exp2(lse - top) + tl.exp2(sink - top)
    total = tl.where(both > 0, top + tl.log2(tl.maximum(both, 1.0e-37)), float("-inf"))
    share = tl.where(both > 0, tl.exp2(lse - top) / tl.maximum(both, 1.0e-37), 0.0)
    return total, share
