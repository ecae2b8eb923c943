"""Small things that vLLM's tests need and no package has: a model with sliding windows, and adapters. Their weights are drawn;
what they say means nothing, but follows from every token before.

    python -m tests.vllm.models FOLDER TOKENIZER        makes `windows`

Runs where vLLM is installed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch


def windows(folder: Path, tokenizer: Path) -> None:
    """Gemma 3's shape: five layers that see 64 tokens, and one that sees all."""
    from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

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
    model: Any = Gemma3ForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
    model.save_pretrained(folder)
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


if __name__ == "__main__":
    windows(Path(sys.argv[1]), Path(sys.argv[2]))
