"""`decode` against its reference: drawn shapes, and the cases from the field that its promises come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import DEVICE, close, paged, poisoned, tolerance

from kvtier.errors import InvalidRequest, LayoutError
from kvtier.layout import AttentionLayout
from kvtier_kernels import reference
from kvtier_kernels.addressing import write_bytes
from kvtier_kernels.decode import decode

PRECISIONS = ("bfloat16", "float16", "float8_e4m3fn", "int8", "int4")


def queries(batch: int, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Not contiguous, as a slice of a fused QKV projection is not."""
    return torch.randn(batch, tokens, heads + 3, dim, device=DEVICE).to(dtype)[:, :, 1 : heads + 1]


def agree(cache: Any, q: torch.Tensor, layer: int, atol: float | None = None, **options: Any) -> None:
    out, lse = poisoned(q.shape, q.dtype), poisoned(q.shape[:-1], torch.float32)
    programs = options.pop("programs", None)
    precisions = tuple(one.dtype for one in cache.layouts)
    decode(
        q, cache.table, cache.lengths, cache.layouts[0], layer, out=out, lse=lse, programs=programs,
        precisions=precisions, **options,
    )  # fmt: skip
    options.setdefault("scale", q.shape[-1] ** -0.5)
    want, want_lse = reference.decode(q, cache.table, cache.lengths, cache.layouts, layer, **options)
    close(out, want, atol or tolerance(q.dtype))
    close(lse, want_lse, atol or tolerance(q.dtype))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100]), min_size=1, max_size=3),
    dim=st.sampled_from([64, 80, 96, 128, 256]),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (2, 2), (6, 2)]),
    tokens=st.integers(1, 3),
    unit=st.sampled_from([16, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    programs=st.sampled_from([1, 2, 3, 7, 20]),
    seed=st.integers(0, 99),
)
def test_drawn_shapes(
    lengths: list[int], dim: int, heads: tuple[int, int], tokens: int, unit: int, dtype: Any, programs: int, seed: int
) -> None:
    layout = AttentionLayout(
        layers=2, kv_heads=heads[1], head_dim=dim, dtype=str(dtype).removeprefix("torch."), unit_tokens=unit
    )
    cache = paged(layout, lengths, seed=seed)
    agree(cache, queries(len(lengths), tokens, heads[0], dim, dtype), 1, programs=programs)


@settings(max_examples=15, deadline=None)
@given(
    precision=st.sampled_from(PRECISIONS),
    length=st.sampled_from([1, 15, 16, 17, 70]),
    dim=st.sampled_from([64, 80, 128]),
    unit=st.sampled_from([16, 64]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    spread=st.sampled_from([1e-3, 1.0, 30.0]),
)
def test_stored_precisions_are_read_exactly(
    precision: Any, length: int, dim: int, unit: int, dtype: torch.dtype, spread: float
) -> None:
    layout = AttentionLayout(layers=2, kv_heads=2, head_dim=dim, dtype=precision, unit_tokens=unit)
    cache = paged(layout, [length, 0, 3], spread=spread)
    agree(cache, queries(3, 1, 4, dim, dtype) * 0.3 / spread, 1, programs=3, atol=1e-2)


@pytest.mark.parametrize("unit", [16, 64])
def test_units_of_different_precision_in_one_table(unit: int) -> None:
    layout = AttentionLayout(layers=2, kv_heads=2, head_dim=64, dtype="bfloat16", unit_tokens=unit)
    cache = paged(layout, [4 * unit + 5, 0, unit - 1], precisions=("bfloat16", "float8_e4m3fn", "int8", "int4"))
    q = queries(3, 2, 4, 64, torch.bfloat16)
    agree(cache, q, 1)
    agree(cache, q, 1, sinks=torch.randn(4, device=DEVICE), window=unit + 3)


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
@pytest.mark.parametrize("programs", [1, 6])
def test_options(options: dict[str, Any], programs: int) -> None:
    options = {k: torch.rand(6, device=DEVICE) if v is True else v for k, v in options.items()}
    layout = AttentionLayout(layers=1, kv_heads=2, head_dim=64, dtype="float32")
    cache = paged(layout, [70, 0, 1, 33])
    agree(cache, queries(4, 2, 6, 64, torch.float32), 0, programs=programs, **options)


def test_more_query_rows_than_one_tile_holds() -> None:
    cache = paged(AttentionLayout(layers=1, kv_heads=1, head_dim=64, dtype="float32"), [40, 7])
    agree(cache, queries(2, 3, 40, 64, torch.float32), 0, programs=5)


@pytest.mark.parametrize("programs", [1, 2, 3, 5, 8, 13, 40])
@pytest.mark.parametrize("lengths", [[130] * 3, [64] * 5, [700], [1, 1, 1]], ids=str)
def test_equal_lengths_are_cut_alike_and_merged(lengths: list[int], programs: int) -> None:
    """Shares of whole segments, segments of few parts, and of so many that several programs merge them."""
    layout = AttentionLayout(layers=1, kv_heads=2, head_dim=64, dtype="float32")
    agree(paged(layout, lengths), queries(len(lengths), 1, 4, 64, torch.float32), 0, programs=programs)


@pytest.mark.parametrize("beside", [1, 2, 5])
def test_rows_are_merged_beside_and_after_each_other(monkeypatch: pytest.MonkeyPatch, beside: int) -> None:
    monkeypatch.setattr(
        "kvtier_kernels.decode.merge_grid", lambda programs, rows, sms: (programs - 1, min(rows, beside))
    )
    layout = AttentionLayout(layers=1, kv_heads=2, head_dim=64, dtype="float32")
    agree(paged(layout, [130, 700, 0, 64]), queries(4, 3, 10, 64, torch.float32), 0, programs=7)


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize(("dim", "heads"), [(256, 24), (128, 24), (128, 7)])
def test_quantised_units_and_many_query_rows(precision: Any, dim: int, heads: int) -> None:
    cache = paged(AttentionLayout(layers=1, kv_heads=1, head_dim=dim, dtype=precision, unit_tokens=64), [70, 5])
    agree(cache, queries(2, 1, heads, dim, torch.bfloat16), 0, programs=3, atol=1e-2)


def plain_case(length: int, dim: int = 64, unit: int = 16, dtype: Any = "float32", units: int | None = None) -> Any:
    return paged(AttentionLayout(layers=1, kv_heads=1, head_dim=dim, dtype=dtype, unit_tokens=unit), [length], spare=0)


def fill(cache: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite the units of sequence 0 with K and V `[units * unit_tokens, head_dim]`."""
    layout = cache.layouts[0]
    for u, entry in enumerate(cache.table[0].tolist()):
        part = slice(u * layout.unit_tokens, (u + 1) * layout.unit_tokens)
        raw = reference.pack(keys[part][None, None], values[part][None, None], layout)
        write_bytes(entry & ~7, raw.to(DEVICE))


def test_length_rules_and_the_table_may_be_longer() -> None:
    cache = plain_case(48)
    values = torch.cat((torch.ones(32, 64), torch.full((16, 64), 100.0)))
    fill(cache, torch.zeros(48, 64), values)
    cache.lengths.fill_(32)
    out, _ = decode(torch.zeros(1, 1, 64, device=DEVICE), cache.table, cache.lengths, cache.layouts[0], 0)
    assert out.unique().tolist() == [1.0]


def test_a_length_past_the_table_is_refused_before_the_launch() -> None:
    cache = plain_case(32)
    cache.lengths.fill_(33)
    out = poisoned((1, 1, 64), torch.float32)
    with pytest.raises(InvalidRequest, match="length 33, its 2 units hold 32"):
        decode(
            torch.zeros(1, 1, 64, device=DEVICE), cache.table, cache.lengths, cache.layouts[0], 0, out=out, check=True
        )
    assert out.isnan().all()


def test_unchecked_a_length_past_the_table_stays_within_it() -> None:
    cache = plain_case(32)
    q = torch.randn(1, 1, 64, device=DEVICE)
    want, _ = decode(q, cache.table, cache.lengths, cache.layouts[0], 0)
    got, _ = decode(
        q, cache.table, torch.tensor([1 << 30], dtype=torch.int32, device=DEVICE), cache.layouts[0], 0, check=False
    )
    assert torch.equal(got, want)


def test_nan_in_unwritten_slots_does_not_leak() -> None:
    cache = plain_case(17)
    assert cache.arenas[0].memory.view(torch.uint8).eq(0xFF).any()
    agree(cache, queries(1, 1, 2, 64, torch.float32), 0)


@pytest.mark.parametrize("dim", [80, 96])
def test_padding_lanes_are_inert(dim: int) -> None:
    cache = plain_case(16, dim)
    fill(cache, torch.randn(16, dim), torch.arange(dim).float().expand(16, dim))
    out, _ = decode(torch.zeros(1, 1, dim, device=DEVICE), cache.table, cache.lengths, cache.layouts[0], 0)
    torch.testing.assert_close(out[0, 0].cpu(), torch.arange(dim).float())


@pytest.mark.parametrize(("window", "want"), [(4, 7.5), (16, 4.5), (1, 9.0), (10, 4.5)])
def test_a_window_counts_keys_and_includes_the_token_itself(window: int, want: float) -> None:
    cache = plain_case(10)
    fill(cache, torch.zeros(16, 64), torch.arange(16).float()[:, None].expand(16, 64))
    out, _ = decode(
        torch.zeros(1, 1, 64, device=DEVICE), cache.table, cache.lengths, cache.layouts[0], 0, window=window
    )
    assert out.unique().tolist() == pytest.approx([want])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("unit", [16, 64])
def test_a_scale_acts_on_keys_and_on_each_heads_values(dtype: Any, unit: int) -> None:
    layout = AttentionLayout(layers=1, kv_heads=2, head_dim=64, dtype=dtype, unit_tokens=unit)
    cache = paged(layout, [2], spare=0)
    kv = torch.zeros(2, 2, unit, 64)
    kv[0, :, 0, 0] = 4.0  # the key's code; with scale 0.25 the logit against q = (1, 0, ...) is 1
    kv[1] = 4.0
    codes = kv.to(torch.float8_e4m3fn if dtype != "int8" else torch.int8).view(torch.uint8).reshape(-1)
    scales = torch.tensor([0.25, 0.25, 0.5, 2.0]).view(torch.uint8)
    write_bytes(int(cache.table[0, 0]) & ~7, torch.cat((codes, scales)).to(DEVICE))
    q = torch.zeros(1, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    q[..., 0] = 1
    out, lse = decode(q, cache.table, cache.lengths, layout, 0, scale=1.0)
    assert out[0, 0].unique().tolist() == [2.0]
    assert out[0, 1].unique().tolist() == [8.0]
    weight = torch.exp(1.0 - lse[0].double())
    assert weight.tolist() == pytest.approx([0.7311, 0.7311], abs=1e-3)


def test_a_soft_cap_acts() -> None:
    cache = plain_case(2)
    keys, values = torch.zeros(16, 64), torch.zeros(16, 64)
    keys[0, 0], values[0] = 10.0, 1.0
    fill(cache, keys, values)
    q = torch.zeros(1, 1, 64, device=DEVICE)
    q[..., 0] = 1
    out, _ = decode(q, cache.table, cache.lengths, cache.layouts[0], 0, scale=1.0, softcap=5.0)
    assert out.mean().item() == pytest.approx(0.99200, abs=1e-5)
    out, _ = decode(q, cache.table, cache.lengths, cache.layouts[0], 0, scale=1.0)
    assert out.mean().item() == pytest.approx(0.99995, abs=1e-5)


@pytest.mark.parametrize("programs", [1, 4])
def test_an_empty_sequence_is_zeros_and_harms_no_other(programs: int) -> None:
    layout = AttentionLayout(layers=1, kv_heads=2, head_dim=64, dtype="float32")
    alone, padded = paged(layout, [5]), paged(layout, [0, 5])
    q = queries(2, 1, 4, 64, torch.float32)
    want, _ = decode(q[1:], alone.table, alone.lengths, layout, 0)
    out, lse = decode(q, padded.table, padded.lengths, layout, 0, programs=programs)
    assert out[0].eq(0).all() and lse[0].eq(float("-inf")).all()
    torch.testing.assert_close(out[1], want[0])


def test_a_table_without_columns_is_of_empty_sequences() -> None:
    layout = AttentionLayout(layers=1, kv_heads=2, head_dim=64, dtype="float32")
    table, lengths = (
        torch.zeros(2, 0, dtype=torch.int64, device=DEVICE),
        torch.zeros(2, dtype=torch.int32, device=DEVICE),
    )
    out, lse = poisoned((2, 4, 64), torch.float32), poisoned((2, 4), torch.float32)
    decode(queries(2, 1, 4, 64, torch.float32)[:, 0], table, lengths, layout, 0, out=out, lse=lse)
    assert out.eq(0).all() and lse.eq(float("-inf")).all()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"q": torch.zeros(1, 2, 96)}, InvalidRequest),
        ({"q": torch.zeros(1, 3, 64)}, InvalidRequest),
        ({"q": torch.zeros(1, 2, 64, dtype=torch.float64)}, InvalidRequest),
        ({"q": torch.zeros(2, 2, 64)}, InvalidRequest),
        ({"q": torch.zeros(1, 64, 2).mT}, InvalidRequest),
        ({"table": torch.zeros(1, 1, dtype=torch.int32)}, InvalidRequest),
        ({"table": torch.zeros(1, 1, dtype=torch.int64)}, InvalidRequest),
        ({"lengths": torch.tensor([1])}, InvalidRequest),
        ({"layer": 1}, InvalidRequest),
        ({"window": 0}, InvalidRequest),
        ({"softcap": -1.0}, InvalidRequest),
        ({"sinks": torch.zeros(3)}, InvalidRequest),
        ({"out": torch.zeros(1, 2, 32)}, InvalidRequest),
        ({"precisions": ("float16", "bfloat16")}, InvalidRequest),
        ({"precisions": ("int8", "int4")}, InvalidRequest),
        ({"layout": AttentionLayout(layers=1, kv_heads=2, head_dim=72)}, LayoutError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_it_does_not_support_is_an_error(change: dict[str, Any], error: type[Exception]) -> None:
    layout = AttentionLayout(layers=1, kv_heads=2, head_dim=64, dtype="float32")
    cache = paged(layout, [5])
    good = {"q": torch.zeros(1, 2, 64), "table": cache.table, "lengths": cache.lengths, "layout": layout, "layer": 0}
    call = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in (good | change).items()}
    with pytest.raises(error):
        decode(**call, check=True)
