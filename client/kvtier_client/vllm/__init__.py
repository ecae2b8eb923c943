"""kvtier's KV connector for vLLM 0.26 to 0.33, out of tree.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier_client.vllm", "kv_role": "kv_both"}'

    connector            vLLM's interface, thin
    scheduler, worker    the two sides of it
    asker                what the scheduler's side asks kvtierd
    messages             what one tells the other
    groups, naming, hashes    what can be served, and what pages are called
    blocks               where an engine's blocks lie, and copies
    link, events, stats, options
    versions             all that differs between versions of vLLM

Where this deviates from the obvious: nothing delays the freeing of blocks (see `worker`), every load is asynchronous (see
`scheduler`), and namespaces are told by the workers (see `connector`). Only `connector` and `versions` import vLLM, when the
class is asked for. See docs/vllm.md.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "KVTierConnector":
        from kvtier_client.vllm.connector import KVTierConnector

        return KVTierConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
