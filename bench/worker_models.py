"""Models and daemons for the benches of the native worker: real shapes, random weights, one GPU (or, small, the CPU)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from core import daemon, say
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier_client import Client

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if ON_GPU else "cpu"

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
}


def random_llama(shape: dict[str, Any], **changes: Any) -> Any:
    """Of that shape, in bfloat16 (float32 on the CPU), the same in every process; it never ends a text by itself."""
    say(f"a Llama of {shape['num_hidden_layers']} layers of {shape['hidden_size']}, random weights")
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if ON_GPU else torch.float32)
    try:
        with torch.device(DEVICE):
            model: Any = LlamaForCausalLM(LlamaConfig(**{**shape, "eos_token_id": None, "bos_token_id": 1, **changes}))
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def token_bytes(config: Any) -> int:
    """KV bytes of a token."""
    width = 2 if ON_GPU else 4
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * width)


@contextmanager
def kvtierd(directory: Path, kv: int, *, host: str, slab: str) -> Iterator[str]:
    """A private kvtierd whose fastest tier holds `kv` bytes: GPU 0's memory, or host memory on the CPU. Its endpoint."""
    if ON_GPU:
        first = (
            *("tiers.hbm.medium=cuda", "tiers.hbm.device=0"),
            *(f"tiers.hbm.capacity={kv}", f"tiers.hbm.slab={slab}"),
        )
        with daemon(directory, f"tiers.host.slab={slab}", host=host, first=first) as running:
            yield running.endpoint
    else:
        with daemon(directory, host=str(kv)) as running:
            yield running.endpoint


def attach(endpoint: str, name: str) -> Client:
    return Client(endpoint, name=name, device=DEVICE if ON_GPU else None)
