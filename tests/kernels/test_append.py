"""`append`: what lands where, in every precision, and that nothing else changes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import DEVICE, Paged, close, latent_paged, paged

from kvtier.errors import InvalidRequest
from kvtier.layout import AttentionLayout, LatentLayout
from kvtier_kernels import reference
from kvtier_kernels.append import append, append_latent

NARROW = {"float8_e4m3fn": 0.06, "int8": 0.02, "int4": 0.2}


def offsets(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=DEVICE)


def blank(layout: AttentionLayout, lengths: list[int]) -> Paged:
    """Units for `lengths` tokens in which no token was written yet."""
    cache = paged(layout, lengths)
    cache.arenas[0].memory.fill_(0xFF)
    return cache


def grow(
    cache: Paged, steps: list[list[int]], layer: int, **rope: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Append `steps` of counts a sequence; the K and V of each sequence, as given."""
    layout, batch = cache.layouts[0], len(steps[0])
    so_far = [0] * batch
    keys: list[list[torch.Tensor]] = [[] for _ in range(batch)]
    values: list[list[torch.Tensor]] = [[] for _ in range(batch)]
    for counts in steps:
        kv = torch.randn(2, sum(counts), layout.kv_heads + 1, layout.head_dim, device=DEVICE)[:, :, 1:]
        so_far = [a + b for a, b in zip(so_far, counts, strict=True)]
        lengths = torch.tensor(so_far, dtype=torch.int32, device=DEVICE)
        append(kv[0], kv[1], offsets(counts), cache.table, lengths, layout, layer, most_new=max(counts), **rope)
        for b, (start, count) in enumerate(zip(offsets(counts).tolist(), counts, strict=False)):
            keys[b].append(kv[0, start : start + count])
            values[b].append(kv[1, start : start + count])
    cache.lengths.copy_(lengths)
    return [torch.cat(x) for x in keys], [torch.cat(x) for x in values]


@settings(max_examples=15, deadline=None)
@given(
    steps=st.lists(st.lists(st.sampled_from([0, 1, 2, 15, 17]), min_size=2, max_size=2), min_size=1, max_size=4),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", *NARROW]),
    dim=st.sampled_from([64, 80, 128]),
    unit=st.sampled_from([16, 64]),
)
def test_drawn_steps(steps: list[list[int]], dtype: Any, dim: int, unit: int) -> None:
    layout = AttentionLayout(layers=2, kv_heads=2, head_dim=dim, dtype=dtype, unit_tokens=unit)
    totals = [sum(x) for x in zip(*steps, strict=True)]
    cache = blank(layout, totals)
    keys, values = grow(cache, steps, 1)
    for b, total in enumerate(totals):
        k, v = reference.gather(cache.table[b], total, cache.layouts, 1)
        for got, want in ((k, keys[b]), (v, values[b])):
            if total:
                close(got, want, {"float32": 1e-7, "bfloat16": 4e-3, "float16": 5e-4}.get(dtype) or NARROW[dtype])


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_other_layers_and_sequences_keep_every_byte(dtype: Any) -> None:
    layout = AttentionLayout(layers=3, kv_heads=2, head_dim=64, dtype=dtype)
    cache = paged(layout, [20, 20])
    before = cache.arenas[0].memory.clone()
    kv = torch.randn(2, 3, 2, 64, device=DEVICE)
    lengths = torch.tensor([20, 17], dtype=torch.int32, device=DEVICE)
    append(kv[0], kv[1], offsets([0, 3]), cache.table, lengths, layout, 1, most_new=3)
    changed = (cache.arenas[0].memory != before).nonzero().flatten() + cache.arenas[0].memory.data_ptr()
    spans = []
    for u in (0, 1):
        entry = int(cache.table[1, u]) & ~7
        spans.append((entry + layout.offset(1, 0, 0, 0), entry + layout.offset(2, 0, 0, 0)))
        if layout.scales_bytes:
            spans.append((entry + layout.scale_offset(1, 0, 0), entry + layout.scale_offset(2, 0, 0)))
    assert len(changed) and all(any(a <= at < b for a, b in spans) for at in changed.tolist())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [64, 32])
def test_rotary_embedding_of_keys(interleaved: bool, rotary: int) -> None:
    layout = AttentionLayout(layers=1, kv_heads=2, head_dim=64, dtype="float32")
    cache = blank(layout, [19, 2])
    angles = torch.rand(32, rotary // 2, device=DEVICE) * 6
    keys, values = grow(cache, [[17, 1], [2, 1]], 0, cos=angles.cos(), sin=angles.sin(), interleaved=interleaved)
    for b, total in enumerate([19, 2]):
        k, v = reference.gather(cache.table[b], total, cache.layouts, 0)
        positions = torch.arange(total, device=DEVICE)
        close(k, reference.rope(keys[b], positions, angles.cos(), angles.sin(), interleaved), 1e-6)
        close(v, values[b], 1e-7)


def test_a_reused_frame_forgets_its_last_scales() -> None:
    layout = AttentionLayout(layers=1, kv_heads=1, head_dim=64, dtype="int8")
    cache = paged(layout, [16], spread=1e4)
    kv = torch.randn(2, 1, 1, 64, device=DEVICE)
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    append(kv[0], kv[1], offsets([1]), cache.table, one, layout, 0, most_new=1)
    k, v = reference.gather(cache.table[0], 1, cache.layouts, 0)
    close(k, kv[0], 0.02)
    close(v, kv[1], 0.02)


def test_a_token_past_the_table_is_refused_or_dropped() -> None:
    layout = AttentionLayout(layers=1, kv_heads=1, head_dim=64, dtype="float32")
    cache = paged(layout, [32], spare=0)
    before = cache.arenas[0].memory.clone()
    kv = torch.randn(2, 1, 1, 64, device=DEVICE)
    lengths = torch.tensor([33], dtype=torch.int32, device=DEVICE)
    call = (kv[0], kv[1], offsets([1]), cache.table, lengths, layout, 0)
    with pytest.raises(InvalidRequest, match="33"):
        append(*call, most_new=1, check=True)
    append(*call, most_new=1, check=False)
    assert torch.equal(cache.arenas[0].memory, before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_latents(dtype: Any) -> None:
    layout = LatentLayout(layers=2, latent=64, rope=16, dtype=dtype)
    table, lengths, _arena = latent_paged(layout, [18, 3])
    before = [reference.latents(table[b], 18 - 15 * b, layout, 1) for b in range(2)]
    latent, rope = torch.randn(4, 64, device=DEVICE), torch.randn(4, 16, device=DEVICE)
    append_latent(latent, rope, offsets([3, 1]), table, lengths, layout, 1, most_new=3)
    for b, (total, rows) in enumerate([(18, slice(0, 3)), (3, slice(3, 4))]):
        new = rows.stop - rows.start
        got = reference.latents(table[b], total, layout, 1)
        assert torch.equal(got[: total - new], before[b][: total - new])
        close(got[total - new :], torch.cat((latent[rows], rope[rows]), 1), 4e-3)
