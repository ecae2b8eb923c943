"""`mla_prefill`: expanded attention is what absorbed attention is, over the same latent units."""

from __future__ import annotations

import pytest
import torch
from paged import DEVICE, close, latent_paged

from kvtier.errors import InvalidRequest
from kvtier.layout import LatentLayout
from kvtier_kernels import reference
from kvtier_kernels.mla_prefill import gather_latents, mla_prefill


@pytest.mark.parametrize("unit", [16, 64])
def test_expanded_is_absorbed(unit: int) -> None:
    layout = LatentLayout(layers=2, latent=64, rope=16, dtype="float32", unit_tokens=unit)
    lengths, counts, heads, nope, value = [70, 3, 17], [20, 3, 1], 3, 32, 24
    table, _, _arena = latent_paged(layout, lengths)
    q = torch.randn(sum(counts), heads, nope + 16, device=DEVICE)
    up_k, up_v = torch.randn(heads, nope, 64, device=DEVICE) / 8, torch.randn(heads, value, 64, device=DEVICE) / 8
    out = mla_prefill(q, counts, table, lengths, layout, 1, up_k=up_k, up_v=up_v, scale=0.2)
    want = []
    for b, chunk in enumerate(q.double().split(counts)):
        rows = reference.latents(table[b], lengths[b], layout, 1)[:, None]
        absorbed = torch.einsum("nhd,hdc->nhc", chunk[..., :nope], up_k.double())
        positions = torch.arange(lengths[b] - counts[b], lengths[b], device=DEVICE)
        o, _ = reference.attend(torch.cat((absorbed, chunk[..., nope:]), -1), rows, rows, positions, scale=0.2)
        want.append(torch.einsum("nhc,hdc->nhd", o[..., :64], up_v.double()))
    close(out, torch.cat(want), 1e-5)


def test_gathered_rows_are_the_latents_and_nothing_else() -> None:
    layout = LatentLayout(layers=2, latent=64, rope=16)
    table, lengths, _arena = latent_paged(layout, [17, 0, 16])
    cu = torch.tensor([0, 17, 17, 33], dtype=torch.int32, device=DEVICE)
    rows = gather_latents(table, lengths, cu, layout, 1, tokens=33)
    assert torch.equal(rows[:17].double(), reference.latents(table[0], 17, layout, 1))
    assert torch.equal(rows[17:].double(), reference.latents(table[2], 16, layout, 1))


def test_chunks_longer_than_their_context_are_refused() -> None:
    layout = LatentLayout(layers=1, latent=64, rope=16, dtype="float32")
    table, _, _arena = latent_paged(layout, [4])
    up = torch.zeros(1, 32, 64, device=DEVICE)
    with pytest.raises(InvalidRequest, match="pass the contexts"):
        mla_prefill(torch.zeros(5, 1, 48, device=DEVICE), [5], table, [4], layout, 0, up_k=up, up_v=up, scale=1.0)
