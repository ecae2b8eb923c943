"""The bytes of a unit: sizes worked out by hand, and the properties that every layout keeps."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import LayoutError
from kvtier.layout import ALIGNMENT, AttentionLayout, DType, EngineLayout, LatentLayout

DTYPES: tuple[DType, ...] = ("float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "int4")

layouts = st.builds(
    AttentionLayout,
    layers=st.integers(1, 5),
    kv_heads=st.integers(1, 5),
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    dtype=st.sampled_from(DTYPES),
    unit_tokens=st.sampled_from([16, 64]),
)


def test_a_llama_unit_by_hand() -> None:
    layout = AttentionLayout(layers=32, kv_heads=8, head_dim=128)
    assert layout.unit_bytes == layout.unit_stride == 32 * 2 * 8 * 16 * 128 * 2 == 2 << 20
    assert layout.offset(1, 0, 0, 0) == 2 * 8 * 16 * 256
    assert layout.token_bytes == 128 << 10


@pytest.mark.parametrize(
    ("dtype", "payload", "scales"),
    [("int8", 4 * 16 * 80, 4 * 4), ("float8_e4m3fn", 4 * 16 * 80, 4 * 4), ("int4", 4 * 16 * 40, 2 * (80 + 16) * 2)],
)
def test_quantised_units_by_hand(dtype: DType, payload: int, scales: int) -> None:
    layout = AttentionLayout(layers=1, kv_heads=2, head_dim=80, dtype=dtype)
    assert (layout.payload_bytes, layout.scales_bytes) == (payload, scales)
    assert layout.scale_offset(0, 0, 0) == payload


@given(layouts)
def test_scales_follow_the_payload_without_holes(layout: AttentionLayout) -> None:
    if not layout.scales_bytes:
        with pytest.raises(LayoutError, match="no scales"):
            layout.scale_offset(0, 0, 0)
        return
    cells = itertools.product(range(layout.layers), (0, 1), range(layout.kv_heads))
    starts = sorted(layout.scale_offset(*cell) for cell in cells)
    assert starts[0] == layout.payload_bytes
    assert len(set(starts)) == layout.layers * 2 * layout.kv_heads
    sizes = {"int4": {layout.head_dim * 2, layout.unit_tokens * 2}}.get(layout.dtype, {4})
    steps = [b - a for a, b in itertools.pairwise([*starts, layout.unit_bytes])]
    assert set(steps) <= sizes


@given(layouts)
def test_stride_is_the_least_padding(layout: AttentionLayout) -> None:
    assert layout.unit_stride % ALIGNMENT == 0
    assert 0 <= layout.unit_stride - layout.unit_bytes < ALIGNMENT
    assert max(layout.probes()) + layout.row_bytes == layout.payload_bytes


@given(layouts, layouts)
def test_fingerprints_tell_layouts_apart(a: AttentionLayout, b: AttentionLayout) -> None:
    assert (a.fingerprint() == b.fingerprint()) == (a == b)


def test_latent_and_attention_never_meet() -> None:
    a, b = AttentionLayout(layers=1, kv_heads=1, head_dim=288), LatentLayout(layers=1)
    assert a.payload_bytes == b.payload_bytes
    assert a.fingerprint() != b.fingerprint()


def test_an_engine_keeps_its_own_bytes() -> None:
    layout = EngineLayout(unit_bytes=5000, arrangement="vllm LBHNC bfloat16 [2, 3, 128]", unit_tokens=128)
    assert (layout.unit_stride, layout.shape, layout.token_bytes) == (8192, (5000,), 64.0)
    assert layout.probes() == [0, 4992]
    assert layout.fingerprint() != EngineLayout(unit_bytes=5000, arrangement="other", unit_tokens=128).fingerprint()


@pytest.mark.parametrize("bad", [{"unit_bytes": 7}, {"unit_tokens": 0}, {"arrangement": ""}])
def test_an_engine_layout_says_what_it_is(bad: dict[str, int]) -> None:
    with pytest.raises(LayoutError):
        EngineLayout(**{"unit_bytes": 4096, "arrangement": "x"} | bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad",
    [
        {"layers": 0, "kv_heads": 1, "head_dim": 64},
        {"layers": 1, "kv_heads": 1, "head_dim": 65, "dtype": "int4"},
        {"layers": 1, "kv_heads": 1, "head_dim": 64, "unit_tokens": 32},
        {"layers": 1, "kv_heads": 1, "head_dim": 64, "dtype": "int2"},
    ],
)
def test_layouts_no_unit_can_have(bad: dict[str, object]) -> None:
    with pytest.raises(LayoutError):
        AttentionLayout(**bad)  # type: ignore[arg-type]


def test_latent_layouts_are_sixteen_bit() -> None:
    with pytest.raises(LayoutError, match="bfloat16"):
        LatentLayout(layers=1, dtype="int8")
