"""Prefill on Hopper's warpgroup matrix units, in Gluon: what `prefill` launches there for float units without options.

It computes what `prefill.prefill_kernel` does. Four warps only load: they look up addresses and copy tiles into a ring
of buffers in shared memory. Two warpgroups, of 64 query rows each, only compute, and share nothing but the tiles: while
one is at its exponentials, the other's products keep the matrix units busy. Within a warpgroup the scores of the next
tile are set off ahead of this tile's output, and become weights while that is computed. Tiles are taken from the end of
the context to its start, so that those which need masks come first. (The plan is FlashAttention-3's, Shah et al. 2024.)

Only float units of head dims 64 and 128, with queries of the same dtype (`tuning.prefill_warpgroups`). Gluon is an
experimental part of Triton, so this module is imported only with the release it was tested with (`tuning.GLUON`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kvtier_kernels.tiles import ADDRESS_BITS, MASKED, settle

ROWS = 128
FORM = ("G", "HK", "D", "U", "BLOCK", "STORED")
"""Constants of `prefill.shape` that the kernel is compiled for; the others are fixed."""

M = gl.constexpr(ROWS)
HALF = gl.constexpr(ROWS // 2)  # rows of a warpgroup


@gluon.jit
def load_tile(
    buffer, row, at, first, length, end,
    D: gl.constexpr, U: gl.constexpr, BLOCK: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    """Start to copy the tile of K or V at token `first`; tokens from `length` on become zeros."""
    STEP: gl.constexpr = 64 if U % 64 == 0 else 16  # tokens of one unit
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    n0 = gl.arange(0, STEP, gl.SliceLayout(1, COPY))
    d = gl.arange(0, D, gl.SliceLayout(0, COPY))
    for i in gl.static_range(BLOCK // STEP):
        n = first + i * STEP
        entry = gl.load(row + gl.minimum(n, end) // U)
        base = gl.multiple_of(((entry & ADDRESS_BITS) + at).to(gl.pointer_type(STORED)), 16)
        pointers = (base + (n % U + n0) * D)[:, None] + d[None, :]
        part = buffer.slice(i * STEP, STEP)
        hopper.async_copy.async_copy_global_to_shared(part, pointers, mask=(n + n0 < length)[:, None])


@gluon.jit
def produce(
    ring, row, at_k, at_v, length, tiles,
    D: gl.constexpr, U: gl.constexpr, BLOCK: gl.constexpr, STORED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warps that load: K and V of each tile, the last tile first, as soon as its buffers are free."""
    keys, values, k_full, v_full, k_empty, v_empty = ring
    end = gl.maximum(length - 1, 0)
    slot = 0
    phase = 1
    for i in range(tiles):
        first = (tiles - 1 - i) * BLOCK
        mbarrier.wait(k_empty.index(slot), phase)
        load_tile(keys.index(slot), row, at_k, first, length, end, D, U, BLOCK, STORED)
        hopper.async_copy.mbarrier_arrive(k_full.index(slot), increment_count=False)
        mbarrier.wait(v_empty.index(slot), phase)
        load_tile(values.index(slot), row, at_v, first, length, end, D, U, BLOCK, STORED)
        hopper.async_copy.mbarrier_arrive(v_full.index(slot), increment_count=False)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1


@gluon.jit
def score(q, ring, slot, phase, S: gl.constexpr, BLOCK: gl.constexpr):
    """Set off the products of the queries with the keys in `slot`, when they are there."""
    keys, _values, k_full, _v_full, _k_empty, _v_empty = ring
    mbarrier.wait(k_full.index(slot), phase)
    hopper.fence_async_shared()
    s = gl.zeros([HALF, BLOCK], gl.float32, S)
    return hopper.warpgroup_mma(q, keys.index(slot).permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def weigh(s, m, l, scale, first, positions, length, MASK: gl.constexpr, S: gl.constexpr, BLOCK: gl.constexpr):
    """Weights of the scores of the tile at token `first`, the softmax's state with them, and what earlier sums fade by.

    `scale` must be positive: without masks the maximum is taken of raw products.
    """
    if MASK:
        n = first + gl.arange(0, BLOCK, gl.SliceLayout(0, S))
        s = gl.where((n[None, :] <= positions[:, None]) & (n < length)[None, :], s * scale, MASKED)
        top = gl.maximum(m, gl.max(s, 1))
        p = gl.exp2(s - top[:, None])
    else:
        top = gl.maximum(m, gl.max(s, 1) * scale)
        p = gl.exp2(s * scale - top[:, None])
    fade = gl.exp2(m - top)
    return p, top, l * fade + gl.sum(p, 1), fade


@gluon.jit
def step(
    q, ring, weights, acc, m, l, scale, first, positions, length, slot, phase,
    MASK: gl.constexpr, S: gl.constexpr, O: gl.constexpr, BLOCK: gl.constexpr, STORED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores and weights of the tile after the one in `slot`, whose own weights meet its values meanwhile."""
    _keys, values, _k_full, v_full, k_empty, v_empty = ring
    wrap = slot + 1 == STAGES
    following = gl.where(wrap, 0, slot + 1)
    next_phase = gl.where(wrap, phase ^ 1, phase)
    s = score(q, ring, following, next_phase, S, BLOCK)
    acc = hopper.warpgroup_mma(weights, values.index(slot), acc, is_async=True)
    s = hopper.warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_empty.index(following), count=1)
    p, m, l, fade = weigh(s, m, l, scale, first, positions, length, MASK, S, BLOCK)
    # For the next step. Waited for here because the assembler keeps the weights' arithmetic ahead of this loop; else it
    # puts them off until the output is done, and nothing overlaps.
    mbarrier.wait(v_full.index(following), next_phase)
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(slot), count=1)
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, O))[:, None]
    weights = gl.convert_layout(p.to(STORED), gl.DotOperandLayout(0, O, 2))
    return weights, acc, m, l, following, next_phase


@gluon.jit
def consume(
    q_all, ring, OUT, LSE, scale, begin, start, queries, context, length, tiles, masked, head, s_ot, s_oh,
    PART: gl.constexpr, G: gl.constexpr, HK: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, STORED: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup that computes: rows PART * 64 and on of the block, over all `tiles`, of which the first are `masked`."""
    _keys, values, _k_full, v_full, k_empty, _v_empty = ring
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    q = q_all.slice(PART * HALF, HALF)
    r = PART * HALF + gl.arange(0, HALF, gl.SliceLayout(1, S))
    t = start + r // G
    positions = context + t
    acc = gl.zeros([HALF, D], gl.float32, O)
    m = gl.full([HALF], MASKED, gl.float32, gl.SliceLayout(1, S))
    l = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, S))
    s = hopper.warpgroup_mma_wait(0, deps=[score(q, ring, 0, 0, S, BLOCK)])
    mbarrier.arrive(k_empty.index(0), count=1)
    p, m, l, _fade = weigh(s, m, l, scale, (tiles - 1) * BLOCK, positions, length, True, S, BLOCK)
    weights = gl.convert_layout(p.to(STORED), gl.DotOperandLayout(0, O, 2))
    mbarrier.wait(v_full.index(0), 0)
    slot, phase = 0, 0
    for i in range(1, masked):
        weights, acc, m, l, slot, phase = step(
            q, ring, weights, acc, m, l, scale, (tiles - 1 - i) * BLOCK, positions, length, slot, phase, True, S, O, BLOCK,
            STORED, STAGES,
        )  # fmt: skip
    for _i in range(masked, tiles):
        weights, acc, m, l, slot, phase = step(
            q, ring, weights, acc, m, l, scale, 0, positions, length, slot, phase, False, S, O, BLOCK, STORED, STAGES,
        )  # fmt: skip
    hopper.fence_async_shared()
    acc = hopper.warpgroup_mma(weights, values.index(slot), acc, is_async=True)
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    norm, lse = settle(m, l, 1.0, l, False)
    real = (t < queries) & (r < M // G * G)
    gl.store(LSE + (begin + t).to(gl.int64) * (HK * G) + head * G + r % G, lse * 0.6931471805599453, mask=real)
    r = PART * HALF + gl.arange(0, HALF, gl.SliceLayout(1, O))
    t = start + r // G
    d = gl.arange(0, D, gl.SliceLayout(0, O))
    out = OUT + (begin + t).to(gl.int64) * s_ot + (head * G + r % G) * s_oh
    acc = acc * gl.convert_layout(norm, gl.SliceLayout(1, O))[:, None]
    real = (t < queries) & (r < M // G * G)
    gl.store(out[:, None] + d[None, :], acc.to(OUT.dtype.element_ty), mask=real[:, None])


@gluon.jit(do_not_specialize=["layer", "width", "s_table"], do_not_specialize_on_alignment=["CU", "TABLE", "LENGTHS"])
def prefill_kernel(
    Q, CU, TABLE, LENGTHS, OUT, LSE, scale, layer, width, s_qt, s_qh, s_ot, s_oh, s_table,
    G: gl.constexpr, HK: gl.constexpr, D: gl.constexpr, U: gl.constexpr, BLOCK: gl.constexpr, STORED: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    TOKENS: gl.constexpr = M // G
    HEAD: gl.constexpr = U * D * (STORED.primitive_bitwidth // 8)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, D], STORED)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    block = gl.num_programs(0) - 1 - gl.program_id(0)
    head = gl.program_id(1)
    sequence = gl.program_id(2).to(gl.int64)
    begin = gl.load(CU + sequence)
    queries = gl.load(CU + sequence + 1) - begin
    length = gl.maximum(gl.minimum(gl.load(LENGTHS + sequence), width * U), 0)
    context = length - queries
    start = block * TOKENS
    whole = gl.maximum(context + start + 1, 0) // BLOCK  # tiles that the block's first token sees all of
    last = gl.cdiv(gl.maximum(gl.minimum(length, context + start + TOKENS), 0), BLOCK)
    # A block without queries takes one tile, and stores nothing.
    tiles = gl.where(start < queries, gl.maximum(last, 1), 1)
    masked = gl.maximum(tiles - whole, 1)

    r = gl.arange(0, M, gl.SliceLayout(1, COPY))
    d = gl.arange(0, D, gl.SliceLayout(0, COPY))
    t = start + r // G
    at = (begin + t).to(gl.int64) * s_qt + (head * G + r % G) * s_qh
    real = (t < queries) & (r < TOKENS * G)
    q = gl.allocate_shared_memory(STORED, [M, D], gl.NVMMASharedLayout.get_default_for([M, D], STORED))
    q.store(gl.load((Q + at)[:, None] + d[None, :], mask=real[:, None], other=0.0))
    keys = gl.allocate_shared_memory(STORED, [STAGES, BLOCK, D], SHARED)
    values = gl.allocate_shared_memory(STORED, [STAGES, BLOCK, D], SHARED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=128)  # threads that load
        mbarrier.init(v_full.index(i), count=128)
        mbarrier.init(k_empty.index(i), count=2)  # warpgroups that compute
        mbarrier.init(v_empty.index(i), count=2)
    hopper.fence_async_shared()
    ring = (keys, values, k_full, v_full, k_empty, v_empty)
    row = TABLE + sequence * s_table
    at_k = (layer.to(gl.int64) * (2 * HK) + head) * HEAD
    at_v = at_k + HK * HEAD
    gl.warp_specialize(
        [
            (consume, (q, ring, OUT, LSE, scale, begin, start, queries, context, length, tiles, masked, head, s_ot, s_oh,
                       0, G, HK, D, BLOCK, STORED, STAGES)),
            (consume, (q, ring, OUT, LSE, scale, begin, start, queries, context, length, tiles, masked, head, s_ot, s_oh,
                       1, G, HK, D, BLOCK, STORED, STAGES)),
            (produce, (ring, row, at_k, at_v, length, tiles, D, U, BLOCK, STORED, STAGES)),
        ],
        [4, 4],
        [232, 40],  # registers a thread that computes, and that loads
    )  # fmt: skip
