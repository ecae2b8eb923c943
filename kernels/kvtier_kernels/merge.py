"""Merging attention states: outputs over disjoint sets of keys, weighted by what their log-sum-exps say.

What makes attention over several tiers, precisions or devices exact: each part attends to its own keys, and the merge
is the softmax over all of them. Merging is associative, and a part that saw nothing (0, -inf) changes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvtier.errors import InvalidRequest
from kvtier_kernels import checks
from kvtier_kernels.tiles import MASKED, settle


@triton.jit(do_not_specialize=["parts", "rows"])
def merge_kernel(
    PARTS, LSES, SINKS, OUT, LSE, parts, rows, s_pp, s_pr, s_ph, H: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    SINK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    d = tl.arange(0, W)
    m = tl.full([], MASKED, tl.float32)
    l = tl.zeros([], tl.float32)
    acc = tl.zeros([W], tl.float32)
    for part in range(parts):
        lse = tl.load(LSES + (part * rows + row) * H + h) * 1.4426950408889634
        # A part that saw nothing may hold anything, NaN too: none of it is read.
        dims = tl.where(lse > MASKED, D, 0)
        x = tl.load(PARTS + part * s_pp + row * s_pr + h * s_ph + d, mask=d < dims, other=0.0).to(tl.float32)
        top = tl.maximum(m, lse)
        weight = tl.exp2(lse - top)
        fade = tl.exp2(m - top)
        l = l * fade + weight
        acc = acc * fade + x * weight
        m = top
    sink = tl.full([], 0.0, tl.float32)
    if SINK:
        sink = tl.load(SINKS + h).to(tl.float32) * 1.4426950408889634
    norm, total = settle(m, l, 1.0, sink, SINK)
    tl.store(OUT + (row * H + h) * D + d, (acc * norm).to(OUT.dtype.element_ty), mask=d < D)
    tl.store(LSE + row * H + h, total * 0.6931471805599453)


def merge_states(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One state of several.

    outs: `[parts, rows, heads, head_dim]`, any floating dtype, contiguous rows. lses: natural log-sum-exps, float32
    `[parts, rows, heads]`, -inf for a part that saw no key, whose output is then not read. sinks: float `[heads]`,
    one more logit a head: give it here, once, and not to the launches that made the parts.

    Returns the output `[rows, heads, head_dim]` in `dtype` (default: that of outs) and its LSE. Raises InvalidRequest
    for shapes that do not match.
    """
    if outs.dim() != 4 or lses.shape != outs.shape[:3]:
        raise InvalidRequest(f"outs {tuple(outs.shape)} and lses {tuple(lses.shape)}: want [p, r, h, d] and [p, r, h]")
    if lses.dtype != torch.float32 or not lses.is_contiguous():
        raise InvalidRequest(f"lses are {lses.dtype}, strides {lses.stride()}: want contiguous float32")
    if not outs.dtype.is_floating_point or (outs.shape[3] > 1 and outs.stride(3) != 1):
        raise InvalidRequest(f"outs are {outs.dtype}, strides {outs.stride()}: want floats with contiguous rows")
    checks.same_device(outs, lses=lses, sinks=sinks)
    parts, rows, heads, dim = outs.shape
    checks.per_head(sinks, heads, "sinks")
    out = torch.empty(rows, heads, dim, dtype=dtype or outs.dtype, device=outs.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=outs.device)
    if out.numel():
        merge_kernel[(rows, heads)](
            outs, lses, sinks, out, lse, parts, rows, *outs.stride()[:3], H=heads, D=dim,
            W=triton.next_power_of_2(dim), SINK=sinks is not None, num_warps=1,
        )  # fmt: skip
    return out, lse
