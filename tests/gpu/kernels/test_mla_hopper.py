"""`mla` on Hopper's warpgroup kernel (`mla_hopper`) against the reference: it runs nowhere else than on such a GPU."""

from __future__ import annotations

import pytest
import torch
from paged import close, latent_paged, poisoned, tolerance

from kvtier.layout import LatentLayout
from kvtier_kernels import reference, tuning
from kvtier_kernels.addressing import TORCH_DTYPES
from kvtier_kernels.mla import mla

CUDA = torch.device("cuda")
LENGTHS = [3000, 0, 1, 63, 64, 65, 200, 129]

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and tuning.warpgroups(LatentLayout(layers=1), CUDA)),
    reason="needs a GPU of compute capability 9.x and the release of Triton that the kernel was written for",
)


def served_by_warpgroups(layout: LatentLayout, rows: int) -> bool:
    return tuning.mla(layout, rows, CUDA).gluon == 1


@pytest.mark.parametrize(
    ("heads", "tokens", "unit", "dtype", "programs"),
    [
        (128, 1, 64, "bfloat16", None),
        (128, 1, 16, "bfloat16", None),
        (128, 1, 64, "bfloat16", 5),
        (128, 1, 64, "bfloat16", 1),
        (64, 2, 64, "bfloat16", 7),
        (100, 2, 16, "bfloat16", None),
        (20, 1, 64, "bfloat16", None),
        (128, 3, 64, "float16", None),
    ],
)
def test_against_the_reference(heads: int, tokens: int, unit: int, dtype: str, programs: int | None) -> None:
    layout = LatentLayout(layers=2, unit_tokens=unit, dtype=dtype)
    assert served_by_warpgroups(layout, heads * tokens)
    table, lengths, _arena = latent_paged(layout, LENGTHS)
    q = torch.randn(len(LENGTHS), tokens, heads, 576, device=CUDA).to(TORCH_DTYPES[dtype])
    ql, qr = q[..., :512], q[..., 512:]
    out, lse = poisoned(ql.shape, q.dtype), poisoned(ql.shape[:3], torch.float32)
    mla(ql, qr, table, lengths, layout, 1, scale=0.07, out=out, lse=lse, programs=programs)
    want, want_lse = reference.mla(ql, qr, table, lengths, layout, 1, scale=0.07)
    close(out, want, tolerance(q.dtype))
    close(lse, want_lse, 2e-3)


@pytest.mark.parametrize("gluon", [1, 0])
def test_queries_of_another_dtype_than_the_units_are_served_as_well(gluon: int) -> None:
    layout = LatentLayout(layers=1, unit_tokens=64)
    table, lengths, _arena = latent_paged(layout, [700, 33])
    q = torch.randn(2, 128, 576, device=CUDA).to(torch.float16 if gluon else torch.bfloat16)
    with tuning.using("mla", gluon=gluon):
        out, _ = mla(q[..., :512], q[..., 512:], table, lengths, layout, 0, scale=0.07)
    want, _ = reference.mla(q[:, None, :, :512], q[:, None, :, 512:], table, lengths, layout, 0, scale=0.07)
    close(out, want[:, 0], 1e-2)


def test_a_captured_graph_serves_other_lengths_and_tables() -> None:
    layout = LatentLayout(layers=2, unit_tokens=64)
    first, second = latent_paged(layout, LENGTHS), latent_paged(layout, LENGTHS[::-1], seed=1)
    q = torch.randn(len(LENGTHS), 128, 576, device=CUDA).bfloat16()
    parts = q[..., :512], q[..., 512:]
    table, lengths = first[0].clone(), first[1].clone()
    out, lse = torch.empty_like(parts[0]), torch.empty(len(LENGTHS), 128, device=CUDA)
    mla(*parts, table, lengths, layout, 1, scale=0.07, out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla(*parts, table, lengths, layout, 1, scale=0.07, out=out, lse=lse)
    for now in (second, first):
        table.copy_(now[0])
        lengths.copy_(now[1])
        out.fill_(float("nan"))
        graph.replay()
        want, _ = reference.mla(parts[0][:, None], parts[1][:, None], now[0], now[1], layout, 1, scale=0.07)
        close(out, want[:, 0], tolerance(q.dtype))


def test_one_long_sequence_is_shared_by_all_programs() -> None:
    layout = LatentLayout(layers=1, unit_tokens=64)
    table, lengths, _arena = latent_paged(layout, [9001])
    q = torch.randn(1, 128, 576, device=CUDA).bfloat16()
    out, lse = mla(q[..., :512], q[..., 512:], table, lengths, layout, 0, scale=0.07)
    want, want_lse = reference.mla(q[:, None, :, :512], q[:, None, :, 512:], table, lengths, layout, 0, scale=0.07)
    close(out, want[:, 0], tolerance(q.dtype))
    close(lse, want_lse[:, 0], 2e-3)
