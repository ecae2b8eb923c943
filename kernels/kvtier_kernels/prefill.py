"""Prefill: attention of chunks of queries, of any count a sequence, over each sequence's paged context.

A batch is ragged: sequence b owns query rows cu_q[b] to cu_q[b + 1], and they are the *last* tokens of its context, so
a chunk sees all that came before it and, causally, itself. A sequence with one query is a decode row; a few of them in
a batch of chunks cost little here, a batch of them belongs in `decode`.

A program takes a block of query tokens times the heads that share a kv head. It walks the tiles that every row of the
block sees without masks, then the ones that the causal edge or the length cuts. Blocks that see most start first. On
Hopper, float units without options are left to `prefill_hopper`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kvtier.errors import InvalidRequest
from kvtier.layout import AttentionLayout, DType
from kvtier_kernels import checks, tuning
from kvtier_kernels.addressing import TORCH_DTYPES, layouts_of, tag_of
from kvtier_kernels.decode import LOG2E, store_piece
from kvtier_kernels.merge import merge_states
from kvtier_kernels.tiles import MASKED, attend, attend_whole, load_queries, settle
from kvtier_kernels.widening import FLOAT

if tuning.GLUON:
    from kvtier_kernels import prefill_hopper


@triton.jit(
    do_not_specialize=["layer", "layers", "width", "window", "s_table"],
    do_not_specialize_on_alignment=["CU", "TABLE", "LENGTHS"],
)
def prefill_kernel(
    Q, CU, TABLE, LENGTHS, SINKS, SLOPES, OUT, LSE, scale, softcap, window, layer, layers, width,
    s_qt, s_qh, s_ot, s_oh, s_table,
    G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, W: tl.constexpr, C: tl.constexpr, U: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr, KIND: tl.constexpr, STORED: tl.constexpr, TAG: tl.constexpr,
    MIXED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINK: tl.constexpr,
    FAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = ROWS // G
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    begin = tl.load(CU + sequence)
    queries = tl.load(CU + sequence + 1) - begin
    if block * TOKENS >= queries:
        return
    length = tl.maximum(tl.minimum(tl.load(LENGTHS + sequence), width * U), 0)
    context = length - queries
    r = tl.arange(0, ROWS)
    t = block * TOKENS + r // G
    h = head * G + r % G
    real = (t < queries) & (r < TOKENS * G)
    at = (begin + t).to(tl.int64)
    q0, q1, factor = load_queries(Q + at * s_qt + h * s_qh, real, 1, D, W, KIND)
    slopes = tl.zeros([ROWS], tl.float32)
    if ALIBI:
        slopes = tl.load(SLOPES + h, mask=real, other=0.0) * 1.4426950408889634
    positions = context + t
    row = TABLE + sequence * s_table
    m = tl.full([ROWS], MASKED, tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc0 = tl.zeros([ROWS, C], tl.float32)
    acc1, unit = acc0, tl.full([], 1.0, tl.float32)
    first = 0
    whole = tl.maximum(context + block * TOKENS + 1, 0) // BLOCK  # tiles that the block's first token sees all of
    last = tl.cdiv(tl.maximum(tl.minimum(length, context + (block + 1) * TOKENS), 0), BLOCK)
    if WINDOW:
        first = tl.maximum(context + block * TOKENS - window + 1, 0) // BLOCK
    elif not MIXED:
        if KIND == FLOAT and not SOFTCAP and not ALIBI:
            m, l, acc0 = attend_whole(
                q0,
                factor * scale,
                m,
                l,
                acc0,
                row,
                first,
                whole,
                length,
                layer,
                head,
                HK,
                D,
                W,
                U,
                BLOCK,
                STORED,
                STAGES,
            )
        else:
            m, l, acc0, acc1, unit = attend(
                q0, q1, factor * scale, positions, slopes, m, l, acc0, acc1, unit, row, first, whole,
                length, layer, layers, head, softcap, window, HK, D, W, C, U, BLOCK, PIECES, KIND, STORED, TAG, MIXED,
                False, False, WINDOW, SOFTCAP, ALIBI, FAST, STAGES,
            )  # fmt: skip
        first = whole
    m, l, acc0, acc1, unit = attend(
        q0, q1, factor * scale, positions, slopes, m, l, acc0, acc1, unit, row, first, last, length,
        layer, layers, head, softcap, window, HK, D, W, C, U, BLOCK, PIECES, KIND, STORED, TAG, MIXED, True, True,
        WINDOW, SOFTCAP, ALIBI, FAST, STAGES,
    )  # fmt: skip
    sink = tl.zeros([ROWS], tl.float32)
    if SINK:
        sink = tl.load(SINKS + h, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
    norm, lse = settle(m, l, unit, sink, SINK)
    out = OUT + at * s_ot + h * s_oh
    store_piece(out, acc0 * norm[:, None], real, 0, D, C, PIECES, KIND)
    if PIECES == 2:
        store_piece(out, acc1 * norm[:, None], real, 1, D, C, PIECES, KIND)
    tl.store(LSE + at * (HK * G) + h, lse * 0.6931471805599453, mask=real)


def prefill(
    q: torch.Tensor,
    cu_q: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    layout: AttentionLayout,
    layer: int,
    *,
    most_queries: int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    precisions: Sequence[DType] | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    check: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a ragged batch of query chunks over their sequences' units, by address.

    q: `[queries, heads, head_dim]`, any strides but contiguous rows. cu_q: int32 `[batch + 1]`, where each sequence's
    rows start, ascending from 0 to `queries`. most_queries: at least the largest count of one sequence; a launch is
    sized by it, and rows past it would not be computed. lengths: int32 `[batch]`, context with the queries included.
    All else, and the result, as in `decode`; the log-sum-exp is float32 `[queries, heads]`.

    Raises as `decode` does; `check` looks at cu_q as well.
    """
    layouts = layouts_of(layout, precisions)
    if q.dim() != 3:
        raise InvalidRequest(f"q has shape {tuple(q.shape)}: want [queries, heads, head_dim]")
    checks.queries(q, layout, layouts, layer, sinks, slopes, window, softcap, scale)
    checks.table(table, lengths, table.shape[0], layout.unit_tokens)
    checks.same_device(q, cu_q=cu_q, table=table, lengths=lengths, sinks=sinks, slopes=slopes)
    checks.ragged(cu_q, len(lengths), len(q), most_queries, lengths, checks.bounds(table, lengths, layouts, check))
    table, lengths = checks.with_a_column(table, lengths)
    out = checks.output(out, q, q.dtype, "out")
    lse = checks.output(lse, q[..., 0], torch.float32, "lse", contiguous=True)
    if not q.numel() or most_queries == 0:
        return out, lse
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "slopes": slopes}
    batch = (cu_q, table, lengths)
    if len(layouts) == 1:
        _launch(q, *batch, layouts[0], layer, most_queries, out, lse, sinks=sinks, mixed=False, **options)
        return out, lse
    outs = torch.empty(len(layouts), *q.shape, dtype=torch.float32, device=q.device)
    lses = torch.empty(len(layouts), *q.shape[:2], dtype=torch.float32, device=q.device)
    for i, one in enumerate(layouts):
        _launch(q, *batch, one, layer, most_queries, outs[i], lses[i], sinks=None, mixed=True, **options)
    merged, merged_lse = merge_states(outs, lses, sinks=sinks, dtype=q.dtype)
    out.copy_(merged)
    lse.copy_(merged_lse)
    return out, lse


def _launch(
    q: torch.Tensor,
    cu_q: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    layout: AttentionLayout,
    layer: int,
    most_queries: int,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    mixed: bool,
) -> None:
    group = q.shape[1] // layout.kv_heads
    plain = not mixed and window is None and softcap is None and slopes is None and sinks is None
    plain = plain and q.dtype == TORCH_DTYPES[layout.dtype]
    choice = tuning.prefill(layout, group, q.device, plain=plain)
    form = shape(layout, group, choice, q.device)
    grid = (triton.cdiv(most_queries, form["ROWS"] // group), layout.kv_heads, len(lengths))
    if choice.gluon:
        prefill_hopper.prefill_kernel[grid](
            q, cu_q, table, lengths, out, lse, scale * LOG2E, layer, table.shape[1], *q.stride()[:2], *out.stride()[:2],
            table.stride(0), **{name: form[name] for name in prefill_hopper.FORM}, STAGES=choice.stages,
            num_warps=choice.warps,
        )  # fmt: skip
        return
    prefill_kernel[grid](
        q, cu_q, table, lengths, sinks, slopes, out, lse, scale * LOG2E, softcap or 1.0, window or 0, layer,
        layout.layers, table.shape[1], *q.stride()[:2], *out.stride()[:2], table.stride(0), **form, MIXED=mixed,
        WINDOW=bool(window), SOFTCAP=bool(softcap), ALIBI=slopes is not None, SINK=sinks is not None,
        STAGES=choice.stages, num_warps=choice.warps,
    )  # fmt: skip


def shape(layout: AttentionLayout, group: int, choice: tuning.Choice, device: tuning.Device) -> dict[str, Any]:
    """The constants that a variant of the kernel is compiled for."""
    stored = tuning.stored(layout.dtype, device)
    pieces = stored.pieces(words=False)
    return {
        "G": group,
        "HK": layout.kv_heads,
        "D": layout.head_dim,
        "W": tuning.padded(layout.head_dim // (2 if layout.dtype == "int4" else 1)),
        "C": tuning.padded(layout.head_dim // pieces),
        "PIECES": pieces,
        "U": layout.unit_tokens,
        "BLOCK": choice.block,
        "ROWS": choice.rows,
        "KIND": stored.kind,
        "STORED": stored.element,
        "TAG": tag_of(layout.dtype),
        "FAST": stored.fast,
    }
