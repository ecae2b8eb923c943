"""Which of the two ways of reading and writing pages a forward pass takes: kernels on a GPU, plain PyTorch elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.layout import AttentionLayout
from kvtier_client.transformers.attention import Batch, Part
from kvtier_client.transformers.gather import GatherBatch


def make_batch(layout: AttentionLayout, parts: Sequence[Part], device: torch.device) -> Batch:
    if device.type != "cuda":
        return GatherBatch(layout, parts)
    from kvtier_client.transformers.launch import LaunchBatch  # it brings Triton

    return LaunchBatch.of(layout, parts, device)
