"""Device code of decode: a tile of K and V folded into a softmax, with tokens as rows of both products.

Scores are K times the transposed queries, and an output is the transpose of V times the transposed probabilities. A
matrix instruction takes 16 rows and 8 columns, so the few query rows of decode stand as columns, where 8 of them are a
whole instruction; as rows they would be padded to 16, which doubles the products, the exponentials and the registers.
Prefill has rows enough and folds the other way round (`tiles.attend`).

int4 codes are not widened at all. The bits of a code, alone in a bfloat16, are a subnormal number: the code times
2**-133, or, four bits further up, times 2**-129. Tensor cores take such numbers exactly. Queries and weights are
multiplied by 2**100 beforehand, so that nothing else leaves the normal range while scales are below 2**27, and the
excess of 8 in every code is taken off as a product of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtier_kernels.tiles import ADDRESS_BITS, MASKED, entry_index, load_scales, some_alive
from kvtier_kernels.widening import FLOAT, INT4, nibbles, split_words, widen, widen_nibbles

UP = tl.constexpr(2.0**100)
UP_HIGH = tl.constexpr(2.0**96)  # for codes that stand four bits higher
BACK = tl.constexpr(2.0**33)  # takes a product of a raised factor and bare codes back


@triton.jit
def load_columns(rows, seen, D: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr):
    """Queries at pointers `rows` as columns, whole or (int4) two halves, in the type scores are computed in, and their
    factor. float16 cannot hold every bfloat16, so queries headed for it are divided by a power of two first."""
    d = tl.arange(0, W)
    if KIND == INT4:
        half = D // 2
        lanes = (d < half)[:, None] & seen[None, :]
        low = tl.load(rows[None, :] + d[:, None], mask=lanes, other=0.0)
        high = tl.load(rows[None, :] + (d + half)[:, None], mask=lanes, other=0.0)
        return low.to(tl.bfloat16), high.to(tl.bfloat16), 1.0
    else:
        q = tl.load(rows[None, :] + d[:, None], mask=(d < D)[:, None] & seen[None, :], other=0.0)
        if KIND == FLOAT:
            return q, q, 1.0
        else:
            wide = q.to(tl.float32)
            top = tl.max(tl.abs(wide), 0)
            power = tl.exp2(tl.ceil(tl.log2(tl.maximum(top, 1.0e-30))))
            q = (wide / power[None, :]).to(tl.float16)
            return q, q, power[None, :]


@triton.jit
def bare(code: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of one code as `nibbles` gives them, the fewest that a product takes."""
    return tl.full([16, WIDTH], code, tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def fold(
    q0, q1, factor, positions, slopes, m, l, acc0, acc1, acc2, acc3, unit,
    row, entry, first, last, length, layer, layers, head, softcap, window,
    HK: tl.constexpr, D: tl.constexpr, W: tl.constexpr, C: tl.constexpr, U: tl.constexpr, BLOCK: tl.constexpr,
    PIECES: tl.constexpr, KIND: tl.constexpr, STORED: tl.constexpr, TAG: tl.constexpr, MIXED: tl.constexpr,
    EDGE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    FAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fold tiles `first` to `last` of a sequence into the state (m, l, acc0 to acc3, unit) and return it.

    `row` points to the sequence's table row, and `entry` is what stands there for the first tile. The caller keeps
    `length` within it. `factor` takes a product of queries and codes to base-2 logits. `unit` is what the accumulators
    are counted in, the current V scale of float8 and int8. Float units use acc0 alone, others all four; `piece_dim`
    says what they hold. EDGE: tiles may pass the length, and are then masked before they are loaded: what lies in an
    unused slot may be NaN, and zero times NaN is NaN.
    """
    SPAN: tl.constexpr = U % BLOCK != 0
    GUARD: tl.constexpr = EDGE or MIXED
    WIDTH: tl.constexpr = D // 2 if KIND == INT4 else D  # stored elements of a row
    HEAD: tl.constexpr = U * WIDTH * (STORED.primitive_bitwidth // 8)
    CARRY: tl.constexpr = KIND != FLOAT and not (KIND == INT4 and SPAN)
    WORD: tl.constexpr = STORED if PIECES < 4 else (tl.int16 if KIND == INT4 else tl.int32)
    WORDS: tl.constexpr = D // PIECES  # of a row of V
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
    ahead = entry
    k0, k1, vs = 1.0, 1.0, 1.0
    if CARRY:
        ahead = tl.load(row + entry_index(first + 1, n0, end, U, BLOCK))
        n = first * BLOCK + n0
        alive = n < length
        if MIXED:
            alive = alive & ((entry & 7) == TAG)
        some = some_alive(first, length, entry, BLOCK, SPAN, MIXED, TAG)
        k0, k1, vs = load_scales(entry, alive, some, n % U, at_scales, D, W, HK, KIND, SPAN)
    for j in tl.range(first, last, num_stages=STAGES):
        n = j * BLOCK + n0
        alive = n < length
        if MIXED:
            alive = alive & ((entry & 7) == TAG)
        address = (entry & ADDRESS_BITS) + at
        k_base = tl.multiple_of(address.to(tl.pointer_type(STORED)), 16)
        v_base = tl.multiple_of((address + HK * HEAD).to(tl.pointer_type(WORD)), 16)
        if SPAN:
            token = n % U
        else:
            token = (j * BLOCK) % U + n0
        k_at = (k_base + token * WIDTH)[:, None] + d[None, :]
        v_at = (v_base + token * WORDS)[None, :] + c[:, None]
        if GUARD:
            k = tl.load(k_at, mask=alive[:, None] & (d < WIDTH)[None, :], other=0.0)
        elif WIDTH != W:
            k = tl.load(k_at, mask=(d < WIDTH)[None, :], other=0.0)
        else:
            k = tl.load(k_at)
        vt = vs
        if KIND == INT4:
            if SPAN:
                # A scale a channel and a unit: too many to carry, and read with the tile they cost no stage.
                low, high = widen_nibbles(k, FAST)
                s0, s1, vt = load_scales(entry, alive, True, n % U, at_scales, D, W, HK, KIND, SPAN)
                s = tl.dot(low * s0, q0)
                s = tl.dot(high * s1, q1, s) * factor
            else:
                low, high = nibbles(k, FAST)
                scaled0 = q0 * (k0.to(tl.float32) * UP).to(tl.bfloat16)[:, None]
                scaled1 = q1 * (k1.to(tl.float32) * UP_HIGH).to(tl.bfloat16)[:, None]
                excess = tl.dot(bare(0x80, W), scaled1, tl.dot(bare(0x08, W), scaled0))
                s = tl.dot(low, scaled0)
                s = tl.dot(high, scaled1, s)
                s = (s - tl.max(excess, 0)[None, :]) * (factor * BACK)
        elif KIND == FLOAT:
            s = tl.dot(k.to(q0.dtype), q0, input_precision="ieee") * factor
        else:
            s = tl.dot(widen(k, KIND, tl.float16, FAST), q0)
            if SPAN:
                s = s * (factor * k0[:, None])
            else:
                s = s * (factor * k0)
        if SOFTCAP:
            s = (softcap * 1.4426950408889634) * (1.0 - 2.0 / (tl.exp2(s * (2.0 / softcap)) + 1.0))
        if ALIBI:
            s += slopes[None, :] * (n[:, None] - positions[None, :]).to(tl.float32)
        if GUARD:
            s = tl.where(alive[:, None], s, MASKED)
        if CAUSAL:
            s = tl.where(n[:, None] <= positions[None, :], s, MASKED)
        if WINDOW:
            s = tl.where(n[:, None] > positions[None, :] - window, s, MASKED)
        top = tl.maximum(m, tl.max(s, 0))
        p = tl.exp2(s - top[None, :])
        fade = tl.exp2(m - top)
        l = l * fade + tl.sum(p, 0)
        m = top
        if GUARD:
            v = tl.load(v_at, mask=alive[None, :] & (c < WORDS)[:, None], other=0.0)
        elif WORDS != C:
            v = tl.load(v_at, mask=(c < WORDS)[:, None], other=0.0)
        else:
            v = tl.load(v_at)
        if KIND == FLOAT:
            acc0 = tl.dot(v.to(q0.dtype), p.to(q0.dtype), acc0 * fade[None, :], input_precision="ieee")
        elif KIND == INT4:
            weights = (p * (vt.to(tl.float32) * UP)[:, None]).to(tl.bfloat16)
            weights_high = weights * 0.0625
            # Per tile and not at the end: there it would be the small difference of two large sums.
            excess = tl.max(tl.dot(bare(0x08, BLOCK), weights), 0)[None, :]
            v0, v1, v2, v3 = split_words(v, KIND, False, FAST)
            acc0 = tl.dot(v0, weights, acc0 * fade[None, :] - excess)
            acc1 = tl.dot(v1, weights, acc1 * fade[None, :] - excess)
            acc2 = tl.dot(v2, weights_high, acc2 * fade[None, :] - excess)
            acc3 = tl.dot(v3, weights_high, acc3 * fade[None, :] - excess)
        else:
            if SPAN:
                tile = tl.max(vt, 0)
                tile = tl.where(tile > 0, tl.maximum(tile, 1.0e-20), unit)
                p = p * (tl.maximum(vt, 0.0) / tile)[:, None]
            else:
                tile = tl.where(vt > 0, tl.maximum(vt, 1.0e-20), unit)
            fade = fade * (unit / tile)
            unit = tile
            weights = p.to(tl.float16)
            v0, v1, v2, v3 = split_words(v, KIND, STORED.is_fp8(), FAST)
            acc0 = tl.dot(v0, weights, acc0 * fade[None, :])
            acc1 = tl.dot(v1, weights, acc1 * fade[None, :])
            acc2 = tl.dot(v2, weights, acc2 * fade[None, :])
            acc3 = tl.dot(v3, weights, acc3 * fade[None, :])
        if CARRY:
            alive = n + BLOCK < length
            if MIXED:
                alive = alive & ((ahead & 7) == TAG)
            some = some_alive(j + 1, length, ahead, BLOCK, SPAN, MIXED, TAG)
            k0, k1, vs = load_scales(ahead, alive, some, (n + BLOCK) % U, at_scales, D, W, HK, KIND, SPAN)
            ahead = tl.load(row + entry_index(j + 2, n0, end, U, BLOCK))
        entry = tl.load(row + entry_index(j + 1, n0, end, U, BLOCK))
    return m, l, acc0, acc1, acc2, acc3, unit
