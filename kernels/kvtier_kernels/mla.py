"""Multi-head latent attention (DeepSeek-V2 and V3), decode: queries absorbed into the latent space, over latent units.

Keys are a token's latent and rope together, values its latent, so a tile is loaded once for both products. All heads
share it: rows of a tile are query tokens times heads. The work is cut as in `decode`, and merged by its kernel.

Prefill takes the ordinary way instead: `mla_prefill`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvtier.errors import InvalidRequest, LayoutError
from kvtier.layout import LatentLayout
from kvtier_kernels import checks, tuning
from kvtier_kernels.addressing import TORCH_DTYPES
from kvtier_kernels.decode import LOG2E, combine_kernel, merge_grid
from kvtier_kernels.plan import lanes, locate, pick, spans
from kvtier_kernels.tiles import ADDRESS_BITS, MASKED, entry_index, settle
from kvtier_kernels.widening import FLOAT

if tuning.GLUON:
    from kvtier_kernels import mla_hopper


@triton.jit
def fold(
    ql, qr, scale, positions, m, l, acc, row, first, last, length, layer,
    D: tl.constexpr, R: tl.constexpr, U: tl.constexpr, BLOCK: tl.constexpr, STORED: tl.constexpr, EDGE: tl.constexpr,
    CAUSAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fold tiles `first` to `last` of a sequence into the state (m, l, acc), as `tiles.attend` does."""
    SPAN: tl.constexpr = U % BLOCK != 0
    d = tl.arange(0, D)
    e = tl.arange(0, R)
    n0 = tl.arange(0, BLOCK)
    end = tl.maximum(length - 1, 0)
    at = layer.to(tl.int64) * (U * (D + R) * (STORED.primitive_bitwidth // 8))
    entry = tl.load(row + entry_index(first, n0, end, U, BLOCK))
    for j in tl.range(first, last, num_stages=STAGES):
        n = j * BLOCK + n0
        alive = n < length
        base = tl.multiple_of(((entry & ADDRESS_BITS) + at).to(tl.pointer_type(STORED)), 16)
        if SPAN:
            token = n % U
        else:
            token = (j * BLOCK) % U + n0
        rows = base + token * (D + R)
        if EDGE:
            kl = tl.load(rows[:, None] + d[None, :], mask=alive[:, None], other=0.0).to(ql.dtype)
            kr = tl.load(rows[:, None] + (D + e)[None, :], mask=alive[:, None], other=0.0).to(ql.dtype)
        else:
            kl = tl.load(rows[:, None] + d[None, :]).to(ql.dtype)
            kr = tl.load(rows[:, None] + (D + e)[None, :]).to(ql.dtype)
        s = tl.dot(ql, tl.trans(kl), input_precision="ieee")
        s = tl.dot(qr, tl.trans(kr), s, input_precision="ieee") * scale
        if EDGE:
            s = tl.where(alive[None, :], s, MASKED)
        if CAUSAL:
            s = tl.where(n[None, :] <= positions[:, None], s, MASKED)
        top = tl.maximum(m, tl.max(s, 1))
        weights = tl.exp2(s - top[:, None])
        fade = tl.exp2(m - top)
        l = l * fade + tl.sum(weights, 1)
        m = top
        acc = tl.dot(weights.to(ql.dtype), kl, acc * fade[:, None], input_precision="ieee")
        entry = tl.load(row + entry_index(j + 1, n0, end, U, BLOCK))
    return m, l, acc


@triton.jit(
    do_not_specialize=["layer", "batch", "width", "s_table"], do_not_specialize_on_alignment=["TABLE", "LENGTHS"]
)
def mla_kernel(
    QL, QR, TABLE, LENGTHS, OUT, LSE, PARTS, PART_LSE, scale, layer, batch, width,
    s_lb, s_lt, s_lh, s_rb, s_rt, s_rh, s_ob, s_ot, s_oh, s_table,
    T: tl.constexpr, G: tl.constexpr, D: tl.constexpr, R: tl.constexpr, U: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BATCH: tl.constexpr, STORED: tl.constexpr, STAGES: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    if CHAIN:
        tl.extra.cuda.gdc_launch_dependents()
    p = tl.program_id(0)
    index = tl.arange(0, BATCH)
    lens, _firsts, counts = spans(LENGTHS, index, batch, width, T, 0, U, BLOCK, False)
    ends = tl.cumsum(counts, 0)
    total = tl.sum(counts, 0) * BLOCKS
    share = tl.cdiv(total, tl.num_programs(0))
    tile = p * share
    stop = tl.minimum(tile + share, total)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    e = tl.arange(0, R)
    while tile < stop:
        sequence, start = locate(counts, ends, index, tile, BLOCKS)
        count = pick(counts, index, sequence)
        length = pick(lens, index, sequence)
        block = (tile - start) // count
        first = (tile - start) % count
        here = tl.minimum(count - first, stop - tile)
        query = block * ROWS + r
        t = query // G
        h = query % G
        real = query < T * G
        wide = sequence.to(tl.int64)
        latent_rows = QL + wide * s_lb + t.to(tl.int64) * s_lt + h.to(tl.int64) * s_lh
        rope_rows = QR + wide * s_rb + t.to(tl.int64) * s_rt + h.to(tl.int64) * s_rh
        ql = tl.load(latent_rows[:, None] + d[None, :], mask=real[:, None], other=0.0)
        qr = tl.load(rope_rows[:, None] + e[None, :], mask=real[:, None], other=0.0)
        positions = length - T + t
        m = tl.full([ROWS], MASKED, tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D], tl.float32)
        row = TABLE + wide * s_table
        end = first + here
        if ROWS <= 32:
            # As in decode: tiles that every query token sees whole are read without masks. With more rows a second
            # loop costs more in registers than the masks do.
            whole = tl.minimum(end, tl.maximum(length - T + 1, 0) // BLOCK)
            m, l, acc = fold(
                ql, qr, scale, positions, m, l, acc, row, first, whole, length, layer, D, R, U, BLOCK, STORED, False,
                False, STAGES,
            )  # fmt: skip
            first = tl.maximum(whole, first)
        if first < end:
            m, l, acc = fold(
                ql, qr, scale, positions, m, l, acc, row, first, end, length, layer, D, R, U, BLOCK, STORED, True,
                T > 1, 1 if ROWS <= 32 else STAGES,
            )  # fmt: skip
        norm, lse = settle(m, l, 1.0, l, False)
        acc *= norm[:, None]
        if here == count:
            out = OUT + wide * s_ob + t.to(tl.int64) * s_ot + h.to(tl.int64) * s_oh
            tl.store(out[:, None] + d[None, :], acc.to(OUT.dtype.element_ty), mask=real[:, None])
            tl.store(LSE + (wide * T + t) * G + h, lse * 0.6931471805599453, mask=real)
        else:
            slot = (p * 2 + (tile > p * share).to(tl.int32)).to(tl.int64) * ROWS + r
            tl.store(PARTS + slot[:, None] * D + d[None, :], acc)
            tl.store(PART_LSE + slot, lse)
        tile += here


def mla(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    layout: LatentLayout,
    layer: int,
    *,
    scale: float,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    check: bool | None = None,
    programs: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent attention of each sequence's last tokens over its latent units, by address.

    q_latent: `[batch, (tokens,) heads, latent]`, queries times the absorbed key projection; q_rope: `[..., rope]`,
    turned. scale: of the logits; it belongs to the head dim before absorption, so there is no default. Returns the
    output in latent space, like q_latent (the absorbed value projection is still to come), and the natural
    log-sum-exp. All else as in `decode`.
    """
    squeeze = q_latent.dim() == 3
    ql, qr = (q_latent[:, None], q_rope[:, None]) if squeeze else (q_latent, q_rope)
    if ql.dim() != 4 or qr.shape != (*ql.shape[:3], layout.rope) or ql.shape[3] != layout.latent:
        raise InvalidRequest(
            f"q_latent {tuple(q_latent.shape)} and q_rope {tuple(q_rope.shape)}: "
            f"want [batch, (tokens,) heads, {layout.latent}] and [..., {layout.rope}]"
        )
    if layout.latent & (layout.latent - 1) or layout.rope & (layout.rope - 1) or min(layout.latent, layout.rope) < 16:
        raise LayoutError(f"latent {layout.latent}, rope {layout.rope}: the kernel takes powers of two from 16")
    checks.rows(ql, "q_latent")
    checks.rows(qr, "q_rope")
    if ql.dtype != qr.dtype or (ql.dtype != torch.float32 and layout.dtype == "float32"):
        raise InvalidRequest(f"q_latent is {ql.dtype}, q_rope {qr.dtype}, units {layout.dtype}: want one dtype")
    checks.within(layer, layout)
    checks.table(table, lengths, len(ql), layout.unit_tokens)
    checks.same_device(ql, q_rope=qr, table=table, lengths=lengths)
    checks.bounds(table, lengths, (layout,), check)
    table, lengths = checks.with_a_column(table, lengths)
    out = checks.output(out, q_latent, q_latent.dtype, "out")
    lse = checks.output(lse, q_latent[..., 0], torch.float32, "lse", contiguous=True)
    if not ql.numel():
        return out, lse
    out4 = out[:, None] if squeeze else out
    batch, tokens, heads, latent = ql.shape
    choice = tuning.mla(layout, tokens * heads, ql.device)
    hopper = bool(choice.gluon) and ql.dtype == TORCH_DTYPES[layout.dtype] and tuning.warpgroups(layout, ql.device)
    if hopper:
        choice = choice._replace(block=mla_hopper.BLOCK, rows=mla_hopper.ROWS, warps=mla_hopper.WARPS)
    programs = programs or choice.programs
    form = shape(layout, tokens, heads, batch, choice)
    parts = torch.empty(programs * 2 * form["ROWS"] * latent, dtype=torch.float32, device=ql.device)
    part_lse = torch.empty(programs * 2 * form["ROWS"], dtype=torch.float32, device=ql.device)
    width = table.shape[1]
    chain = programs > 1 and tuning.chains(ql.device)
    kernel, constants = (
        (mla_hopper.mla_kernel, {name: form[name] for name in mla_hopper.FORM})
        if hopper
        else (mla_kernel, form | {"STAGES": choice.stages})
    )
    kernel[(programs,)](
        ql, qr, table, lengths, out4, lse, parts, part_lse, scale * LOG2E, layer, batch, width, *ql.stride()[:3],
        *qr.stride()[:3], *out4.stride()[:3], table.stride(0), **constants, CHAIN=chain, num_warps=choice.warps,
    )  # fmt: skip
    if programs > 1:
        shared = {name: form[name] for name in ("T", "G", "D", "U", "BLOCK", "ROWS", "BLOCKS", "BATCH")}
        combine_kernel[merge_grid(programs, min(form["ROWS"], tokens * heads), choice.sms)](
            lengths, None, out4, lse, parts, part_lse, 0, batch, width, programs, *out4.stride()[:3], **shared, HK=1,
            C=latent, PIECES=1, KIND=FLOAT.value, WINDOW=False, SINK=False, CHUNK=32, CHAIN=chain,
            num_warps=4, launch_pdl=chain,
        )  # fmt: skip
    return out, lse


def shape(layout: LatentLayout, tokens: int, heads: int, batch: int, choice: tuning.Choice) -> dict[str, Any]:
    """The constants that a variant of the kernel is compiled for."""
    return {
        "T": tokens,
        "G": heads,
        "D": layout.latent,
        "R": layout.rope,
        "U": layout.unit_tokens,
        "BLOCK": choice.block,
        "ROWS": choice.rows,
        "BLOCKS": triton.cdiv(tokens * heads, choice.rows),
        "BATCH": lanes(batch),
        "STORED": tuning.FLOATS[layout.dtype],
    }
