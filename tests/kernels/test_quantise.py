"""`quantise` and `dequantise`: the same codes as the reference, and how much of the values they keep."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import DEVICE, POISON, Arena

from kvtier.errors import InvalidRequest, LayoutError
from kvtier.layout import AttentionLayout
from kvtier_kernels import reference
from kvtier_kernels.quantise import convert, dequantise, quantise

NARROW = ("float8_e4m3fn", "int8", "int4")


def filled(layout: AttentionLayout, count: int, scale: float = 1.0) -> tuple[Arena, torch.Tensor, list[torch.Tensor]]:
    """Units of random values: their arena, addresses, and K and V stacked `[2, layers, heads, tokens, dim]`."""
    arena, addresses, values = Arena(layout.unit_stride, count), [], []
    for _ in range(count):
        address, frame = arena.take()
        kv = torch.randn(2, layout.layers, layout.kv_heads, layout.unit_tokens, layout.head_dim) * scale
        frame.copy_(reference.pack(kv[0], kv[1], layout))
        addresses.append(address)
        values.append(kv)
    return arena, torch.tensor(addresses, dtype=torch.int64, device=DEVICE), values


def empty(layout: AttentionLayout, count: int) -> tuple[Arena, torch.Tensor, list[torch.Tensor]]:
    arena = Arena(layout.unit_stride, count)
    taken = [arena.take() for _ in range(count)]
    return arena, torch.tensor([a for a, _ in taken], dtype=torch.int64, device=DEVICE), [f for _, f in taken]


def read(layout: AttentionLayout, frame: torch.Tensor) -> torch.Tensor:
    layers = [torch.stack(reference.unpack(frame.cpu(), layout, layer)) for layer in range(layout.layers)]
    return torch.stack(layers, 1)


@settings(max_examples=15, deadline=None)
@given(
    to=st.sampled_from(NARROW),
    wide=st.sampled_from(["float32", "bfloat16", "float16"]),
    dim=st.sampled_from([64, 80, 96, 128, 256]),
    unit=st.sampled_from([16, 64]),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
)
def test_codes_are_the_references(to: Any, wide: Any, dim: int, unit: int, scale: float) -> None:
    layout = AttentionLayout(layers=2, kv_heads=1, head_dim=dim, dtype=wide, unit_tokens=unit)
    _arena, sources, _ = filled(layout, 2, scale)
    narrow = msgspec.structs.replace(layout, dtype=to)
    _arena2, targets, frames = empty(narrow, 2)
    assert quantise(sources, layout, targets, to) == narrow
    for source, frame in zip(sources.tolist(), frames, strict=True):
        kv = read(layout, reference.read_bytes(source, layout.unit_bytes))
        want = reference.pack(kv[0].float(), kv[1].float(), narrow)
        assert torch.equal(frame.cpu()[: narrow.unit_bytes], want[: narrow.unit_bytes])
        assert frame[narrow.unit_bytes :].eq(POISON).all()


@pytest.mark.parametrize(("dtype", "most"), [("float8_e4m3fn", 0.03), ("int8", 0.012), ("int4", 0.11)])
def test_there_and_back_keeps_the_values(dtype: Any, most: float) -> None:
    layout = AttentionLayout(layers=2, kv_heads=2, head_dim=64, dtype="float32")
    _arena, sources, values = filled(layout, 1)
    narrow = msgspec.structs.replace(layout, dtype=dtype)
    _arena2, middle, _ = empty(narrow, 1)
    _arena3, back, frames = empty(layout, 1)
    quantise(sources, layout, middle, dtype)
    dequantise(middle, narrow, back, "float32")
    error = (read(layout, frames[0]) - values[0].double()).norm() / values[0].double().norm()
    print(f"{dtype}: relative error {error:.4f}")
    assert 0 < error < most


@pytest.mark.parametrize("dtype", NARROW)
def test_tokens_not_written_leave_no_trace(dtype: Any) -> None:
    layout = AttentionLayout(layers=1, kv_heads=2, head_dim=64, dtype="bfloat16")
    narrow = msgspec.structs.replace(layout, dtype=dtype)
    _arena, sources, values = filled(layout, 1)
    frame = _arena.memory[_arena.start : _arena.start + layout.unit_stride]
    rows = frame[: layout.payload_bytes].view(-1, 16, layout.row_bytes)
    rows[:, 5:] = POISON
    _arena2, targets, frames = empty(narrow, 1)
    quantise(sources, layout, targets, dtype, tokens=torch.tensor([5], dtype=torch.int32, device=DEVICE))
    kv = values[0].bfloat16().float()
    kv[..., 5:, :] = 0
    assert torch.equal(frames[0].cpu()[: narrow.unit_bytes], reference.pack(kv[0], kv[1], narrow)[: narrow.unit_bytes])


def test_all_zeros_stay_zeros() -> None:
    layout = AttentionLayout(layers=1, kv_heads=1, head_dim=64, dtype="float32")
    for dtype in NARROW:
        _arena, sources, _ = filled(layout, 1, 0.0)
        narrow = msgspec.structs.replace(layout, dtype=dtype)
        _arena2, targets, frames = empty(narrow, 1)
        quantise(sources, layout, targets, dtype)
        assert read(narrow, frames[0]).eq(0).all()


def test_from_one_narrow_precision_to_another() -> None:
    eight = AttentionLayout(layers=1, kv_heads=2, head_dim=64, dtype="int8")
    four = msgspec.structs.replace(eight, dtype="int4")
    _arena, sources, values = filled(eight, 1)
    _arena2, targets, frames = empty(four, 1)
    convert(sources, eight, targets, four)
    error = (read(four, frames[0]) - values[0].double()).norm() / values[0].double().norm()
    assert error < 0.11


def test_layouts_that_do_not_convert_are_refused() -> None:
    layout = AttentionLayout(layers=1, kv_heads=1, head_dim=64)
    units = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(LayoutError):
        convert(units, layout, units, msgspec.structs.replace(layout, head_dim=128))
    with pytest.raises(LayoutError):
        quantise(units, layout, units, "float16")
    with pytest.raises(LayoutError):
        dequantise(units, layout, units, "float16")
    with pytest.raises(InvalidRequest):
        quantise(units, layout, torch.zeros(2, dtype=torch.int64), "int8")
