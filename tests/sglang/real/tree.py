"""A server's cache as its scheduler has it: SGLang's own settings, unified radix tree, pools, allocator and controller, on the
CPU. Only what needs a GPU is stood in for: pinning, and copies between device and host pool, here by plain indexing.

A prompt is "computed" by writing, for each page, bytes that follow from all tokens up to its end.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.pool_host import common, mha
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs

from tests.sglang.real.server import BACKEND, PAGE, hashes

LAYERS, HEADS, DIM = 2, 2, 32
PATIENCE = 20.0


def without_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Stand in for what needs one."""

    def rows(pool: Any, layer: int, host: torch.Tensor, device: torch.Tensor) -> list[tuple[Any, Any, Any, Any]]:
        place = (host // pool.page_size, host % pool.page_size) if pool.layout == "page_first_direct" else host
        pairs = ((pool.k_data_refs, pool.device_k_buffers), (pool.v_data_refs, pool.device_v_buffers))
        return [(above[layer], place, below[layer], device) for above, below in pairs]

    def backup(self: Any, device_pool: Any, host: Any, device: Any, io_backend: str) -> None:
        for layer in range(self.layer_num):
            for refs, place, buffer, indices in rows(self, layer, host.cpu(), device.cpu()):
                refs[place] = buffer[indices]

    def load(
        self: Any, device_pool: Any, host: Any, device: Any, layer: int, io_backend: str, *, is_draft: bool = False
    ) -> None:
        for refs, place, buffer, indices in rows(self, layer, host.cpu(), device.cpu()):
            buffer[indices] = refs[place]

    patch.setattr(common, "_cuda_host_register", lambda *_, **__: None)
    patch.setattr(mha, "_cuda_host_unregister", lambda *_, **__: None)
    patch.setattr(mha.MHATokenToKVPoolHost, "backup_from_device_all_layer", backup)
    patch.setattr(mha.MHATokenToKVPoolHost, "load_to_device_per_layer", load)


class Tree:
    """One server's. `options` are the server's settings."""

    def __init__(self, endpoint: str, model: Path, *, told: bool = True, tokens: int = 1024, **options: Any) -> None:
        extra = {
            **BACKEND,
            "interface_v1": 1,
            "kvtier_endpoint": endpoint,
            "prefetch_threshold": PAGE,
            "hicache_storage_pass_prefix_keys": told,
        }
        arguments = ServerArgs(
            **{
                "model_path": str(model),
                "device": "cpu",
                "page_size": PAGE,
                "enable_hierarchical_cache": True,
                "hicache_storage_backend": "dynamic",
                "hicache_storage_backend_extra_config": json.dumps(extra),
                "hicache_storage_prefetch_policy": "wait_complete",
                "hicache_ratio": 2.0,
                **options,
            }
        )
        runtime_context.publish(arguments, role="scheduler")
        self.device = MHATokenToKVPool(
            size=tokens,
            page_size=PAGE,
            dtype=torch.bfloat16,
            head_num=HEADS,
            head_dim=DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.allocator = PagedTokenToKVPoolAllocator(tokens, PAGE, torch.bfloat16, "cpu", self.device, False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(8, 2 * tokens, "cpu", False),
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
        )
        ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
        with runtime_context.get_parallel().override(**ranks), host_memory_budget_scope(1 << 30):
            self.cache = UnifiedRadixCache(params)
            self.cache.init_hicache(arguments, params)
        self.requests = 0
        self.root = self.match([]).last_device_node

    def match(self, tokens: Sequence[int]) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))

    def serve(self, tokens: Sequence[int]) -> tuple[int, int]:
        """A request: what there is of its prompt is loaded, the rest computed and cached. How many pages came from SGLang's
        own memory, and how many from kvtierd; all on the device must be right."""
        whole = array("q", tokens[: len(tokens) // PAGE * PAGE])
        self.requests += 1
        handle = CacheRequestHandle(f"request {self.requests}", 0)
        found = self.match(whole)
        own = found.device_prefix_len + found.host_hit_length
        self.cache.prefetch_from_storage(
            handle,
            found.last_host_node,
            whole[own:],
            self.cache.get_last_hash_value(found.last_host_node),
            self.cache.get_prefix_hash_values(found.last_host_node)
            if self.cache.hicache_storage_pass_prefix_keys
            else None,
            matched_prefix_tokens=whole[:own],
        )
        self.until(lambda: self.cache.check_prefetch_progress(handle))
        found = self.match(whole)
        request = SimpleNamespace(
            last_node=found.last_device_node,
            swa_host_hit_length=0,
            mamba_host_hit_length=0,
            rid=handle.rid,
            kv=SimpleNamespace(mamba_pool_idx=None),
        )
        self.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=found.best_match_node, host_hit_length=found.host_hit_length, req=request
            )
        )
        self.cache.ready_to_load_host_cache()
        self.until(lambda: not self.cache.ongoing_load_back)
        found = self.match(whole)
        held = self.cache.tree_core.collect_full_device_indices(found.last_device_node, self.root)
        self._check(held, hashes(list(tokens)))
        self._compute(whole, held)
        return own // PAGE, (len(held) - own) // PAGE

    def until(self, done: Callable[[], object]) -> None:
        """Let the scheduler's steps pass."""
        deadline = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < deadline, "it never came to an end"
            self.cache.check_hicache_events()
            time.sleep(0.002)

    def close(self) -> None:
        self.cache.shutdown()

    def _compute(self, whole: array[int], held: torch.Tensor) -> None:
        fresh = self.allocator.alloc(len(whole) - len(held))
        assert fresh is not None
        keys = hashes(list(whole))[len(held) // PAGE :]
        for at, key in enumerate(keys):
            for buffer, rows in self._rows(fresh[at * PAGE : (at + 1) * PAGE], key):
                buffer[0][buffer[1]] = rows
        self.cache.insert(InsertParams(key=RadixKey(whole), value=torch.cat([held, fresh]), prev_prefix_len=len(held)))
        self.cache.flush_pending_backups()
        self.until(lambda: not self.cache.ongoing_write_through and not self.cache.ongoing_backup)

    def _check(self, held: torch.Tensor, keys: list[str]) -> None:
        for at, key in enumerate(keys[: len(held) // PAGE]):
            for (buffer, indices), rows in self._rows(held[at * PAGE : (at + 1) * PAGE], key):
                assert torch.equal(buffer[indices], rows), f"page {at} is wrong"

    def _rows(self, indices: torch.Tensor, key: str) -> list[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]]:
        """((buffer, indices), what belongs there) of each layer's K and V of a page."""
        source = torch.Generator().manual_seed(int(key[:12], 16))
        return [
            ((buffer, indices), torch.randn(PAGE, HEADS, DIM, generator=source).bfloat16())
            for buffer in (*self.device.k_buffer, *self.device.v_buffer)
        ]
