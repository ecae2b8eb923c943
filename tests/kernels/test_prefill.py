"""`prefill` against its reference: ragged batches, the causal edge, and the options it shares with decode."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import DEVICE, close, paged, poisoned, tolerance

from kvtier.errors import InvalidRequest
from kvtier.layout import AttentionLayout
from kvtier_kernels import reference
from kvtier_kernels.decode import decode
from kvtier_kernels.prefill import prefill


def offsets(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=DEVICE)


def agree(
    cache: Any, counts: list[int], heads: int, dtype: torch.dtype, atol: float | None = None, **options: Any
) -> None:
    layout = cache.layouts[0]
    q = torch.randn(sum(counts), heads + 1, layout.head_dim, device=DEVICE).to(dtype)[:, :heads]
    out, lse = poisoned(q.shape, dtype), poisoned(q.shape[:2], torch.float32)
    call = (q, offsets(counts), cache.table, cache.lengths)
    precisions = tuple(one.dtype for one in cache.layouts)
    prefill(*call, layout, 1, most_queries=max(counts) + 1, out=out, lse=lse, precisions=precisions, **options)
    options.setdefault("scale", layout.head_dim**-0.5)
    want, want_lse = reference.prefill(*call, cache.layouts, 1, **options)
    close(out, want, atol or tolerance(dtype))
    close(lse, want_lse, atol or tolerance(dtype))


sequences = st.tuples(st.sampled_from([0, 1, 5, 16, 17, 40]), st.sampled_from([0, 1, 15, 16, 33, 64, 70]))


@settings(max_examples=20, deadline=None)
@given(
    batch=st.lists(sequences, min_size=1, max_size=3),
    dim=st.sampled_from([64, 80, 96, 128, 256]),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (2, 2)]),
    unit=st.sampled_from([16, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_drawn_shapes(batch: list[tuple[int, int]], dim: int, heads: tuple[int, int], unit: int, dtype: Any) -> None:
    counts, lengths = [n for n, _ in batch], [n + context for n, context in batch]
    name = str(dtype).removeprefix("torch.")
    layout = AttentionLayout(layers=2, kv_heads=heads[1], head_dim=dim, dtype=name, unit_tokens=unit)
    agree(paged(layout, lengths), counts, heads[0], dtype)


@settings(max_examples=10, deadline=None)
@given(
    precision=st.sampled_from(["bfloat16", "float8_e4m3fn", "int8", "int4"]),
    dim=st.sampled_from([64, 80]),
    unit=st.sampled_from([16, 64]),
)
def test_stored_precisions(precision: Any, dim: int, unit: int) -> None:
    layout = AttentionLayout(layers=2, kv_heads=2, head_dim=dim, dtype=precision, unit_tokens=unit)
    agree(paged(layout, [33, 5, 70]), [20, 5, 1], 4, torch.bfloat16)


@pytest.mark.parametrize("unit", [16, 64])
def test_units_of_different_precision_in_one_table(unit: int) -> None:
    layout = AttentionLayout(layers=2, kv_heads=1, head_dim=64, dtype="bfloat16", unit_tokens=unit)
    cache = paged(layout, [3 * unit + 5, 2], precisions=("bfloat16", "float8_e4m3fn", "int4"))
    agree(cache, [20, 2], 2, torch.bfloat16, sinks=torch.randn(2, device=DEVICE))


@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 20},
        {"softcap": 5.0},
        {"sinks": True},
        {"slopes": True},
        {"window": 17, "softcap": 3.0, "sinks": True, "slopes": True, "scale": 0.3},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    options = {k: torch.rand(6, device=DEVICE) if v is True else v for k, v in options.items()}
    layout = AttentionLayout(layers=2, kv_heads=2, head_dim=64, dtype="float32")
    agree(paged(layout, [70, 9]), [30, 9], 6, torch.float32, **options)


def test_rows_over_a_table_without_columns_are_zeros() -> None:
    """What their lengths say is cut to the table."""
    layout = AttentionLayout(layers=1, kv_heads=2, head_dim=64, dtype="float32")
    table, lengths = (
        torch.zeros(2, 0, dtype=torch.int64, device=DEVICE),
        torch.full((2,), 3, dtype=torch.int32, device=DEVICE),
    )
    q = torch.randn(5, 4, 64, device=DEVICE)
    out, lse = poisoned(q.shape, q.dtype), poisoned(q.shape[:2], torch.float32)
    prefill(q, offsets([2, 3]), table, lengths, layout, 0, most_queries=3, out=out, lse=lse, check=False)
    assert out.eq(0).all() and lse.eq(float("-inf")).all()


def test_one_query_a_sequence_is_decode() -> None:
    layout = AttentionLayout(layers=1, kv_heads=2, head_dim=64, dtype="float32")
    cache = paged(layout, [33, 1, 64])
    q = torch.randn(3, 4, 64, device=DEVICE)
    got = prefill(q, offsets([1, 1, 1]), cache.table, cache.lengths, layout, 0, most_queries=1)
    want = decode(q, cache.table, cache.lengths, layout, 0)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("counts", "lengths", "most", "message"),
    [
        ([3], [33], 3, "33, its 2 units hold 32"),
        ([5], [4], 5, "5 rows and a context"),
        ([5], [32], 4, "most_queries is 4"),
    ],
)
def test_what_would_be_wrong_is_refused(counts: list[int], lengths: list[int], most: int, message: str) -> None:
    layout = AttentionLayout(layers=1, kv_heads=1, head_dim=64, dtype="float32")
    cache = paged(layout, [32], spare=0)
    cache.lengths.copy_(torch.tensor(lengths))
    q = torch.zeros(sum(counts), 1, 64, device=DEVICE)
    out = poisoned(q.shape, torch.float32)
    with pytest.raises(InvalidRequest, match=message):
        prefill(q, offsets(counts), cache.table, cache.lengths, layout, 0, most_queries=most, out=out, check=True)
    assert out.isnan().all()
