"""Attention of PyTorch and of vLLM as peers of the kernels, each over the layout that suits it best.

cuDNN and FlashAttention 2 read contiguous K and V, which no paged cache can offer: they are limits rather than rivals.
For decode the heads that share a kv head are given as query tokens without a mask, which is the same attention and
saves both from reading K and V once a head. FlexAttention is PyTorch's paged one, over pages in a shuffled order.
vLLM's unified kernel runs where vLLM can be imported. The values are those of our own units, copied.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

Launch = Callable[[], torch.Tensor]
VLLM_SEGMENTS = 16
VLLM_SPLIT_BELOW = 128  # launches of fewer programs than this are split over the keys, as vLLM's backend does


def contiguous(cache: torch.Tensor, order: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, `[batch, kv_heads, length, dim]`, of pages `[pages, 2, kv_heads, page, dim]` used in `order`."""
    count, _, heads, page, dim = cache.shape
    shape = (batch, heads, count // batch * page, dim)
    keys, values = (
        torch.empty(shape, dtype=cache.dtype, device="cuda"),
        torch.empty(shape, dtype=cache.dtype, device="cuda"),
    )
    for b, pages in enumerate(order.view(batch, -1)):
        for i, target in enumerate((keys, values)):
            target[b].view(heads, -1, page, dim).copy_(cache[pages, i].transpose(0, 1))
    return keys, values


def sdpa_decode(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, backend: str) -> Launch:
    """backend: "cudnn" or "flash"; q: `[batch, heads, dim]`."""
    chosen = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[backend]
    rows = q.view(q.shape[0], keys.shape[1], -1, q.shape[-1])

    def run() -> torch.Tensor:
        with sdpa_kernel(chosen):
            return functional.scaled_dot_product_attention(rows, keys, values).view(q.shape)

    return run


def flash_prefill(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Launch:
    """q: `[queries, heads, dim]`, the last tokens of one sequence. cuDNN has no causal mask aligned to the end here."""
    rows = q.transpose(0, 1)[None]
    bias = causal_lower_right(len(q), keys.shape[2])

    def run() -> torch.Tensor:
        out = functional.scaled_dot_product_attention(rows, keys, values, attn_mask=bias, enable_gqa=True)
        return out[0].transpose(0, 1)

    return run


def flex(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, page: int) -> Launch:
    """FlexAttention over its own page table: decode of q `[batch, heads, dim]`, or prefill where keys are of one sequence
    and q is `[queries, heads, dim]` of it."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    batch, heads, length, dim = keys.shape
    prefill = batch == 1 and len(q) > 1
    rows = q.transpose(0, 1)[None] if prefill else q[:, :, None]
    queries = rows.shape[2]
    total = batch * length
    paged = PagedAttention(total // page, page, batch, device="cuda")
    paged.empty_pages = torch.randperm(total // page).tolist()
    caches = [torch.empty(1, heads, total, dim, dtype=keys.dtype, device="cuda") for _ in range(2)]
    positions = torch.arange(length, device="cuda")[None]
    for b in range(batch):
        one = torch.tensor([b], device="cuda")
        paged.reserve(one, torch.tensor([length], device="cuda"))
        paged.assign(one, positions, keys[b : b + 1], values[b : b + 1], *caches)

    def causal(_b: torch.Tensor, _h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key <= query + (length - queries)

    logical = create_block_mask(causal, batch, 1, queries, length, device="cuda", BLOCK_SIZE=(128, page))
    mask = paged.convert_logical_block_mask(logical)
    compiled = torch.compile(flex_attention, dynamic=False)

    def run() -> torch.Tensor:
        out: torch.Tensor = compiled(rows, *caches, block_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1) if prefill else out[:, :, 0]

    return run


def vllm_unified(q: torch.Tensor, cache: torch.Tensor, order: torch.Tensor, batch: int) -> Launch:
    """Decode of q `[batch, heads, dim]`, or prefill of a batch of one, over pages as in `contiguous`."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    pages, page, kv_heads, dim = len(cache) // batch, cache.shape[3], cache.shape[2], q.shape[-1]
    keys, values = (cache[:, i].transpose(1, 2).contiguous() for i in (0, 1))
    queries = len(q) // batch
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * queries
    lengths = torch.full((batch,), pages * page, dtype=torch.int32, device="cuda")
    table, out = order.view(batch, -1).int(), torch.empty_like(q)
    scale = torch.ones(batch, kv_heads, dtype=torch.float32, device="cuda")
    split = VLLM_SPLIT_BELOW // kv_heads
    partial = torch.empty(max(split, batch), q.shape[1], VLLM_SEGMENTS, dim, dtype=torch.float32, device="cuda")

    def run() -> torch.Tensor:
        unified_attention(
            q=q, k=keys, v=values, out=out, cu_seqlens_q=starts, max_seqlen_q=queries, seqused_k=lengths,
            max_seqlen_k=pages * page, softmax_scale=dim**-0.5, causal=True, window_size=(-1, -1), block_table=table,
            softcap=0.0, q_descale=None, k_descale=scale, v_descale=scale, seq_threshold_3D=split,
            num_par_softmax_segments=VLLM_SEGMENTS, softmax_segm_output=partial,
            softmax_segm_max=partial[..., 0].contiguous(), softmax_segm_expsum=partial[..., 0].contiguous(),
        )  # fmt: skip
        return out

    return run
