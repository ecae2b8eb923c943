"""Models for the worker's tests on a GPU, for this process and for others: of random weights, and SmolLM2 where it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier_client.transformers import Request, Sampling, Worker

SMOLLM2 = os.environ.get("KVTIER_SMOLLM2", "")
"""A folder as `bench.demo.smollm.unpack` leaves it."""


def small(dtype: torch.dtype = torch.float32, layers: int = 4) -> Any:
    """A Llama of random weights, the same in every process. In float32 its greedy text has no ties to break."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        eos_token_id=None,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).to("cuda", dtype).eval()


def smollm2(dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """(model, tokenizer)."""
    from bench.demo import smollm

    model, tokenizer = smollm.load(Path(SMOLLM2))
    return model.to("cuda", dtype), tokenizer


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 1000, (length,), generator=generator).tolist()


def plain(model: Any, tokens: list[int], count: int, attention: str = "sdpa") -> list[int]:
    """What the model says by itself, greedily."""
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    ids = torch.tensor([tokens], device="cuda")
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    model.set_attn_implementation(before)
    return out[0, len(tokens) :].tolist()


def run(worker: Worker) -> None:
    while worker.step():
        worker.check()


def said(request: Request) -> list[list[int]]:
    samples: list[list[int]] = [[] for _ in request.finish]
    for token in request:
        samples[token.sample].append(token.token)
    return samples


def ask(worker: Worker, tokens: list[int], count: int) -> tuple[list[int], int]:
    """(its answer, how many tokens of the prompt were cached)."""
    request = worker.submit(tokens, Sampling(max_tokens=count))
    run(worker)
    return said(request)[0], request.cached_tokens
