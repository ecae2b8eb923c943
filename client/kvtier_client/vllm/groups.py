"""What of an engine's KV cache configuration matters here: its groups, and why some cannot be served.

vLLM's hybrid memory allocator keeps layers of a kind in a group with blocks of their own: full attention and sliding-window
attention, say. A page is of one group, on one rank. Classes are told by name along their bases, so that nothing of vLLM is
imported and a subclass is what it derives from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_WHOLE = {"FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"}
"""Their blocks hold the KV of the block's own tokens and nothing else, so a prefix's blocks can be shared."""
_OTHER = {
    "MambaSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "HiddenStateCacheSpec",
    "CircularBufferSpec",
    "RSWASpec",
}


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group. `block_tokens` are those of a block; `kind` names its attention, window and dtype."""

    number: int
    layers: tuple[str, ...]
    block_tokens: int
    kind: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The groups of an engine, and `unserved`: why nothing is kept for it, or "".

    `step` tokens are what hits are multiples of; `hash_tokens` those of one of vLLM's block hashes; `drop` of a hit's last
    tokens are computed again, since a draft model's KV of a token depends on the one after it.
    """

    groups: tuple[Group, ...]
    step: int
    hash_tokens: int
    drop: int
    unserved: str


def plan(vllm_config: Any, kv_cache_config: Any) -> Plan:
    """Decide from the engine's configuration. Never raises for a kind of model: it says why it is not served."""
    groups = tuple(
        Group(number, tuple(group.layer_names), int(group.kv_cache_spec.block_size), _kind(group.kv_cache_spec))
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
    )
    sizes = [group.block_tokens for group in groups]
    alignment = getattr(kv_cache_config, "cache_hit_alignment_tokens", None) or 1
    step = math.lcm(*sizes, alignment) if sizes else 1
    hash_tokens = getattr(kv_cache_config, "hash_block_size", None) or (sizes[0] if len(sizes) == 1 else 0)
    speculative = getattr(vllm_config, "speculative_config", None)
    drop = step if speculative is not None and speculative.use_eagle() else 0
    return Plan(groups, step, hash_tokens, drop, _unserved(vllm_config, kv_cache_config, sizes, hash_tokens))


def _unserved(vllm_config: Any, kv_cache_config: Any, sizes: list[int], hash_tokens: int) -> str:
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} is {getattr(parallel, name)}: a block's tokens are spread over ranks"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "calculate_kv_scales: the scales of a KV cache would be those of another process's first prompt"
    if not sizes:
        return "the model keeps no KV"
    if not hash_tokens or any(size % hash_tokens for size in sizes):
        return f"blocks of {sizes} tokens, and hashes of blocks of {hash_tokens or 'unknown size'}"
    for group in kv_cache_config.kv_cache_groups:
        for spec in _layer_specs(group.kv_cache_spec):
            names = {base.__name__ for base in type(spec).__mro__}
            if not names & _WHOLE or names & _OTHER:
                return f"{group.layer_names[0]} has {type(spec).__name__}, whose state is more than the KV of a block's tokens"
            if getattr(spec, "prefix_replay_tokens", 0) or not getattr(spec, "prefix_cacheable", True):
                return f"{group.layer_names[0]} has {type(spec).__name__}, which is not cached by prefix"
        if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
            return f"{group.layer_names[0]} is of a group that vLLM moves itself"
    if getattr(kv_cache_config, "needs_kv_cache_zeroing", False):
        return "layers keep KV in more than one precision, and vLLM clears blocks at times that it does not tell"
    return ""


def _layer_specs(spec: Any) -> Iterator[Any]:
    """The specs of a group's layers; most groups have one for all."""
    inner = getattr(spec, "kv_cache_specs", None)
    yield from inner.values() if inner else [spec]


def _kind(spec: Any) -> str:
    found: list[str] = []
    for one in _layer_specs(spec):
        window = getattr(one, "sliding_window", None) or getattr(one, "attention_chunk_size", None)
        quantised = getattr(one, "cache_dtype_str", None)
        text = f"{type(one).__name__} {getattr(one, 'dtype', '')} {window or ''} {quantised or ''}".strip()
        if text not in found:
            found.append(text)
    return ", ".join(found)
