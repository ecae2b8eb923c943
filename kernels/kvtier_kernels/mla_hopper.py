"""Latent decode on Hopper's warpgroup matrix units, in Gluon: what `mla` launches there for many query rows.

It computes what `mla.mla_kernel` does, by the same cut of the work and into the same partial states; what differs is
that layouts, loads and waits are written out. Tiles of 64 tokens are loaded into two buffers of shared memory and serve
both products from there. Scores are shared out by tokens between the two warpgroups and outputs by latent columns, so
weights pass through shared memory. The scores of the next tile are set off behind this tile's outputs, and a tile's
buffer is filled again as soon as its outputs are done.

Only latents of 512 and ropes of 64 in bfloat16 or float16, with queries of the same dtype (`tuning.warpgroups`): 64
rows of queries, two tiles and the weights fill the 227 KiB of a multiprocessor. Gluon is an experimental part of
Triton, so this module is imported only with the release that it was tested with (`tuning.GLUON`).
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from kvtier_kernels.plan import locate, pick, spans
from kvtier_kernels.tiles import ADDRESS_BITS, MASKED, entry_index, settle

LATENT, ROPE, BLOCK, ROWS, WARPS = 512, 64, 64, 64, 8
FORM = ("T", "G", "U", "BLOCKS", "BATCH", "STORED")
"""Constants of `mla.shape` that the kernel is compiled for; the others are fixed."""

D, R, N, M = tl.constexpr(LATENT), tl.constexpr(ROPE), tl.constexpr(BLOCK), tl.constexpr(ROWS)
LINE = tl.constexpr(gl.BlockedLayout([1], [32], [WARPS], [0]))
COPY = tl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0]))
SHARED = tl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
SCORES = tl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK // 2, 16]))
OUTPUT = tl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, LATENT // 2, 16]))
# A number for each row and warpgroup: in the warpgroup that made it, and both beside each other in every thread.
_LANES = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
HALVES = tl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], _LANES, [[16, 0], [32, 0], [0, 1]], [], [ROWS, 2]),
)
BOTH = tl.constexpr(
    gl.DistributedLinearLayout([[8, 0], [0, 1]], _LANES, [[16, 0], [32, 0], [0, 0]], [], [ROWS, 2]),
)


@gluon.jit
def fetch(latents, ropes, slot, entry, tile, limit, at, U: gl.constexpr, STORED: gl.constexpr):
    """Start to load a tile into buffer `slot`; tokens from `limit` on become zeros."""
    n0 = gl.arange(0, N, layout=gl.SliceLayout(1, COPY))
    base = gl.multiple_of(((entry & ADDRESS_BITS) + at).to(gl.pointer_type(STORED)), 16)
    if U % N != 0:
        rows = base + ((tile * N + n0) % U) * (D + R)
    else:
        rows = base + ((tile * N) % U + n0) * (D + R)
    alive = (tile * N + n0 < limit)[:, None]
    d = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))
    e = gl.arange(0, R, layout=gl.SliceLayout(0, COPY))
    hopper.async_copy.async_copy_global_to_shared(latents.index(slot), rows[:, None] + d[None, :], mask=alive)
    hopper.async_copy.async_copy_global_to_shared(ropes.index(slot), rows[:, None] + (D + e)[None, :], mask=alive)
    hopper.async_copy.commit_group()


@gluon.jit
def entry_of(row, tile, last, U: gl.constexpr):
    n0 = gl.arange(0, N, layout=gl.SliceLayout(1, COPY))
    return gl.load(row + entry_index(tile, n0, last, U, N))


@gluon.jit
def score(ql, qr, latents, ropes, slot):
    """Set off the products of all queries with the keys in buffer `slot`, when it is loaded."""
    hopper.fence_async_shared()
    s = gl.zeros([M, N], gl.float32, SCORES)
    s = hopper.warpgroup_mma(ql, latents.index(slot).permute((1, 0)), s, use_acc=False, is_async=True)
    return hopper.warpgroup_mma(qr, ropes.index(slot).permute((1, 0)), s, is_async=True)


@gluon.jit
def following(tile, first, end):
    """The tile after this one, round from `end` to `first`."""
    return gl.where(tile + 1 < end, tile + 1, first)


@gluon.jit
def across(values):
    """The two warpgroups' numbers of each row, in every thread that has to do with the row."""
    return gl.convert_layout(values, BOTH)


@gluon.jit(do_not_specialize=["layer", "batch", "width"])
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
    ql = gl.allocate_shared_memory(STORED, [M, D], SHARED)
    qr = gl.allocate_shared_memory(STORED, [M, R], SHARED)
    latents = gl.allocate_shared_memory(STORED, [2, N, D], SHARED)
    ropes = gl.allocate_shared_memory(STORED, [2, N, R], SHARED)
    weights = gl.allocate_shared_memory(STORED, [M, N], SHARED)
    while tile < stop:
        sequence, start = locate(counts, ends, index, tile, BLOCKS)
        count = pick(counts, index, sequence)
        length = pick(lens, index, sequence)
        block = (tile - start) // count
        first = (tile - start) % count
        here = gl.minimum(count - first, stop - tile)
        wide = sequence.to(gl.int64)
        row = TABLE + wide * s_table
        last = gl.maximum(length - 1, 0)
        at = layer.to(gl.int64) * (U * (D + R) * 2)
        end = first + here
        # Where a tile's number divides by the share there each program begins, if it has that tile, and goes round:
        # those that read the same tokens for other rows of queries then do so at the same time, and find them in L2.
        now = first + (share - first % share) % share
        now = gl.where(now < end, now, first)
        ahead = following(now, first, end)
        fetch(latents, ropes, 0, entry_of(row, now, last, U), now, length, at, U, STORED)
        fetch(latents, ropes, 1, entry_of(row, ahead, last, U), ahead, gl.where(here > 1, length, 0), at, U, STORED)
        ahead = following(ahead, first, end)
        entry = entry_of(row, ahead, last, U)

        query = block * M + gl.arange(0, M, layout=gl.SliceLayout(1, COPY))
        t = (query // G).to(gl.int64)
        h = (query % G).to(gl.int64)
        real = (query < T * G)[:, None]
        d = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))
        e = gl.arange(0, R, layout=gl.SliceLayout(0, COPY))
        latent_rows = QL + wide * s_lb + t * s_lt + h * s_lh
        rope_rows = QR + wide * s_rb + t * s_rt + h * s_rh
        ql.store(gl.load(latent_rows[:, None] + d[None, :], mask=real, other=0.0))
        qr.store(gl.load(rope_rows[:, None] + e[None, :], mask=real, other=0.0))
        hopper.fence_async_shared()

        m = gl.full([M], MASKED, gl.float32, gl.SliceLayout(1, SCORES))
        l = gl.zeros([M, 2], gl.float32, HALVES)
        acc = gl.zeros([M, D], gl.float32, OUTPUT)
        hopper.async_copy.wait_group(1)
        s_next = score(ql, qr, latents, ropes, 0)
        for i in range(here):
            slot = i % 2
            s = hopper.warpgroup_mma_wait(0, [s_next]) * scale
            if (now + 1) * N > length - T + 1:
                n = now * N + gl.arange(0, N, layout=gl.SliceLayout(0, SCORES))
                if T > 1:
                    position = length - T + (block * M + gl.arange(0, M, layout=gl.SliceLayout(1, SCORES))) // G
                    s = gl.where(n[None, :] <= position[:, None], s, MASKED)
                else:
                    s = gl.where((n < length)[None, :], s, MASKED)
            tops = gl.convert_layout(gl.max(gl.reshape(s, [M, 2, N // 2]), 2), HALVES)
            top = gl.convert_layout(gl.max(across(tops), 1), gl.SliceLayout(1, SCORES))
            top = gl.maximum(m, top)
            w = gl.exp2(s - top[:, None])
            weights.store(w.to(STORED))
            hopper.fence_async_shared()
            fade = gl.exp2(m - top)
            m = top
            sums = gl.convert_layout(gl.sum(gl.reshape(w, [M, 2, N // 2]), 2), HALVES)
            l = l * gl.convert_layout(fade, gl.SliceLayout(1, HALVES))[:, None] + sums
            acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, OUTPUT))[:, None]
            acc = hopper.warpgroup_mma(weights, latents.index(slot), acc, is_async=True)
            hopper.async_copy.wait_group(0)
            s_next = score(ql, qr, latents, ropes, 1 - slot)  # past the last tile: of zeros, and never looked at
            acc = hopper.warpgroup_mma_wait(2, [acc])
            fetch(latents, ropes, slot, entry, ahead, gl.where(i + 2 < here, length, 0), at, U, STORED)
            ahead = following(ahead, first, end)
            entry = entry_of(row, ahead, last, U)
            now = following(now, first, end)
        hopper.warpgroup_mma_wait(0, [s_next])
        hopper.async_copy.wait_group(0)

        l = gl.convert_layout(gl.sum(across(l), 1), gl.SliceLayout(1, SCORES))
        norm, lse = settle(m, l, 1.0, l, False)
        acc = acc * gl.convert_layout(norm, gl.SliceLayout(1, OUTPUT))[:, None]
        r = gl.arange(0, M, layout=gl.SliceLayout(1, OUTPUT))
        d_out = gl.arange(0, D, layout=gl.SliceLayout(0, OUTPUT))
        lse = gl.convert_layout(lse, gl.SliceLayout(1, OUTPUT))
        if here == count:
            q_out = block * M + r
            t_out = (q_out // G).to(gl.int64)
            h_out = q_out % G
            done = q_out < T * G
            rows = OUT + wide * s_ob + t_out * s_ot + h_out.to(gl.int64) * s_oh
            gl.store(rows[:, None] + d_out[None, :], acc.to(OUT.dtype.element_ty), mask=done[:, None])
            gl.store(LSE + (wide * T + t_out) * G + h_out, lse * 0.6931471805599453, mask=done)
        else:
            part = (p * 2 + (tile > p * share).to(gl.int32)).to(gl.int64) * M + r
            gl.store(PARTS + part[:, None] * D + d_out[None, :], acc)
            gl.store(PART_LSE + part, lse)
        tile += here
