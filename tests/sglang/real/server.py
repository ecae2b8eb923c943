"""HiCache as one rank of an SGLang server has it, without the server: SGLang's device pool, group of host pools, the cache
controller of its unified radix tree with all its threads, its hashes and its factory. Prompts are lists of tokens; what their KV is follows from the tokens.

As a program, a server of its own process: `python -m tests.sglang.real.server ENDPOINT OPTIONS TOKENS...` loads the prompt and
prints how many pages it found, and how many of them are right.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from typing import Any, Literal

if __name__ == "__main__":
    from tests.sglang.real import stand_in

    stand_in.install()

import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

from kvtier.keys import Namespace

PAGE = 16
LAYERS = 3
PATIENCE = 20.0
BACKEND = {"backend_name": "kvtier", "module_path": "kvtier_client.sglang", "class_name": "KVTierStorage"}


def pool(kind: Literal["mha", "mla"], layout: str, dtype: torch.dtype, tokens: int) -> tuple[Any, Any]:
    """A device pool on the CPU, and the host pool of `tokens` tokens (and a page of padding) that mirrors it."""
    shape = {"size": 64, "page_size": PAGE, "dtype": dtype, "layer_num": LAYERS, "device": "cpu"}
    host = {
        "host_to_device_ratio": tokens / 64,
        "host_size": 0,
        "page_size": PAGE,
        "layout": layout,
        "pin_memory": False,
        "device_capacity_tokens": 64,
        "start_layer": 0,
        "end_layer": LAYERS,
    }
    with host_memory_budget_scope(1 << 30):
        if kind == "mla":
            device = MLATokenToKVPool(**shape, kv_lora_rank=64, qk_rope_head_dim=16, enable_memory_saver=False)
            info = device.get_device_pool_infos()[0].buffer_info
            return device, MLATokenToKVPoolHost(info, **host, target_layer_num=LAYERS)
        device = MHATokenToKVPool(**shape, head_num=2, head_dim=32, enable_memory_saver=False)
        info = device.get_device_pool_infos()[0].buffer_info
        return device, MHATokenToKVPoolHost(info, **host)


class _Allocator:
    """What the controller asks its allocator for at start."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def get_kvcache(self) -> Any:
        return self.device


class Server:
    """One rank. `options` go to the backend; the others are the server's."""

    def __init__(
        self,
        endpoint: str,
        *,
        kind: Literal["mha", "mla"] = "mha",
        layout: str = "page_first",
        dtype: torch.dtype = torch.bfloat16,
        tokens: int = 1024,
        model: str | None = "model",
        rank: int = 0,
        width: int = 1,
        zero_copy: bool = True,
        metrics: bool = False,
        **options: Any,
    ) -> None:
        self.device, self.host = pool(kind, layout, dtype, tokens)
        self.requests = 0
        extra = {**BACKEND, "kvtier_endpoint": endpoint, "kvtier_timeout": 10.0, **options}
        if zero_copy:
            extra["interface_v1"] = 1
        parallel = {
            "tp_rank": rank,
            "tp_size": width,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_dcp_size": 1,
            "attn_dcp_rank": 0,
        }
        entry = PoolEntry(PoolName.KV, self.host, self.device, lambda layer: layer, is_primary_index_anchor=True)
        with get_parallel().override(**parallel):
            self.controller = HybridCacheController(
                _Allocator(self.device),
                HostPoolGroup([entry]),
                PAGE,
                None,
                threading.Event(),
                storage_backend="dynamic",
                model_name=model,
                storage_backend_extra_config=extra,
                enable_storage_metrics=metrics,
            )
        self.backend = self.controller.storage_backend

    def close(self) -> None:
        self.controller.detach_storage_backend()

    # Memory

    def content(self, key: str) -> torch.Tensor:
        """The page of that key, as its only right bytes, in the shape that the host pool gives a page."""
        shape = self.host.get_data_page(0, flat=False).shape
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little")
        numbers = torch.randint(
            0, 256, (shape.numel() * self.host.dtype.itemsize,), generator=torch.Generator().manual_seed(seed)
        )
        page: torch.Tensor = numbers.to(torch.uint8).view(self.host.dtype).reshape(shape)
        return page

    def fill(self, keys: list[str]) -> torch.Tensor:
        """Pages of the host pool with the contents of `keys`: what a prefill left there. Their indices."""
        indices: torch.Tensor = self.host.alloc(len(keys) * PAGE)
        for at, key in enumerate(keys):
            self.page(indices, at).copy_(self.content(key))
        return indices

    def page(self, indices: torch.Tensor, at: int) -> torch.Tensor:
        """Page number `at` of those at `indices`, in place."""
        page: torch.Tensor = self.host.get_data_page(int(indices[at * PAGE]), flat=False)
        return page

    def right(self, indices: torch.Tensor, keys: list[str]) -> list[bool]:
        """Which of the pages at `indices` have the bytes of their keys."""
        return [
            torch.equal(self.page(indices, at).contiguous().view(torch.uint8), self.content(key).view(torch.uint8))
            for at, key in enumerate(keys)
        ]

    # What the scheduler has the controller do

    def store(self, tokens: list[int], *, start: int = 0, told: bool = True) -> int:
        """Write back the pages of `tokens` from page `start` on, as when a node of the tree is backed up. How many tokens the
        controller takes for stored. `told`: with hicache_storage_pass_prefix_keys."""
        keys = hashes(tokens)
        indices = self.fill(keys[start:])
        self.controller.write_storage(indices, tokens[start * PAGE :], keys[start:], keys[:start] if told else None)
        operation = self.controller.ack_backup_queue.get(timeout=PATIENCE)
        self.host.free(indices)
        return int(operation.completed_tokens)

    def ask(self, tokens: list[int], *, start: int = 0, told: bool = True) -> Any:
        """The controller's operation when it has asked how much of `tokens`, from page `start` on, is stored."""
        keys = hashes(tokens)
        self.requests += 1
        self.controller.prefetch(
            CacheRequestHandle(f"request {self.requests}", 0),
            tokens[start * PAGE :],
            keys[start - 1] if start else None,
            keys[:start] if told else None,
        )
        return self.controller.prefetch_hit_queue.get(timeout=PATIENCE)

    def fetch(self, operation: Any) -> tuple[int, list[bool]]:
        """Have the controller load what was found: how many pages it got, and which of them are right."""
        if not operation.storage_hit_count:
            return 0, []
        indices = operation.host_indices = self.host.alloc(operation.storage_hit_count)
        self.controller.prefetch_buffer.put(operation)
        completed = 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=PATIENCE)
            if ack.completed_tokens is not None:
                completed = ack.completed_tokens
            if ack.completed_req:
                break
        right = self.right(indices, operation.hash_value[: completed // PAGE])
        self.host.free(indices)
        return completed // PAGE, right

    def load(self, tokens: list[int], *, start: int = 0, told: bool = True) -> int:
        """How many pages of `tokens`, from page `start` on, come; all must be right."""
        pages, right = self.fetch(self.ask(tokens, start=start, told=told))
        assert right == [True] * pages
        return pages


def hashes(tokens: list[int]) -> list[str]:
    """SGLang's keys of the whole pages of `tokens`."""
    found: list[str] = get_storage_hash_str(tokens[: len(tokens) // PAGE * PAGE], None, page_size=PAGE)
    return found


def prompt(seed: int, pages: int) -> list[int]:
    return [(seed * 7919 + at) % 30000 for at in range(pages * PAGE)]


def fields(spec: Namespace) -> dict[str, Any]:
    """Of a namespace, for `Client.namespace`."""
    return {name: getattr(spec, name) for name in spec.__struct_fields__ if name != "layout"}


def main() -> None:
    endpoint, options, *tokens = sys.argv[1:]
    server = Server(endpoint, **json.loads(options))
    pages, right = server.fetch(server.ask([int(token) for token in tokens]))
    print(json.dumps([pages, sum(right)]), flush=True)
    server.close()


if __name__ == "__main__":
    main()
