"""Batches by kernel, in Triton's interpreter where there is no GPU, against the same batches by gather."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from kvtier.layout import AttentionLayout
from kvtier_client.transformers import GenerationCache, Sampling, Worker
from kvtier_client.transformers import batches as batches_module
from kvtier_client.transformers import generation as generation_module
from kvtier_client.transformers import worker as worker_module
from kvtier_client.transformers.attention import Part
from tests.system.conftest import Daemon
from tests.transformers.conftest import Plain, run, said

# Transformers 5.24 calls it `cache`; earlier ones know no other name than this.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

SMALL = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


@functools.cache
def tiny(window: int | None = None) -> Plain:
    """Of random weights: with 2 layers and, where it says so, a sliding window."""
    torch.manual_seed(0)
    if window is None:
        model: Any = LlamaForCausalLM(LlamaConfig(**SMALL))
    else:
        model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=window))
    return Plain(model.eval())


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have every batch launched; how many rows each had."""
    from kvtier_client.transformers.launch import LaunchBatch

    rows: list[int] = []

    def launched(layout: AttentionLayout, parts: Sequence[Part], device: torch.device) -> LaunchBatch:
        rows.append(sum(part.count for part in parts))
        return LaunchBatch.of(layout, parts, device)

    for module in (batches_module, generation_module, worker_module):
        monkeypatch.setattr(module, "make_batch", launched)
    return rows


@pytest.mark.parametrize(("window", "decoder"), [(None, True), (12, False)])
def test_a_worker_by_kernel_says_what_plain_generate_says(
    by_kernel: list[int], served: Daemon, window: int | None, decoder: bool
) -> None:
    plain = tiny(window)
    prompts = [[(7 * at + start) % 120 + 4 for at in range(length)] for start, length in ((0, 21), (1, 3))]
    with served.client() as client:
        worker = Worker(plain.model, client, step_tokens=16, max_batch=4)
        if decoder:
            worker._decoder = worker._make_decoder(False)
        for _ in range(2):
            requests = [
                worker.submit(prompt, Sampling(max_tokens=3, n=1 + (not at))) for at, prompt in enumerate(prompts)
            ]
            run(worker)
            for prompt, request in zip(prompts, requests, strict=True):
                assert said(request) == [plain.says(prompt, 3)] * request.sampling.n
        assert requests[0].cached_tokens == 16
        worker.close()
    assert by_kernel


def test_generate_by_kernel_with_padding_and_unequal_hits(by_kernel: list[int], served: Daemon) -> None:
    plain = tiny()
    long, short = [(5 * at) % 120 + 4 for at in range(18)], [9, 8, 7]
    ids = torch.tensor([long, [0] * 15 + short])
    mask = torch.tensor([[1] * 18, [0] * 15 + [1] * 3])
    with served.client() as client:
        for _ in range(2):
            with GenerationCache(plain.model, client, ids, mask) as cache, torch.inference_mode():
                out = plain.model.generate(
                    ids, attention_mask=mask, past_key_values=cache, max_new_tokens=3, do_sample=False, pad_token_id=0
                )
            assert out[:, 18:].tolist() == [plain.says(long, 3), plain.says(short, 3)]
    assert by_kernel
