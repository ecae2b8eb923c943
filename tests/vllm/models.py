"""Small things that vLLM's tests need and no package has: models with sliding windows, with latent attention, with sounds,
and adapters. Their weights are drawn; what they say means nothing, but follows from every token before.

Runs where vLLM is installed: an engine makes its model itself (see `tests.vllm.engine`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def windows(folder: Path, tokenizer: Path) -> None:
    """Gemma 3's shape: five layers that see 64 tokens, and one that sees all."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(3)
    config: Any = Gemma3TextConfig(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        sliding_window=64,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        query_pre_attn_scalar=32,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    _save(Gemma3ForCausalLM(config), folder, tokenizer)


def latent(folder: Path, tokenizer: Path) -> None:
    """DeepSeek-V2's shape: two layers whose heads share one latent vector a token, of the size vLLM's kernel is built for."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(4)
    scaled = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 2048}
    scaled |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    config: Any = DeepseekV2Config(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=2,
        n_routed_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        max_position_embeddings=4096,
        rope_parameters=scaled,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    _save(DeepseekV2ForCausalLM(config), folder, tokenizer)


def sounds(folder: Path, tokenizer: Path) -> None:
    """Qwen2-Audio's shape: what a small tower hears stands among the tokens, in places whose token is always the same."""
    from safetensors.torch import load_file, save_file
    from transformers import (
        AutoTokenizer,
        Qwen2AudioConfig,
        Qwen2AudioEncoderConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        Qwen2Config,
        WhisperFeatureExtractor,
    )

    torch.manual_seed(5)
    heard: Any = Qwen2AudioEncoderConfig(
        d_model=64, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=64, num_mel_bins=32
    )
    said: Any = Qwen2Config(
        vocab_size=49155,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    config: Any = Qwen2AudioConfig(audio_config=heard, text_config=said, audio_token_index=49152)
    _save(Qwen2AudioForConditionalGeneration(config), folder)
    weights = folder / "model.safetensors"  # saved with one "model" more in their names than those on the hub have
    named = {name.replace(".model.model.", ".model."): tensor for name, tensor in load_file(weights).items()}
    save_file(named, weights, {"format": "pt"})
    made: Any = AutoTokenizer.from_pretrained(tokenizer)
    made.add_tokens(["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"], special_tokens=True)
    Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=32), made).save_pretrained(folder)


def _save(model: Any, folder: Path, tokenizer: Path | None = None) -> None:
    """With weights large enough that every token before counts."""
    from transformers import AutoTokenizer

    model = model.float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
    model.save_pretrained(folder)
    if tokenizer is not None:
        made: Any = AutoTokenizer.from_pretrained(tokenizer)
        made.save_pretrained(folder)


def adapter(folder: Path, seed: int) -> None:
    """For SmolLM2-135M: of rank 8, on queries and values, large enough to change what it says."""
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(30):
        for name, width in (("q_proj", 576), ("v_proj", 192)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(8, 576, generator=draw) * 0.05
            tensors[f"{place}.lora_B.weight"] = torch.randn(width, 8, generator=draw) * 0.3
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "lora_dropout": 0.0}
    described |= {"target_modules": ["q_proj", "v_proj"], "bias": "none", "base_model_name_or_path": "smollm2"}
    (folder / "adapter_config.json").write_text(json.dumps(described))
