"""Latent decode on Hopper's warpgroup matrix units, in Gluon: what `mla` launches there for many query rows.

It computes what `mla.mla_kernel` does, by the same cut of the work and into the same partial states; what differs is
that layouts, loads and waits are written out. A tile is 128 tokens, one buffer of shared memory, which serves both
products. Scores are shared out by tokens between the two warpgroups, 64 each, and outputs by latent columns, so weights
pass through shared memory: they take the place of the tile's ropes, which are done with by then. There is no room for a
second tile, so columns are loaded again as soon as outputs are done with them, and the next scores begin with the first
quarter of the columns that is there.

Only latents of 512 and ropes of 64 in bfloat16 or float16, with queries of the same dtype (`tuning.warpgroups`): 64
rows of queries and a tile fill the 227 KiB of a multiprocessor. Gluon is an experimental part of Triton, so this module
is imported only with the release that it was tested with (`tuning.GLUON`).
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from kvtier_kernels.plan import locate, pick, spans
from kvtier_kernels.tiles import ADDRESS_BITS, MASKED, entry_index, settle

LATENT, ROPE, BLOCK, ROWS, WARPS = 512, 64, 128, 64, 8
FORM = ("T", "G", "U", "BLOCKS", "BATCH", "STORED")
"""Constants of `mla.shape` that the kernel is compiled for; the others are fixed."""

D, R, N, M = tl.constexpr(LATENT), tl.constexpr(ROPE), tl.constexpr(BLOCK), tl.constexpr(ROWS)
HALF, QUARTER = tl.constexpr(LATENT // 2), tl.constexpr(LATENT // 4)
LINE = tl.constexpr(gl.BlockedLayout([1], [32], [WARPS], [0]))
COPY = tl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0]))
SHARED = tl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
SCORES = tl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK // 2, 16]))
OUTPUT = tl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, LATENT // 4, 16]))
# A number for each row and warpgroup: in the warpgroup that made it, and both beside each other in every thread.
_LANES = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
APART = tl.constexpr(gl.DistributedLinearLayout([[8, 0]], _LANES, [[16, 0], [32, 0], [0, 1]], [], [ROWS, 2]))
TOGETHER = tl.constexpr(gl.DistributedLinearLayout([[8, 0], [0, 1]], _LANES, [[16, 0], [32, 0], [0, 0]], [], [ROWS, 2]))


@gluon.jit
def entries(row, tile, last, U: gl.constexpr):
    """Entries of the table for each of a tile's tokens."""
    return gl.load(row + entry_index(tile, gl.arange(0, N, layout=gl.SliceLayout(1, COPY)), last, U, N))


@gluon.jit
def fetch(
    buffer, entry, at, tile, limit, FROM: gl.constexpr, WIDTH: gl.constexpr, U: gl.constexpr, STORED: gl.constexpr
):
    """Start to load columns of a tile's tokens; those of tokens from `limit` on become zeros."""
    n = tile * N + gl.arange(0, N, layout=gl.SliceLayout(1, COPY))
    base = gl.multiple_of(((entry & ADDRESS_BITS) + at).to(gl.pointer_type(STORED)), 16)
    rows = base + (n % U) * (D + R)
    column = FROM + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, COPY))
    hopper.async_copy.async_copy_global_to_shared(buffer, rows[:, None] + column[None, :], mask=(n < limit)[:, None])


@gluon.jit
def fetch_half(buffer, entry, at, tile, limit, FROM: gl.constexpr, U: gl.constexpr, STORED: gl.constexpr):
    """Start to load half of the latent columns; the first quarter is a group of its own, the second stays open."""
    fetch(buffer.slice(0, QUARTER, dim=1), entry, at, tile, limit, FROM, QUARTER, U, STORED)
    hopper.async_copy.commit_group()
    fetch(buffer.slice(QUARTER, QUARTER, dim=1), entry, at, tile, limit, FROM + QUARTER, QUARTER, U, STORED)


@gluon.jit
def following(tile, first, end):
    """The tile after this one, round from `end` to `first`."""
    return gl.where(tile + 1 < end, tile + 1, first)


@gluon.jit
def write(rows, acc, mask, FROM: gl.constexpr):
    """Half of an output, to rows at pointers."""
    d = FROM + gl.arange(0, HALF, layout=gl.SliceLayout(0, OUTPUT))
    gl.store(rows[:, None] + d[None, :], acc.to(rows.dtype.element_ty), mask=mask)


@gluon.jit(
    do_not_specialize=["layer", "batch", "width", "s_table"], do_not_specialize_on_alignment=["TABLE", "LENGTHS"]
)
def mla_kernel(
    QL, QR, TABLE, LENGTHS, OUT, LSE, PARTS, PART_LSE, scale, layer, batch, width,
    s_lb, s_lt, s_lh, s_rb, s_rt, s_rh, s_ob, s_ot, s_oh, s_table,
    T: gl.constexpr, G: gl.constexpr, U: gl.constexpr, BLOCKS: gl.constexpr, BATCH: gl.constexpr, STORED: gl.constexpr,
    CHAIN: gl.constexpr,
):  # fmt: skip
    if CHAIN:
        tl.extra.cuda.gdc_launch_dependents()
    p = gl.program_id(0)
    index = gl.arange(0, BATCH, layout=LINE)
    lens, _firsts, counts = spans(LENGTHS, index, batch, width, T, 0, U, N, False)
    ends = tl.cumsum(counts, 0)
    total = gl.sum(counts, 0) * BLOCKS
    share = gl.cdiv(total, gl.num_programs(0))
    tile = p * share
    stop = gl.minimum(tile + share, total)
    ql = gl.allocate_shared_memory(STORED, [1, M, HALF], SHARED)
    qh = gl.allocate_shared_memory(STORED, [1, M, HALF], SHARED)
    qr = gl.allocate_shared_memory(STORED, [1, M, R], SHARED)
    low = gl.allocate_shared_memory(STORED, [1, N, HALF], SHARED)
    high = gl.allocate_shared_memory(STORED, [1, N, HALF], SHARED)
    ropes = gl.allocate_shared_memory(STORED, [1, N, R], SHARED)
    weights = ropes._reinterpret(STORED, [1, M, N], SHARED)
    at = layer.to(gl.int64) * (U * (D + R) * 2)
    while tile < stop:
        sequence, start = locate(counts, ends, index, tile, BLOCKS)
        count = pick(counts, index, sequence)
        length = pick(lens, index, sequence)
        block = (tile - start) // count
        first = (tile - start) % count
        here = gl.minimum(count - first, stop - tile)
        end = first + here
        wide = sequence.to(gl.int64)
        row = TABLE + wide * s_table
        last = gl.maximum(length - 1, 0)
        # Where a tile's number divides by the share there each program begins, if it has that tile, and goes round:
        # those that read the same tokens for other rows of queries then do so at the same time, and find them in L2.
        now = first + (share - first % share) % share
        now = gl.where(now < end, now, first)
        entry = entries(row, now, last, U)
        fetch_half(low.index(0), entry, at, now, length, 0, U, STORED)
        hopper.async_copy.commit_group()
        fetch_half(high.index(0), entry, at, now, length, HALF, U, STORED)
        fetch(ropes.index(0), entry, at, now, length, D, R, U, STORED)
        hopper.async_copy.commit_group()

        query = block * M + gl.arange(0, M, layout=gl.SliceLayout(1, COPY))
        t = (query // G).to(gl.int64)
        h = (query % G).to(gl.int64)
        real = (query < T * G)[:, None]
        d = gl.arange(0, HALF, layout=gl.SliceLayout(0, COPY))
        e = gl.arange(0, R, layout=gl.SliceLayout(0, COPY))
        latent_rows = QL + wide * s_lb + t * s_lt + h * s_lh
        rope_rows = QR + wide * s_rb + t * s_rt + h * s_rh
        ql.index(0).store(gl.load(latent_rows[:, None] + d[None, :], mask=real, other=0.0))
        qh.index(0).store(gl.load(latent_rows[:, None] + (HALF + d)[None, :], mask=real, other=0.0))
        qr.index(0).store(gl.load(rope_rows[:, None] + e[None, :], mask=real, other=0.0))
        hopper.fence_async_shared()

        m = gl.full([M], MASKED, gl.float32, gl.SliceLayout(1, SCORES))
        l = gl.zeros([M, 2], gl.float32, APART)
        acc_low = gl.zeros([M, HALF], gl.float32, OUTPUT)
        acc_high = gl.zeros([M, HALF], gl.float32, OUTPUT)
        for i in range(here):
            # The compiler would work out operands' descriptors before the loop and have no registers left, if it knew
            # where they are: so it is not told that this is 0.
            zero = i >> 30
            s = gl.zeros([M, N], gl.float32, SCORES)
            for part in gl.static_range(4):
                q = ql.index(zero) if part < 2 else qh.index(zero)
                k = low.index(zero) if part < 2 else high.index(zero)
                hopper.async_copy.wait_group(3 - part)
                q = q.slice(part % 2 * QUARTER, QUARTER, dim=1)
                k = k.slice(part % 2 * QUARTER, QUARTER, dim=1)
                s = hopper.warpgroup_mma(q, k.permute((1, 0)), s, use_acc=part > 0, is_async=True)
            s = hopper.warpgroup_mma(qr.index(zero), ropes.index(zero).permute((1, 0)), s, is_async=True)
            ahead = following(now, first, end)
            entry = entries(row, ahead, last, U)
            s = hopper.warpgroup_mma_wait(0, [s]) * scale
            if (now + 1) * N > length - T + 1:
                n = now * N + gl.arange(0, N, layout=gl.SliceLayout(0, SCORES))
                if T > 1:
                    position = length - T + (block * M + gl.arange(0, M, layout=gl.SliceLayout(1, SCORES))) // G
                    s = gl.where(n[None, :] <= position[:, None], s, MASKED)
                else:
                    s = gl.where((n < length)[None, :], s, MASKED)
            tops = gl.convert_layout(gl.max(gl.reshape(s, [M, 2, N // 2]), 2), APART)
            top = gl.max(gl.convert_layout(tops, TOGETHER), 1)
            top = gl.maximum(m, gl.convert_layout(top, gl.SliceLayout(1, SCORES)))
            w = gl.exp2(s - top[:, None])
            # Both warpgroups have read the ropes: each waited for its scores before their maxima met.
            weights.index(zero).store(w.to(STORED))
            hopper.fence_async_shared()
            fade = gl.exp2(m - top)
            m = top
            sums = gl.convert_layout(gl.sum(gl.reshape(w, [M, 2, N // 2]), 2), APART)
            l = l * gl.convert_layout(fade, gl.SliceLayout(1, APART))[:, None] + sums
            fade = gl.convert_layout(fade, gl.SliceLayout(1, OUTPUT))[:, None]
            acc_low = hopper.warpgroup_mma(weights.index(zero), low.index(zero), acc_low * fade, is_async=True)
            acc_high = hopper.warpgroup_mma(weights.index(zero), high.index(zero), acc_high * fade, is_async=True)
            # Each warpgroup waits for its own products, and the barriers for the other's: the compiler sees that
            # buffers were read, and not that reading has ended.
            limit = gl.where(i + 1 < here, length, 0)
            acc_low = hopper.warpgroup_mma_wait(1, [acc_low])
            gl.thread_barrier()
            fetch_half(low.index(0), entry, at, ahead, limit, 0, U, STORED)
            hopper.async_copy.commit_group()
            acc_high = hopper.warpgroup_mma_wait(0, [acc_high])
            gl.thread_barrier()
            fetch_half(high.index(0), entry, at, ahead, limit, HALF, U, STORED)
            fetch(ropes.index(0), entry, at, ahead, limit, D, R, U, STORED)
            hopper.async_copy.commit_group()
            now = ahead
        hopper.async_copy.wait_group(0)

        l = gl.convert_layout(gl.sum(gl.convert_layout(l, TOGETHER), 1), gl.SliceLayout(1, SCORES))
        norm, lse = settle(m, l, 1.0, l, False)
        norm = gl.convert_layout(norm, gl.SliceLayout(1, OUTPUT))[:, None]
        lse = gl.convert_layout(lse, gl.SliceLayout(1, OUTPUT))
        r = gl.arange(0, M, layout=gl.SliceLayout(1, OUTPUT))
        if here == count:
            q_out = block * M + r
            t_out = (q_out // G).to(gl.int64)
            h_out = q_out % G
            done = q_out < T * G
            rows = OUT + wide * s_ob + t_out * s_ot + h_out.to(gl.int64) * s_oh
            write(rows, acc_low * norm, done[:, None], 0)
            write(rows, acc_high * norm, done[:, None], HALF)
            gl.store(LSE + (wide * T + t_out) * G + h_out, lse * 0.6931471805599453, mask=done)
        else:
            part_of = (p * 2 + (tile > p * share).to(gl.int32)).to(gl.int64) * M + r
            write(PARTS + part_of * D, acc_low * norm, None, 0)
            write(PARTS + part_of * D, acc_high * norm, None, HALF)
            gl.store(PART_LSE + part_of, lse)
        tile += here
