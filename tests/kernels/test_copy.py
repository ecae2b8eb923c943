"""`copy`: pieces by address, and units to and from the paged caches that engines have."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import DEVICE, Arena, latent_paged

from kvtier.errors import InvalidRequest, LayoutError
from kvtier.layout import AttentionLayout, LatentLayout
from kvtier_kernels import reference
from kvtier_kernels.copy import copy_pieces, engine_cache, gather_units, scatter_units, unit_slots

ENGINES = {
    "kv block token head dim": "one a layer",
    "block kv token head dim": "one a layer",
    "block kv head token dim": "one a layer",
    "block layer kv token head dim": "one for all",
    "layer kv block head token dim": "one for all",
    "block token head dim": "K and V apart",
    "layer block token head dim": "K and V apart, all layers",
}


def make(axes: str, size: dict[str, int], dtype: torch.dtype) -> Any:
    def one() -> torch.Tensor:
        return torch.randn([size[name] for name in axes.split()], device=DEVICE).mul(9).to(dtype)

    match ENGINES[axes]:
        case "one a layer":
            return [one() for _ in range(size["layer"])]
        case "one for all":
            return one()
        case "K and V apart":
            return [(one(), one()) for _ in range(size["layer"])]
        case _:
            return [one(), one()]


def token(cache: Any, axes: str, layer: int, kv: int, block: int, offset: int, head: int) -> torch.Tensor:
    index = {"layer": layer, "kv": kv, "block": block, "token": offset, "head": head, "dim": slice(None)}
    if isinstance(cache, list):
        cache = cache[kv] if "layer" in axes else cache[layer]
    if isinstance(cache, tuple):
        cache = cache[kv]
    return cache[tuple(index[name] for name in axes.split())]


def frames(layout: Any, count: int) -> tuple[Arena, torch.Tensor, list[torch.Tensor]]:
    arena = Arena(layout.unit_stride, count)
    taken = [arena.take() for _ in range(count)]
    return arena, torch.tensor([a for a, _ in taken], dtype=torch.int64, device=DEVICE), [f for _, f in taken]


@settings(max_examples=20, deadline=None)
@given(
    axes=st.sampled_from(sorted(ENGINES)),
    block=st.sampled_from([1, 8, 16, 32, 64, 128]),
    unit=st.sampled_from([16, 64]),
    dim=st.sampled_from([64, 80]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_every_engines_layout_there_and_back(axes: str, block: int, unit: int, dim: int, dtype: Any) -> None:
    layout = AttentionLayout(layers=2, kv_heads=2, head_dim=dim, dtype=dtype, unit_tokens=unit)
    blocks = -(-2 * unit // block)
    size = {"layer": 2, "kv": 2, "block": blocks + 2, "token": block, "head": 2, "dim": dim}
    theirs = make(axes, size, getattr(torch, dtype))
    cache = engine_cache(theirs, axes)
    order = torch.randperm(blocks + 2)[:blocks].tolist()
    slots = torch.tensor(unit_slots(order, 2, unit, block), dtype=torch.int64, device=DEVICE)
    _arena, units, found = frames(layout, 2)
    gather_units(cache, slots, units, layout)
    for t in (0, 1, unit - 1, unit, 2 * unit - 1):
        kv = [reference.unpack(found[t // unit].cpu(), layout, 1)[k][1, t % unit] for k in (0, 1)]
        for k in (0, 1):
            want = token(theirs, axes, 1, k, order[t // block], t % block, 1)
            assert torch.equal(kv[k], want.cpu().double())
    assert all(frame[layout.unit_bytes :].eq(0xFF).all() for frame in found)
    kept = [x.clone() for x in cache.tensors]
    for x in cache.tensors:
        x.fill_(-1)
    scatter_units(cache, slots, units, layout)
    whole = torch.tensor(order[: 2 * unit // block], dtype=torch.int64)
    untouched = torch.tensor([b for b in range(blocks + 2) if b not in order])
    at = axes.split().index("block")
    for now, was in zip(cache.tensors, kept, strict=True):
        assert torch.equal(now.cpu().index_select(at, whole), was.cpu().index_select(at, whole))
        assert now.cpu().index_select(at, untouched).eq(-1).all()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_scales_of_a_quantised_engine_cache(dtype: Any) -> None:
    layout = AttentionLayout(layers=2, kv_heads=2, head_dim=64, dtype=dtype)
    axes = "kv block token head dim"
    codes = [(torch.rand(2, 2, 16, 2, 64, device=DEVICE) * 200 - 100).to(getattr(torch, dtype)) for _ in range(2)]
    cache = engine_cache(codes, axes)
    scales = torch.rand(2, 2, 2, device=DEVICE) + 0.5
    slots = torch.tensor(unit_slots([1], 1, 16, 16), dtype=torch.int64, device=DEVICE)
    _arena, units, found = frames(layout, 1)
    gather_units(cache, slots, units, layout, scales=scales)
    for layer in range(2):
        for kv, got in enumerate(reference.unpack(found[0].cpu(), layout, layer)):
            want = codes[layer][kv, 1].float() * scales[layer, kv][None, :, None]
            torch.testing.assert_close(got.transpose(0, 1), want.cpu().double(), rtol=1e-6, atol=0)
    kept = [x.clone() for x in codes]
    for x in codes:
        x.view(torch.uint8).fill_(1)
    scatter_units(cache, slots, units, layout, scales=scales)
    for x, was in zip(codes, kept, strict=True):
        assert torch.equal(x[:, 1].float(), was[:, 1].float())
    scatter_units(cache, slots, units, layout, scales=scales * 2)
    error = (codes[0][0, 1].float() * 2 - kept[0][0, 1].float()).norm() / kept[0][0, 1].float().norm()
    assert error < 0.04
    with pytest.raises(InvalidRequest, match="scales"):
        gather_units(cache, slots, units, layout)


def test_latents_there() -> None:
    layout = LatentLayout(layers=2, latent=64, rope=16)
    theirs = [torch.randn(3, 32, 80, device=DEVICE).bfloat16() for _ in range(2)]
    slots = torch.tensor(unit_slots([2], 2, 16, 32), dtype=torch.int64, device=DEVICE)
    table, _, _arena = latent_paged(layout, [32])
    gather_units(engine_cache(theirs, "block token dim"), slots, table[0, :2].contiguous(), layout)
    assert torch.equal(reference.latents(table[0], 32, layout, 1), theirs[1][2].double())


def test_a_block_past_two_gigabytes_is_exact() -> None:
    layout = AttentionLayout(layers=1, kv_heads=8, head_dim=128, dtype="int8")
    theirs = torch.empty(65537, 2, 16, 8, 128, dtype=torch.int8, device=DEVICE)
    assert theirs.stride(0) == 32768 and theirs.numel() > 1 << 31
    theirs[65536] = torch.randint(-128, 128, theirs.shape[1:], dtype=torch.int8)
    cache = engine_cache([theirs], "block kv token head dim")
    _arena, units, found = frames(layout, 1)
    slots = torch.tensor([[65536 * 16]], dtype=torch.int64, device=DEVICE)
    gather_units(cache, slots, units, layout, scales=torch.ones(1, 2, 8, device=DEVICE))
    k, v = reference.unpack(found[0].cpu(), layout, 0)
    want = theirs[65536].cpu().double().transpose(1, 2)
    assert torch.equal(k, want[0]) and torch.equal(v, want[1])


def test_negative_slots_are_left_alone() -> None:
    layout = AttentionLayout(layers=1, kv_heads=1, head_dim=64, dtype="float32")
    theirs = torch.randn(2, 4, 8, 1, 64, device=DEVICE)
    _arena, units, found = frames(layout, 1)
    slots = torch.tensor([[8, -1]], dtype=torch.int64, device=DEVICE)
    gather_units(engine_cache([theirs], "kv block token head dim"), slots, units, layout)
    k, _v = reference.unpack(found[0].cpu(), layout, 0)
    assert torch.equal(k[0, :8], theirs[0, 1, :, 0].cpu().double()) and k[0, 8:].isnan().all()


@pytest.mark.parametrize("nbytes", [16, 48, 4096, 16384 + 16, 65536])
def test_pieces(nbytes: int) -> None:
    count = 7
    source = torch.randint(0, 256, (count * 2, nbytes), dtype=torch.uint8, device=DEVICE)
    target = torch.zeros_like(source)
    at = torch.randperm(count * 2, device=DEVICE)[:count]
    copy_pieces(source.data_ptr() + at * nbytes, target.data_ptr() + at.flip(0) * nbytes, nbytes)
    want = torch.zeros_like(source)
    want[at.flip(0)] = source[at]
    assert torch.equal(target, want)


def test_what_it_does_not_support_is_an_error() -> None:
    layout = AttentionLayout(layers=1, kv_heads=1, head_dim=64, dtype="float32")
    theirs = torch.zeros(2, 4, 24, 1, 64, device=DEVICE)
    units = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    slots = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(InvalidRequest, match="neither divides"):
        gather_units(engine_cache([theirs], "kv block token head dim"), slots, units, layout)
    good = engine_cache([theirs[:, :, :16]], "kv block token head dim")
    with pytest.raises(LayoutError, match="holds"):
        gather_units(good, slots, units, msgspec.structs.replace(layout, dtype="bfloat16"))
    with pytest.raises(LayoutError, match="planes"):
        gather_units(good, slots, units, msgspec.structs.replace(layout, layers=2))
    with pytest.raises(LayoutError, match="int4"):
        gather_units(good, slots, units, msgspec.structs.replace(layout, dtype="int4"))
    with pytest.raises(InvalidRequest, match="slots"):
        gather_units(good, slots[:, :0], units, layout)
    with pytest.raises(InvalidRequest, match="axes"):
        engine_cache([theirs], "kv block token dim")
    with pytest.raises(InvalidRequest, match="multiple of 16"):
        copy_pieces(units, units, 24)
    with pytest.raises(InvalidRequest, match="hold no 3 units"):
        unit_slots([0, 1], 3, 16, 16)
