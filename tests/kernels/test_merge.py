"""`merge_states`: the softmax over all parts' keys, whatever a part that saw nothing holds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import DEVICE, close, paged

from kvtier.errors import InvalidRequest
from kvtier.layout import AttentionLayout
from kvtier_kernels import reference
from kvtier_kernels.decode import decode
from kvtier_kernels.merge import merge_states


@settings(max_examples=10, deadline=None)
@given(parts=st.integers(1, 4), rows=st.integers(1, 3), heads=st.integers(1, 3), dim=st.sampled_from([64, 80]))
def test_drawn_shapes(parts: int, rows: int, heads: int, dim: int) -> None:
    outs = torch.randn(parts, rows, heads, dim, device=DEVICE)
    lses = torch.randn(parts, rows, heads, device=DEVICE) * 20
    sinks = torch.randn(heads, device=DEVICE)
    lses[0, 0] = -math.inf
    outs[0, 0] = math.nan
    for given_sinks in (None, sinks):
        out, lse = merge_states(outs, lses, sinks=given_sinks)
        want, want_lse = reference.merge_states(outs, lses, given_sinks)
        close(out, want, 1e-5)
        close(lse, want_lse, 1e-5)


def test_nothing_merged_with_nothing_is_nothing() -> None:
    outs = torch.full((2, 1, 1, 64), math.nan, device=DEVICE)
    out, lse = merge_states(outs, torch.full((2, 1, 1), -math.inf, device=DEVICE))
    assert out.eq(0).all() and lse.eq(-math.inf).all()


def test_attention_over_two_tiers_is_attention_over_both() -> None:
    layout = AttentionLayout(layers=1, kv_heads=1, head_dim=64, dtype="float32")
    cache = paged(layout, [64])
    q, sinks = torch.randn(1, 2, 64, device=DEVICE), torch.randn(2, device=DEVICE)
    want, want_lse = decode(q, cache.table, cache.lengths, layout, 0, sinks=sinks)
    half = torch.full_like(cache.lengths, 32)
    parts = [decode(q, cache.table[:, part], half, layout, 0) for part in (slice(0, 2), slice(2, 4))]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    out, lse = merge_states(outs, lses, sinks=sinks)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


def test_shapes_that_do_not_match_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        merge_states(torch.zeros(2, 1, 1, 64), torch.zeros(2, 1, 2))
    with pytest.raises(InvalidRequest):
        merge_states(torch.zeros(2, 1, 1, 64), torch.zeros(2, 1, 1, dtype=torch.float64))
