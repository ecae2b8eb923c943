"""KV caches as vLLM lays them out, made without it: per-layer views [block, head, token, content] of one buffer or many.

Names are vLLM's own: L layer, B block, H head, N token, C content (K and V of a token), outermost first. NHD is LBNHC and HND
is LBHNC; blocks that hold all layers are BLHNC. vLLM before 0.32 kept K and V apart: "KVB".
"""

from __future__ import annotations

from typing import NamedTuple

import torch

LAYERS, BLOCKS, HEADS = 4, 24, 2


class Shape(NamedTuple):
    """`order` of the axes in memory; `split` is into how many kernel blocks each block is cut; `pad` in bytes a block."""

    order: str
    dtype: torch.dtype = torch.bfloat16
    heads: int = HEADS
    content: int = 128
    split: int = 1
    pad: int = 0
    tokens: int = 16


SHAPES = {
    "NHD": Shape("LBNHC"),
    "HND": Shape("LBHNC"),
    "heads outside blocks": Shape("LHBNC"),
    "all layers in a block": Shape("BLHNC"),
    "all layers in a block, NHD": Shape("BLNHC"),
    "all layers in a block, padded": Shape("BLHNC", pad=256),
    "fp8": Shape("LBHNC", dtype=torch.uint8),
    "fp8, all layers in a block": Shape("BLHNC", dtype=torch.uint8),
    "MLA": Shape("LBHNC", heads=1, content=576),
    "MLA, all layers in a block": Shape("BLHNC", heads=1, content=576),
    "fp8 MLA of 656 bytes a token": Shape("LBHNC", dtype=torch.uint8, heads=1, content=656),
    "kernel blocks of half the size": Shape("LBHNC", split=2),
    "K and V apart": Shape("LKVB"),
    "a size that no vector load takes": Shape("LBHNC", dtype=torch.uint8, heads=1, content=67, tokens=12),
}


def caches(shape: Shape, device: str = "cpu", *, layers: int = LAYERS, blocks: int = BLOCKS) -> dict[str, torch.Tensor]:
    """One tensor a layer, filled with random bytes."""
    width = torch.empty(0, dtype=shape.dtype).element_size()
    if shape.order == "LKVB":
        whole = torch.empty(
            (layers, 2, blocks, shape.tokens, shape.heads, shape.content // 2), dtype=shape.dtype, device=device
        )
        views = list(whole)
    else:
        per_kernel_block = shape.tokens // shape.split
        sizes = {"L": layers, "B": blocks * shape.split, "H": shape.heads, "N": per_kernel_block, "C": shape.content}
        strides: dict[str, int] = {}
        step = 1
        for axis in reversed(shape.order):
            strides[axis] = step + (shape.pad // width if axis == "B" else 0)
            step = strides[axis] * sizes[axis]
        whole = torch.empty(step, dtype=shape.dtype, device=device)
        logical = "LBHNC"
        views = list(whole.as_strided([sizes[axis] for axis in logical], [strides[axis] for axis in logical]))
    whole.view(torch.uint8).random_(0, 256, generator=torch.Generator(device=device).manual_seed(7))
    return {f"model.layers.{n}.attn": view for n, view in enumerate(views)}


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of its bytes."""
    return tensor.contiguous().view(torch.uint8).clone()


def by_block(tensor: torch.Tensor, blocks: int) -> torch.Tensor:
    """The bytes of a layer's cache, block by block."""
    axis = next(n for n, size in enumerate(tensor.shape) if size % blocks == 0)
    outer = tensor.movedim(axis, 0)
    return bytes_of(outer.reshape(blocks, -1))
