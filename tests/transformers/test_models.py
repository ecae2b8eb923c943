"""Architectures that differ in their attention, tiny and of random weights: each says on pages what it says by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from kvtier.errors import InvalidRequest, LayoutError
from kvtier_client.transformers import GenerationCache, Sampling, Worker, open_namespace
from kvtier_client.transformers.model import config_digest, describe, weights_digest
from tests.system.conftest import Daemon
from tests.transformers.conftest import Plain, run, said

# Transformers 5.24 calls it `cache`; earlier ones know no other name than this.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "phi3": ("Phi3", {"sliding_window": 20}),
    "gemma2": ("Gemma2", {"sliding_window": 12, "layer_types": ALTERNATING, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3", {"sliding_window": 12, "layer_types": ALTERNATING}),
    "gpt_oss": (
        "GptOss",
        {
            "sliding_window": 12,
            "layer_types": ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "initializer_range": 0.5,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "olmo2": ("Olmo2", {}),
}


def build(name: str, **changes: Any) -> Any:
    family, own = MODELS[name]
    torch.manual_seed(1)
    prefix = family + ("Text" if family == "Gemma3" else "")
    config = getattr(transformers, f"{prefix}Config")(**{**SHAPE, **own, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    if name in ("gemma2", "gpt_oss"):  # PyTorch's fused attention knows no caps and no sinks
        model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_model_says_on_pages_what_it_says_by_itself(name: str, daemon: Daemon) -> None:
    model = build(name)
    plain = Plain(model)
    prompts = [[(11 * at * (1 + seed)) % 90 + 3 for at in range(length)] for seed, length in enumerate((50, 7, 33))]
    wanted = [plain.says(prompt, 20) for prompt in prompts]
    assert len({tuple(answer) for answer in wanted}) > 1, "this model says the same to everything: it tests nothing"
    with daemon.client() as client:
        worker = Worker(model, client, step_tokens=24)
        for _ in range(2):
            requests = [worker.submit(prompt, Sampling(max_tokens=20)) for prompt in prompts]
            run(worker)
            assert [said(request)[0] for request in requests] == wanted
        assert requests[0].cached_tokens == 48
        worker.close()
        ids = torch.tensor(prompts[:1])
        with GenerationCache(model, client, ids) as cache, torch.inference_mode():
            out = model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False)
        assert out[0, 50:].tolist() == wanted[0] and cache.cached_tokens == [48]


def test_models_that_cannot_run_on_pages_are_refused_with_the_reason() -> None:
    shape = {**SHAPE, "num_hidden_layers": 2}
    cases = {
        "latents": transformers.DeepseekV3ForCausalLM(
            transformers.DeepseekV3Config(**{**shape, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1})
        ),
        "linear_attention": transformers.Qwen3NextForCausalLM(
            transformers.Qwen3NextConfig(**{**shape, "num_experts": 2, "num_experts_per_tok": 1})
        ),
        "attention interface": transformers.BloomForCausalLM(
            transformers.BloomConfig(vocab_size=96, hidden_size=64, n_layer=2, n_head=4)
        ),
    }
    for reason, model in cases.items():
        with pytest.raises(LayoutError, match=reason):
            describe(model)


def test_a_model_on_a_gpu_needs_a_client_on_it(daemon: Daemon) -> None:
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda:1"))
    client = daemon.client()
    for make in (lambda: Worker(on_gpu, client), lambda: GenerationCache(on_gpu, client, torch.zeros(1, 3))):
        with pytest.raises(InvalidRequest, match=r"Client\(device='cuda:1'\)"):
            make()


def test_weights_and_settings_are_what_pages_are_known_by(daemon: Daemon) -> None:
    model, same = build("qwen3"), build("qwen3")
    with daemon.client() as client:
        seed = open_namespace(client, model).seed
        assert open_namespace(client, same).seed == seed
        assert open_namespace(client, model, salt="user").seed != seed
        before = weights_digest(same)
        with torch.no_grad():
            same.model.layers[3].mlp.down_proj.weight[5, 7] += 1e-3
        assert weights_digest(same) != before
        assert open_namespace(client, same).seed != seed
        same.model.layers[3].mlp.down_proj.weight.data[5, 7] -= 1e-3
        other = build("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 20000.0})
        assert config_digest(other.config) != config_digest(model.config)
        assert open_namespace(client, other).seed != seed
        named = open_namespace(client, model, name="org/model", revision="abc")
        assert (named.spec.model, named.spec.revision) == ("org/model", "abc")
