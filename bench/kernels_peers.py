"""FlashInfer as a peer of the kernels: the same memory and the same queries, through its own wrappers.

Its HND pages are our units of one layer, byte for byte, so nothing is copied and nobody gets a better layout. Kernels
are compiled on first use, which takes minutes: `python bench/kernels_peers.py` does that ahead, for all that
`bench/kernels.py --flashinfer` runs.
"""

# ruff: noqa: BLE001 - lambdas are timed in the loop that makes them; a peer that fails is a dash
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

HEADS, KV_HEADS, DIM = 64, 8, 128


def _workspace() -> torch.Tensor:
    return torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")


def _pages(batch: int, length: int, page: int, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pages = length // page
    indptr = torch.arange(batch + 1, dtype=torch.int32) * pages
    return indptr, order.int(), torch.full((batch,), page, dtype=torch.int32)


def decode(
    q: torch.Tensor, cache: torch.Tensor, order: torch.Tensor, batch: int, length: int, page: int
) -> Callable[[], torch.Tensor]:
    """cache: `[pages, 2, kv_heads, page, dim]`; order: the pages of all sequences, one after another."""
    import flashinfer

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(), "HND", use_tensor_cores=True)
    indptr, indices, last = _pages(batch, length, page, order)
    wrapper.plan(
        indptr, indices, last, HEADS, KV_HEADS, DIM, page, q_data_type=q.dtype, kv_data_type=cache.dtype
    )  # fmt: skip
    return lambda: wrapper.run(q, cache)


def prefill(
    q: torch.Tensor, cache: torch.Tensor, order: torch.Tensor, length: int, page: int, backend: str
) -> Callable[[], torch.Tensor]:
    """One sequence of `length` tokens, of which the last len(q) are the queries."""
    import flashinfer

    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "HND", backend=backend)
    indptr, indices, last = _pages(1, length, page, order)
    starts = torch.tensor([0, len(q)], dtype=torch.int32)
    wrapper.plan(
        starts, indptr, indices, last, HEADS, KV_HEADS, DIM, page, causal=True, q_data_type=q.dtype,
        kv_data_type=cache.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(q, cache)


def mla(
    ql: torch.Tensor, qr: torch.Tensor, rows: torch.Tensor, order: torch.Tensor, batch: int, length: int, scale: float
) -> Callable[[], torch.Tensor]:
    """rows: `[pages, page, 576]`, which FlashInfer takes as two caches."""
    import flashinfer

    page, heads = rows.shape[1], ql.shape[1]
    latent, rope = rows[..., :512].contiguous(), rows[..., 512:].contiguous()
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(_workspace(), backend="fa3")
    indptr, indices, _ = _pages(batch, length, page, order)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    lengths = torch.full((batch,), length, dtype=torch.int32)
    wrapper.plan(
        starts.cuda(), indptr.cuda(), indices, lengths.cuda(), heads, 512, 64, page, False, scale, ql.dtype, rows.dtype
    )
    return lambda: wrapper.run(ql, qr, latent, rope)


def compile_all() -> None:
    """Run each kernel once, small."""
    order = torch.arange(2, device="cuda")
    cache = torch.randn(2, 2, KV_HEADS, 64, DIM, device="cuda").bfloat16()
    q = torch.randn(1, HEADS, DIM, device="cuda").bfloat16()
    jobs: dict[str, Callable[[], Any]] = {
        "decode": lambda: decode(q, cache, order, 1, 128, 64)(),
        "decode float8": lambda: decode(q, cache.to(torch.float8_e4m3fn), order, 1, 128, 64)(),
        "prefill fa3": lambda: prefill(q, cache, order, 128, 64, "fa3")(),
        "prefill fa2": lambda: prefill(q, cache, order, 128, 64, "fa2")(),
        "mla": lambda: mla(
            torch.randn(1, 16, 512, device="cuda").bfloat16(), torch.randn(1, 16, 64, device="cuda").bfloat16(),
            torch.randn(2, 64, 576, device="cuda").bfloat16(), order, 1, 128, 0.07,
        )(),
    }  # fmt: skip
    for name, job in jobs.items():
        try:
            job()
            torch.cuda.synchronize()
            print(f"flashinfer {name}: ready", flush=True)
        except Exception as error:
            print(f"flashinfer {name}: {type(error).__name__} {str(error)[:300]}", flush=True)


if __name__ == "__main__":
    compile_all()
