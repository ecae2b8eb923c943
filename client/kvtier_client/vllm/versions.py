"""All that differs between the versions of vLLM that are served, 0.26 to 0.33; the only module besides `connector` that
imports it.

What there is is asked for, not concluded from a version's number: vLLM is built from source more often than released.
"""

from __future__ import annotations

import importlib
from typing import Any

from kvtier_client.vllm.events import Announced
from kvtier_client.vllm.hashes import Hashing

base: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")


def version() -> str:
    return str(importlib.import_module("vllm.version").__version__)


def hashing(vllm_config: Any) -> Hashing:
    """How this process hashes blocks. To be asked when the engine is up: its root is set after its connector is made."""
    utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
    try:
        functions: Any = importlib.import_module("vllm.utils.hashing")
    except ImportError:  # one module of everything
        functions = importlib.import_module("vllm.utils")
    return Hashing(
        str(vllm_config.cache_config.prefix_caching_hash_algo),
        bytes(utils.NONE_HASH),
        functions.sha256,
        utils.hash_block_tokens,
        utils.generate_block_hash_extra_keys,
    )


def tells_failed_requests() -> bool:
    """Whether a worker can report that a request's load failed. Without, only blocks can be named, which hybrid models
    have several of under one number."""
    return hasattr(base, "KVConnectorTransferResults")


def transfer_results(finished: set[str], failed: set[str]) -> Any:
    return base.KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)


def replicas(vllm_config: Any, kv_cache_config: Any) -> int:
    """How many ranks in a row have the same KV: all of them with latent attention, unless the engine says otherwise."""
    told = getattr(kv_cache_config, "kv_tp_replicas", None)
    if told is not None:
        return int(told)
    return int(vllm_config.parallel_config.tensor_parallel_size) if vllm_config.model_config.use_mla else 1


def backend_of(vllm_config: Any, layer: str) -> str:
    """The name of a layer's attention backend, which may keep K in an order of its own."""
    made = vllm_config.compilation_config.static_forward_context.get(layer)
    backend = getattr(made, "attn_backend", None)
    if backend is None and hasattr(made, "get_attn_backend"):
        backend = made.get_attn_backend()
    return str(backend.get_name()) if backend is not None else ""


def take_over_failures(kv_transfer_config: Any) -> bool:
    """Have vLLM compute what a load did not bring, instead of failing the request; whether that had to be changed."""
    if getattr(kv_transfer_config, "kv_load_failure_policy", "recompute") == "recompute":
        return False
    kv_transfer_config.kv_load_failure_policy = "recompute"
    return True


def wants_events(vllm_config: Any) -> bool:
    """Whether the engine publishes KV events."""
    config = getattr(vllm_config, "kv_events_config", None)
    return bool(config is not None and config.enable_kv_cache_events)


def stored_event(page: Announced) -> Any:
    """As vLLM tells of its own blocks. kvtier's are wherever kvtierd has them: the nearest name is the host's memory."""
    parent = None if page.parent is None else _event_hash(page.parent)
    lora = {"lora_id": page.lora_id, "lora_name": page.lora_name}
    return _event(
        "BlockStored", page, parent_block_hash=parent, token_ids=page.tokens, block_size=page.block_tokens, **lora
    )


def removed_event(page: Announced) -> Any:
    return _event("BlockRemoved", page)


def _event(kind: str, page: Announced, **fields: Any) -> Any:
    events: Any = importlib.import_module("vllm.distributed.kv_events")
    made = getattr(events, kind)
    fields |= {
        "block_hashes": [_event_hash(one) for one in page.hashes],
        "medium": getattr(events, "MEDIUM_CPU", "CPU"),
        "group_idx": page.group,
    }
    return made(**{name: value for name, value in fields.items() if name in made.__struct_fields__})


def _event_hash(digest: bytes) -> Any:
    """As vLLM's own events write it."""
    utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
    convert = getattr(utils, "maybe_convert_block_hash", None)
    return convert(digest) if convert is not None else digest
