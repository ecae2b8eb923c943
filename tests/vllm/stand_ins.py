"""What of vLLM's objects the connector's parts look at, with vLLM's names for it, and its way of hashing blocks."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvtier_client.vllm.hashes import Hashing


class AttentionSpec:
    pass


@dataclass
class FullAttentionSpec(AttentionSpec):
    block_size: int = 16
    dtype: str = "torch.bfloat16"


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    cache_dtype_str: str = "fp8_ds_mla"


@dataclass
class SlidingWindowSpec(AttentionSpec):
    block_size: int = 16
    sliding_window: int = 64
    dtype: str = "torch.bfloat16"


@dataclass
class MambaSpec:
    block_size: int = 16


@dataclass
class UniformTypeKVCacheSpecs:
    block_size: int
    kv_cache_specs: dict[str, Any]


def cache_config(*specs: Any, **more: Any) -> Any:
    groups = [
        SimpleNamespace(layer_names=[f"model.layers.{n}.attn"], kv_cache_spec=spec) for n, spec in enumerate(specs)
    ]
    return SimpleNamespace(num_blocks=64, kv_cache_groups=groups, **more)


class HfConfig:
    _commit_hash: str | None = None

    def __init__(self, **fields: Any) -> None:
        self.fields = {"hidden_size": 64, "_name_or_path": "somewhere", **fields}
        self.rope_scaling = fields.get("rope_scaling")

    def to_dict(self) -> dict[str, Any]:
        return self.fields


def vllm_config(**changes: Any) -> Any:
    """Of a model on the hub. Changes by name: "model.dtype" is of the model's configuration."""
    hub = HfConfig()
    hub._commit_hash = "0123abcd"
    made = SimpleNamespace(
        model_config=SimpleNamespace(
            model="org/model", hf_config=hub, dtype="torch.bfloat16", quantization=None, seed=0, use_mla=False
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        load_config=SimpleNamespace(load_format="auto"),
        lora_config=None,
        speculative_config=None,
    )
    for path, value in changes.items():
        *parts, last = path.split("__")
        place = made
        for part in parts:
            place = getattr(place, f"{part}_config" if hasattr(place, f"{part}_config") else part)
        setattr(place, last, value)
    return made


def sha256(what: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(what)).digest()


def hash_block(function: Any, parent: bytes, tokens: Sequence[int], extra: Any) -> bytes:
    return bytes(function((parent, tuple(tokens), extra)))


def extra_keys(request: Request, start: int, stop: int, at: int) -> tuple[Any, int]:
    """Salt in the first block, the adapter in all, images where they are: as `generate_block_hash_extra_keys` does it."""
    found: list[Any] = []
    if request.lora_request is not None:
        found.append(("lora", request.lora_request.lora_name, request.lora_request.lora_path))
    for position, identifier in request.images[at:]:
        if position >= stop:
            break
        found.append(("mm", identifier, position - start))
        at += 1
    if start == 0 and request.cache_salt:
        found.append(("cache_salt", request.cache_salt))
    return tuple(found) or None, at


def hashing(seed: str = "vllm-none-hash", algorithm: str = "sha256") -> Hashing:
    """Of a process whose root was derived from `seed`."""
    return Hashing(algorithm, sha256(seed), sha256, hash_block, extra_keys)


@dataclass
class Request:
    """A request as the scheduler has it. `block_hashes` follow from its tokens when `known` is called."""

    request_id: str
    all_token_ids: list[int]
    lora_request: Any = None
    cache_salt: str | None = None
    images: list[tuple[int, str]] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    resumable: bool = False
    skip_reading_prefix_cache: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def known(self, by: Hashing | None = None, tokens: int = 16) -> Request:
        """With the hashes of its full blocks, as the process of `by` has them."""
        by = by or hashing()
        self.block_hashes.clear()
        at, parent = 0, by.root
        for start in range(0, len(self.all_token_ids) - tokens + 1, tokens):
            extra, at = extra_keys(self, start, start + tokens, at)
            parent = hash_block(by.sha256, parent, self.all_token_ids[start : start + tokens], extra)
            self.block_hashes.append(parent)
        return self


@dataclass
class New:
    """Of a scheduler's output: a request that is scheduled for the first time."""

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int = 0


@dataclass
class Cached:
    """Those that were scheduled before."""

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[Any] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)


def output(new: Sequence[New] = (), cached: Cached | None = None, **tokens: int) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=list(new), scheduled_cached_reqs=cached or Cached(), num_scheduled_tokens=tokens
    )
