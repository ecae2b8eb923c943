"""Decode: attention of the last one or few tokens of each sequence over its whole paged context.

One launch reads units wherever their addresses point. The query tokens times the heads that share a kv head are the
columns of a tile (`decode_tiles`). `plan` says how the work is cut among programs; a second, small launch merges the
segments that were cut. Both read lengths on the device and allocate nothing that depends on them, so a CUDA graph
captured once serves any lengths up to the table's width.

The method is FlashAttention's online softmax (Dao et al. 2022) split over the keys (Flash-Decoding, Dao et al. 2023).
Not here: queries of different counts a sequence (`prefill`), latent units (`mla`), states of several tiers (`merge`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kvtier.layout import AttentionLayout, DType
from kvtier_kernels import checks, tuning
from kvtier_kernels.addressing import layouts_of, tag_of
from kvtier_kernels.decode_tiles import BACK, fold, load_columns
from kvtier_kernels.merge import merge_states
from kvtier_kernels.plan import lanes, locate, pick, share_of, spans
from kvtier_kernels.tiles import MASKED, entry_index, piece_dim, settle
from kvtier_kernels.widening import INT4

LOG2E = 1.4426950408889634
MOST_ROWS = 64
_RESIDENT = 16
"""Programs of the merge that a multiprocessor holds while it decodes."""
SHARED = ("T", "G", "HK", "D", "C", "U", "BLOCK", "ROWS", "BLOCKS", "BATCH", "PIECES", "KIND")
"""Constants that `combine_kernel` must have as `decode_kernel` had them."""
_PLAIN = ["layer", "layers", "batch", "width", "window", "s_table"]


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=["TABLE", "LENGTHS"])
def decode_kernel(
    Q, TABLE, LENGTHS, SINKS, SLOPES, OUT, LSE, PARTS, PART_LSE, scale, softcap, window, layer, layers, batch, width,
    s_qb, s_qt, s_qh, s_ob, s_ot, s_oh, s_table,
    T: tl.constexpr, G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, W: tl.constexpr, C: tl.constexpr, U: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, BATCH: tl.constexpr, PIECES: tl.constexpr, KIND: tl.constexpr,
    STORED: tl.constexpr, TAG: tl.constexpr, MIXED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, SINK: tl.constexpr, FAST: tl.constexpr, STAGES: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    if CHAIN:
        # Lets the merge be launched now; it waits for this launch's results before it reads them.
        tl.extra.cuda.gdc_launch_dependents()
    p = tl.program_id(0)
    HEADS: tl.constexpr = HK * BLOCKS
    index = tl.arange(0, BATCH)
    lens, firsts, counts = spans(LENGTHS, index, batch, width, T, window, U, BLOCK, WINDOW)
    ends = tl.cumsum(counts, 0)
    total = tl.sum(counts, 0) * HEADS
    share = share_of(counts, total, tl.num_programs(0), batch, HEADS)
    tile = p * share
    stop = tl.minimum(tile + share, total)
    r = tl.arange(0, ROWS)
    c = tl.arange(0, C)
    n0 = tl.arange(0, BLOCK)
    while tile < stop:
        sequence, start = locate(counts, ends, index, tile, HEADS)
        count = pick(counts, index, sequence)
        length = pick(lens, index, sequence)
        segment = (tile - start) // count
        skipped = (tile - start) % count
        here = tl.minimum(count - skipped, stop - tile)
        first = pick(firsts, index, sequence) + skipped
        head = segment // BLOCKS
        query = (segment % BLOCKS) * ROWS + r
        t = query // G
        h = head * G + query % G
        real = query < T * G
        wide = sequence.to(tl.int64)
        rows = Q + wide * s_qb + t.to(tl.int64) * s_qt + h.to(tl.int64) * s_qh
        row = TABLE + wide * s_table
        past = tl.maximum(length - 1, 0)
        entry = tl.load(row + entry_index(first, n0, past, U, BLOCK))
        q0, q1, factor = load_columns(rows, real, D, W, KIND)
        positions = length - T + t
        slopes = tl.zeros([ROWS], tl.float32)
        if ALIBI:
            slopes = tl.load(SLOPES + h, mask=real, other=0.0) * 1.4426950408889634
        acc0 = tl.zeros([C, ROWS], tl.float32)
        acc1, acc2, acc3 = acc0, acc0, acc0
        unit = tl.full([], BACK if KIND == INT4 else 1.0, tl.float32)
        m = tl.full([ROWS], MASKED, tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        end = first + here
        if not (MIXED or WINDOW):
            # Tiles that every query token sees whole need no masks, which cost a third of a tile's instructions.
            whole = tl.minimum(end, tl.maximum(length - T + 1, 0) // BLOCK)
            m, l, acc0, acc1, acc2, acc3, unit = fold(
                q0, q1, factor * scale, positions, slopes, m, l, acc0, acc1, acc2, acc3, unit, row, entry, first, whole,
                length, layer, layers, head, softcap, window, HK, D, W, C, U, BLOCK, PIECES, KIND, STORED, TAG, MIXED, False,
                False, WINDOW, SOFTCAP, ALIBI, FAST, STAGES,
            )  # fmt: skip
            first = tl.maximum(whole, first)
        if first < end:
            entry = tl.load(row + entry_index(first, n0, past, U, BLOCK))
            m, l, acc0, acc1, acc2, acc3, unit = fold(
                q0, q1, factor * scale, positions, slopes, m, l, acc0, acc1, acc2, acc3, unit, row, entry, first, end,
                length, layer, layers, head, softcap, window, HK, D, W, C, U, BLOCK, PIECES, KIND, STORED, TAG, MIXED, True,
                T > 1, WINDOW, SOFTCAP, ALIBI, FAST, STAGES if MIXED or WINDOW else 1,
            )  # fmt: skip
        if here == count:
            sink = tl.zeros([ROWS], tl.float32)
            if SINK:
                sink = tl.load(SINKS + h, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
            norm, lse = settle(m, l, unit, sink, SINK)
            out = OUT + wide * s_ob + t.to(tl.int64) * s_ot + h.to(tl.int64) * s_oh
            store_columns(out, acc0 * norm[None, :], real, 0, D, C, PIECES, KIND)
            if PIECES == 4:
                store_columns(out, acc1 * norm[None, :], real, 1, D, C, PIECES, KIND)
                store_columns(out, acc2 * norm[None, :], real, 2, D, C, PIECES, KIND)
                store_columns(out, acc3 * norm[None, :], real, 3, D, C, PIECES, KIND)
            tl.store(LSE + (wide * T + t) * (HK * G) + h, lse * 0.6931471805599453, mask=real)
        else:
            norm, lse = settle(m, l, unit, l, False)
            slot = (p * 2 + (tile > p * share).to(tl.int32)).to(tl.int64) * ROWS + r
            parts = PARTS + slot[None, :] * (PIECES * C) + c[:, None]
            tl.store(parts, acc0 * norm[None, :])
            if PIECES == 4:
                tl.store(parts + C, acc1 * norm[None, :])
                tl.store(parts + 2 * C, acc2 * norm[None, :])
                tl.store(parts + 3 * C, acc3 * norm[None, :])
            tl.store(PART_LSE + slot, lse)
        tile += here


@triton.jit(do_not_specialize=["batch", "width", "window", "programs"], do_not_specialize_on_alignment=["LENGTHS"])
def combine_kernel(
    LENGTHS, SINKS, OUT, LSE, PARTS, PART_LSE, window, batch, width, programs, s_ob, s_ot, s_oh,
    T: tl.constexpr, G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, C: tl.constexpr, U: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, BATCH: tl.constexpr, PIECES: tl.constexpr, KIND: tl.constexpr,
    WINDOW: tl.constexpr, SINK: tl.constexpr, CHUNK: tl.constexpr, CHAIN: tl.constexpr, ALIKE: tl.constexpr = False,
):  # fmt: skip
    """Merge the parts of each cut segment: programs (p, any) serve the segment that tile p * share cuts, some rows each.

    Of those that cut one segment the first merges it, or if there are many the first FEW merge a share of the columns
    each, CHUNK parts at a time. ALIKE: shares are those of `share_of`, and not plainly even.
    """
    p = tl.program_id(0) + 1
    HEADS: tl.constexpr = HK * BLOCKS
    FEW: tl.constexpr = 4
    index = tl.arange(0, BATCH)
    _lens, _firsts, counts = spans(LENGTHS, index, batch, width, T, window, U, BLOCK, WINDOW)
    ends = tl.cumsum(counts, 0)
    total = tl.sum(counts, 0) * HEADS
    if ALIKE:
        share = share_of(counts, total, programs, batch, HEADS)
    else:
        share = tl.cdiv(total, programs)
    cut = p * share
    if CHAIN:
        # Before any way out: what follows this launch may take its end for the end of the one before.
        tl.extra.cuda.gdc_wait()
    if cut >= total:
        return
    sequence, start = locate(counts, ends, index, cut, HEADS)
    count = pick(counts, index, sequence)
    segment = (cut - start) // count
    begin = start + segment * count
    if cut == begin:
        return
    first = begin // share
    last = (begin + count - 1) // share
    turn = p - first - 1
    many = last - first >= FEW
    if turn >= tl.where(many, FEW, 1):
        return
    wide = sequence.to(tl.int64)
    for row in range(tl.program_id(1), tl.minimum(ROWS, T * G - (segment % BLOCKS) * ROWS), tl.num_programs(1)):
        query = (segment % BLOCKS) * ROWS + row
        t = query // G
        h = (segment // BLOCKS) * G + query % G
        out = OUT + wide * s_ob + t * s_ot + h * s_oh
        lse = LSE + (wide * T + t) * (HK * G) + h
        sink = tl.full([], 0.0, tl.float32)
        if SINK:
            sink = tl.load(SINKS + h).to(tl.float32) * 1.4426950408889634
        if many:
            merge_parts(
                PARTS, PART_LSE, out, lse, sink, first, last, share, begin, row, turn, D, C, ROWS, PIECES, KIND, SINK,
                CHUNK, PIECES * C // FEW,
            )  # fmt: skip
        else:
            merge_parts(
                PARTS, PART_LSE, out, lse, sink, first, last, share, begin, row, 0, D, C, ROWS, PIECES, KIND, SINK,
                FEW, PIECES * C,
            )  # fmt: skip


@triton.jit
def merge_parts(
    parts, part_lse, out, out_lse, sink, first, last, share, begin, row, turn,
    D: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr, KIND: tl.constexpr, SINK: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Columns turn * COLUMNS to (turn + 1) * COLUMNS of one query row, from the parts of programs `first` to `last`."""
    each = tl.arange(0, CHUNK)
    x = turn * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.full([], MASKED, tl.float32)
    l = tl.zeros([], tl.float32)
    acc = tl.zeros([COLUMNS], tl.float32)
    for start in range(first, last + 1, CHUNK):
        owner = start + each
        slot = (owner * 2 + (owner * share < begin).to(tl.int32)).to(tl.int64) * ROWS + row
        lse = tl.load(part_lse + slot, mask=owner <= last, other=float("-inf"))
        part = tl.load(parts + slot[:, None] * (PIECES * C) + x[None, :], mask=(owner <= last)[:, None], other=0.0)
        top = tl.maximum(m, tl.max(lse, 0))
        weight = tl.exp2(lse - top)
        fade = tl.exp2(m - top)
        l = l * fade + tl.sum(weight, 0)
        acc = acc * fade + tl.sum(part * weight[:, None], 0)
        m = top
    norm, lse = settle(m, l, 1.0, sink, SINK)
    column = x % C
    dim = piece_dim(x // C, column, D, KIND, PIECES)
    tl.store(out + dim, (acc * norm).to(out.dtype.element_ty), mask=column < D // PIECES)
    tl.store(out_lse, lse * 0.6931471805599453, mask=turn == 0)


@triton.jit
def store_columns(
    out, acc, real, PIECE: tl.constexpr, D: tl.constexpr, C: tl.constexpr, PIECES: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """One accumulator of a tile, whose columns are rows of the output, to pointers `out`."""
    store_piece(out, tl.trans(acc.to(out.dtype.element_ty)), real, PIECE, D, C, PIECES, KIND)


@triton.jit
def store_piece(
    out, acc, real, PIECE: tl.constexpr, D: tl.constexpr, C: tl.constexpr, PIECES: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """One accumulator of a tile, to the rows at pointers `out`."""
    c = tl.arange(0, C)
    lanes = real[:, None] & (c < D // PIECES)[None, :]
    dim = piece_dim(PIECE, c, D, KIND, PIECES)
    tl.store(out[:, None] + dim[None, :], acc.to(out.dtype.element_ty), mask=lanes)


def decode(
    q: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    layout: AttentionLayout,
    layer: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    precisions: Sequence[DType] | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    check: bool | None = None,
    programs: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each sequence's last tokens over its units, by address.

    q: `[batch, heads, head_dim]` or, with several query tokens, `[batch, tokens, heads, head_dim]`; float16, bfloat16
    or float32, any strides but contiguous rows. table: int64 `[batch, width]`, entries as in `addressing`; those past
    a sequence's length are never read through. lengths: int32 `[batch]`, tokens of context including the query's own
    (already appended); token t of the query stands at position length - tokens + t and sees itself and all before.

    scale: of the logits, head_dim ** -0.5 by default. window: a token sees that many keys, itself included. softcap:
    logits become softcap * tanh(logit / softcap). sinks: float `[heads]`, one more logit a head, with no value.
    slopes: float32 `[heads]`, ALiBi. precisions: the dtypes that units of this table are stored in, told apart by
    their entries' tags; one pass each, of which the states are merged. Default: all units are `layout.dtype`.

    Returns the output, like q, and the natural log-sum-exp of the logits, float32 `[batch, (tokens,) heads]`: for
    `merge_states`. An empty sequence gives zeros and -inf. `out` and `lse` are written in place when given.

    Raises InvalidRequest or LayoutError before anything is launched. What only the device knows (lengths against the
    table's width, entries) is checked when `check`, which waits for the device; by default on the CPU alone. Unchecked,
    a length past the table is cut to it. Waits for nothing else and is safe to capture in a CUDA graph. `programs`
    overrides how many programs share the work.
    """
    squeeze = q.dim() == 3
    q4 = q[:, None] if squeeze else q
    layouts = layouts_of(layout, precisions)
    checks.attention(q4, table, lengths, layouts, layer, sinks, slopes, window, softcap, scale, check)
    table, lengths = checks.with_a_column(table, lengths)
    batch, tokens, heads, dim = q4.shape
    out = checks.output(out, q, q.dtype, "out")
    lse = checks.output(lse, q[..., 0], torch.float32, "lse", contiguous=True)
    if not q.numel():
        return out, lse
    scale = dim**-0.5 if scale is None else scale
    out4 = out[:, None] if squeeze else out
    options = {"scale": scale, "window": window, "softcap": softcap, "slopes": slopes, "programs": programs}
    if len(layouts) == 1:
        _launch(q4, table, lengths, layouts[0], layer, out4, lse, sinks=sinks, mixed=False, **options)
        return out, lse
    outs = torch.empty(len(layouts), *q4.shape, dtype=torch.float32, device=q.device)
    lses = torch.empty(len(layouts), batch, tokens, heads, dtype=torch.float32, device=q.device)
    for i, one in enumerate(layouts):
        _launch(q4, table, lengths, one, layer, outs[i], lses[i], sinks=None, mixed=True, **options)
    merged, merged_lse = merge_states(outs.flatten(1, 2), lses.flatten(1, 2), sinks=sinks, dtype=q.dtype)
    out4.copy_(merged.view(out4.shape))
    lse.copy_(merged_lse.view(lse.shape))
    return out, lse


def _launch(
    q: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    layout: AttentionLayout,
    layer: int,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    mixed: bool,
    programs: int | None,
) -> None:
    batch, tokens, heads, _ = q.shape
    choice = tuning.decode(layout, tokens * (heads // layout.kv_heads), q.device, batch)
    programs = programs or choice.programs
    form = shape(layout, tokens, heads // layout.kv_heads, batch, choice, q.device)
    columns = form["C"] * form["PIECES"]
    parts = torch.empty(programs * 2 * form["ROWS"] * columns, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(programs * 2 * form["ROWS"], dtype=torch.float32, device=q.device)
    width, window_arg = table.shape[1], window or 0
    chain = programs > 1 and tuning.chains(q.device)
    decode_kernel[(programs,)](
        q, table, lengths, sinks, slopes, out, lse, parts, part_lse, scale * LOG2E, softcap or 1.0, window_arg,
        layer, layout.layers, batch, width, *q.stride()[:3], *out.stride()[:3], table.stride(0), **form, MIXED=mixed,
        WINDOW=bool(window), SOFTCAP=bool(softcap), ALIBI=slopes is not None, SINK=sinks is not None,
        STAGES=choice.stages, CHAIN=chain, num_warps=choice.warps,
    )  # fmt: skip
    if programs == 1:
        return
    shared = {name: form[name] for name in SHARED}
    combine_kernel[merge_grid(programs, min(form["ROWS"], tokens * form["G"]), choice.sms)](
        lengths, sinks, out, lse, parts, part_lse, window_arg, batch, width, programs, *out.stride()[:3], **shared,
        WINDOW=bool(window), SINK=sinks is not None, CHUNK=32, CHAIN=chain, ALIKE=True,
        num_warps=1, launch_pdl=chain,
    )  # fmt: skip


def merge_grid(programs: int, rows: int, sms: int) -> tuple[int, int]:
    """Of `combine_kernel` for `rows` query rows: a program a cut and row, but no more than find room beside the launch
    that they wait for. Those that come late cost more than rows that are merged one after another."""
    return programs - 1, max(1, min(rows, _RESIDENT * sms // (programs - 1)))


def shape(
    layout: AttentionLayout, tokens: int, group: int, batch: int, choice: tuning.Choice, device: tuning.Device
) -> dict[str, Any]:
    """The constants that a variant of the kernel is compiled for."""
    stored = tuning.stored(layout.dtype, device)
    pieces = stored.pieces(words=True)
    # Codes of V in words must not meet the products of warpgroups, which a wide head dim and many columns would call.
    most = 16 if pieces == 4 and layout.head_dim > 128 else MOST_ROWS
    rows = min(max(8, triton.next_power_of_2(tokens * group)), most)
    return {
        "T": tokens,
        "G": group,
        "HK": layout.kv_heads,
        "D": layout.head_dim,
        "W": tuning.padded(layout.head_dim // (2 if layout.dtype == "int4" else 1)),
        "C": tuning.padded(layout.head_dim // pieces),
        "PIECES": pieces,
        "U": layout.unit_tokens,
        "BLOCK": choice.block,
        "ROWS": rows,
        "BLOCKS": triton.cdiv(tokens * group, rows),
        "BATCH": lanes(batch),
        "KIND": stored.kind,
        "STORED": stored.element,
        "TAG": tag_of(layout.dtype),
        "FAST": stored.fast,
    }
