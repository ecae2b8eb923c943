"""`mla` against its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import DEVICE, close, latent_paged, poisoned, tolerance

from kvtier.errors import InvalidRequest, LayoutError
from kvtier.layout import LatentLayout
from kvtier_kernels import reference
from kvtier_kernels.mla import mla


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 15, 16, 17, 64, 65]), min_size=1, max_size=3),
    heads=st.sampled_from([1, 5, 16, 20]),
    tokens=st.integers(1, 2),
    unit=st.sampled_from([16, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    latent=st.sampled_from([(512, 64), (64, 16)]),
    programs=st.sampled_from([1, 3, 9]),
)
def test_drawn_shapes(
    lengths: list[int], heads: int, tokens: int, unit: int, dtype: Any, latent: tuple[int, int], programs: int
) -> None:
    name = str(dtype).removeprefix("torch.")
    layout = LatentLayout(layers=2, latent=latent[0], rope=latent[1], dtype=name, unit_tokens=unit)
    table, counted, _arena = latent_paged(layout, lengths)
    q = torch.randn(len(lengths), tokens, heads, sum(latent), device=DEVICE).to(dtype)
    ql, qr = q[..., : latent[0]], q[..., latent[0] :]
    out, lse = poisoned(ql.shape, dtype), poisoned(ql.shape[:3], torch.float32)
    mla(ql, qr, table, counted, layout, 1, scale=0.07, out=out, lse=lse, programs=programs)
    want, want_lse = reference.mla(ql, qr, table, counted, layout, 1, scale=0.07)
    close(out, want, tolerance(dtype))
    close(lse, want_lse, tolerance(dtype))


def test_a_table_without_columns_is_of_empty_sequences() -> None:
    table, lengths = (
        torch.zeros(2, 0, dtype=torch.int64, device=DEVICE),
        torch.zeros(2, dtype=torch.int32, device=DEVICE),
    )
    q = torch.randn(2, 16, 576, device=DEVICE)
    out, lse = mla(q[..., :512], q[..., 512:], table, lengths, LatentLayout(layers=1, dtype="float32"), 0, scale=0.07)
    assert out.eq(0).all() and lse.eq(float("-inf")).all()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"length": 33}, InvalidRequest),
        ({"rope": 32}, InvalidRequest),
        ({"dtype": torch.float16}, InvalidRequest),
        ({"layer": 2}, InvalidRequest),
        ({"latent": 96}, LayoutError),
    ],
    ids=str,
)
def test_what_it_does_not_support_is_an_error(change: dict[str, Any], error: type[Exception]) -> None:
    layout = LatentLayout(layers=2, latent=change.get("latent", 64), rope=16, dtype="float32")
    table, lengths, _arena = latent_paged(layout, [32])
    lengths.fill_(change.get("length", 32))
    ql = torch.zeros(1, 4, layout.latent, device=DEVICE)
    qr = torch.zeros(1, 4, change.get("rope", 16), device=DEVICE, dtype=change.get("dtype", torch.float32))
    with pytest.raises(error):
        mla(ql, qr, table[:, :2], lengths, layout, change.get("layer", 0), scale=1.0, check=True)
