"""What a Transformers model's KV is and what it is called: its layout, and the namespace its pages are shared under.

A namespace's `revision` names contents. Unless one is given it is a digest of the weights, so that new weights under an
old name find nothing, wherever they came from. What else decides about KV (rotary settings, windows, norms) stands in
the configuration, of which a digest goes along.

Models that this package cannot serve are refused here, with what it is about them: attention that keeps something else
than K and V a token (latents, states, layers that share), or that does not go through Transformers' attention interface.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.errors import InvalidRequest, LayoutError
from kvtier.layout import AttentionLayout, DType
from kvtier_client.client import Client
from kvtier_client.namespace import NamespaceClient

_DTYPES: dict[torch.dtype, DType] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
_LAYERS = {"full_attention", "sliding_attention"}
_FOREIGN = {
    "kv_lora_rank": "it caches latents (multi-head latent attention)",
    "num_kv_shared_layers": "some of its layers share the KV of others",
    "is_encoder_decoder": "it is an encoder and a decoder",
    "alibi": "its attention is biased by distance (ALiBi)",
}
_NOT_ABOUT_KV = {
    *("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "pad_token_id", "bos_token_id"),
    *("eos_token_id", "return_dict", "output_hidden_states", "output_attentions", "id2label", "label2id"),
    *("attention_dropout", "initializer_range", "problem_type", "chunk_size_feed_forward"),
}
_WORDS = 1 << 22
"""Of 8 bytes, digested at a time: bounds the memory that takes."""


@dataclass(frozen=True, slots=True)
class Description:
    """A model as its pages see it. `longest` is the context it was made for, None where the configuration does not say;
    `stops` are its end-of-sequence ids."""

    layout: AttentionLayout
    heads: int
    vocabulary: int
    longest: int | None
    stops: frozenset[int]


def describe(model: Any, *, unit_tokens: int = 16) -> Description:
    """Raises LayoutError for a model whose KV cannot be kept in pages."""
    config = model.config.get_text_config(decoder=True)
    refused = [why for name, why in _FOREIGN.items() if getattr(config, name, None)]
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    if others:
        refused.append(f"it has layers of {', '.join(others)}")
    if not getattr(model, "_supports_attention_backend", False):
        refused.append("its attention does not go through Transformers' attention interface")
    if model.dtype not in _DTYPES:
        refused.append(f"its KV is {model.dtype}")
    if refused:
        raise LayoutError(f"{type(model).__name__} cannot run on pages: {'; '.join(refused)}")
    heads = config.num_attention_heads
    layout = AttentionLayout(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=_DTYPES[model.dtype],
        unit_tokens=unit_tokens,
    )
    return Description(
        layout, heads, config.vocab_size, getattr(config, "max_position_embeddings", None), _stops(model)
    )


def check_device(model: Any, client: Client) -> None:
    """Raises InvalidRequest where kernels of the model's GPU could not read what the client is lent."""
    where = model.device
    if where.type == "cuda" and (client.gpu is None or client.gpu.ordinal != (where.index or 0)):
        raise InvalidRequest(f"the model is on {where}, the client is not: make it with Client(device='{where}')")


def open_namespace(
    client: Client,
    model: Any,
    *,
    name: str = "",
    revision: str = "",
    salt: str = "",
    unit_tokens: int = 16,
    cap_tokens: int = 256,
) -> NamespaceClient:
    """The pages of `model`, shared with all who have the same weights and configuration (and `salt`).

    `name` is what the operator reads, the model's type by default. `revision` saves reading the weights, where the
    caller can vouch that it names them (a commit, a digest). Raises LayoutError, DaemonLost.
    """
    layout = describe(model, unit_tokens=unit_tokens).layout
    return client.namespace(
        layout,
        model=name or model.config.model_type,
        revision=revision or weights_digest(model),
        extra={"config": config_digest(model.config)},
        salt=salt,
        cap_tokens=cap_tokens,
    )


def config_digest(config: Any) -> str:
    """Of what a configuration says about the arithmetic of the model."""
    said = {name: value for name, value in config.to_dict().items() if name not in _NOT_ABOUT_KV and name[:1] != "_"}
    return hashlib.blake2b(json.dumps(said, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def cache_argument(model: Any) -> str:
    """What this version of Transformers calls the cache that a model is given."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def weights_digest(model: Any) -> str:
    """Of every weight and buffer of the model, read where they lie (an 8B model on a GPU: a fraction of a second).

    It tells versions apart; it is not made to withstand somebody who forges weights to collide.
    """
    digest = hashlib.blake2b(digest_size=16)
    multipliers: dict[torch.device, torch.Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in sorted(model.state_dict().items()):
        if (tensor.data_ptr(), tensor.shape) in seen:  # tied to one that was read already
            continue
        seen.add((tensor.data_ptr(), tensor.shape))
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.device not in multipliers:
            multipliers[tensor.device] = _multipliers(tensor.device)
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        tail = len(data) % 8
        if tail:
            digest.update(bytes(data[-tail:].tolist()))
            data = data[:-tail]
        words = data.view(torch.int64)
        sums = [(chunk * multipliers[tensor.device][:, : len(chunk)]).sum(1) for chunk in words.split(_WORDS)]
        if sums:
            digest.update(torch.stack(sums).cpu().numpy().tobytes())
    return digest.hexdigest()


def _multipliers(device: torch.device) -> torch.Tensor:
    """Two rows of odd numbers that look drawn (the finaliser of splitmix64), the same everywhere."""
    x = torch.arange(2 * _WORDS, dtype=torch.int64, device=device) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        x = (x ^ (x >> shift)) * factor
    return (x | 1).view(2, _WORDS)


def _stops(model: Any) -> frozenset[int]:
    """End-of-sequence ids, from the generation settings or else the configuration."""
    for source in (getattr(model, "generation_config", None), model.config.get_text_config(decoder=True)):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
    return frozenset()
