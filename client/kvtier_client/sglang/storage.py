"""`KVTierStorage`: the storage backend that SGLang's HiCache loads by `--hicache-storage-backend dynamic`.

SGLang calls it from its own threads: one asks which pages are held, one loads, one stores. With "interface_v1" pages are
copied between kvtierd's memory and SGLang's pinned host pool directly; without, SGLang copies each page once more, through
a tensor. The two order the bytes of a page differently, so they do not share.
Written against HiCacheStorage of SGLang 0.5.23. Not here: side pools of hybrid models (interface v2), refused at start.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName

from kvtier.errors import ConfigError
from kvtier_client.sglang.identity import FACTS, files, namespace, options
from kvtier_client.sglang.pages import PageStore, Pieces

log = logging.getLogger(__name__)

_GIB = 1 << 30


class KVTierStorage(HiCacheStorage):  # type: ignore[misc]  # Any where SGLang is not installed
    """One rank's pages in kvtierd. Only settings that cannot work raise, at start; afterwards everything that fails is a
    miss."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        extra = storage_config.extra_config or {}
        self.storage_config = storage_config
        self.options = options(extra)
        self.zero_copy = bool(extra.get("interface_v1", 0))
        self.mem_pool_host: Any = None
        self._stores: dict[bool, PageStore] = {}
        self._lock = threading.Lock()
        self._figures: dict[str, list[float]] = {}

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Pages are those of `mem_pool_host` from now on. Raises ConfigError for a pool whose pages cannot be told."""
        super().register_mem_pool_host(mem_pool_host)
        meta = mem_pool_host.get_page_buffer_meta(torch.arange(mem_pool_host.page_size, dtype=torch.int64))
        if not meta or not meta[0]:
            raise ConfigError(
                f"{type(mem_pool_host).__name__} does not say where its pages lie: kvtier cannot store them"
            )
        facts = _facts()
        for flat in (False, True):
            spec = namespace(self.storage_config, mem_pool_host, meta[1], self.options, facts, flat=flat)
            self._stores[flat] = PageStore(
                spec,
                endpoint=self.options.endpoint,
                timeout=self.options.timeout,
                threads=self.options.copy_threads,
            )
        log.info("kvtier: pages of %s", self._stores[not self.zero_copy].spec.layout)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Raises NotImplementedError for a pool beside the KV: a prefix without it would be of no use."""
        if host_pool_name != PoolName.KV:
            raise NotImplementedError(
                f"this model keeps state in a pool {str(host_pool_name)!r} beside its KV, which kvtier's backend does not "
                f"store: run it without --hicache-storage-backend, or with another backend"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    # Zero copy

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Load the longest leading run of `keys` to the pages of the host pool that start at `host_indices`."""
        started = time.perf_counter()
        got = self._stores[False].get(keys, self._pieces(host_indices)) if self._stores else [False] * len(keys)
        self._record("prefetch", sum(got), started)
        return got

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store `keys`, a run of a chain, from the host pool. With `extra_info.prefix_keys` it follows the last of them."""
        started = time.perf_counter()
        prefix = getattr(extra_info, "prefix_keys", None)
        after = prefix[-1] if prefix else ""
        pieces = self._pieces(host_indices)
        stored = self._stores[False].put(keys, pieces, after=after) if self._stores else [False] * len(keys)
        self._record("backup", sum(stored), started)
        return stored

    # What is there, in whichever interface this server uses

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """The number of leading pages that are held."""
        return self._stores[not self.zero_copy].held(keys) if self._stores else 0

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """Forget this rank's pages in every tier, as after an update of the weights."""
        for store in self._stores.values():
            store.clear()

    def close(self) -> None:
        for store in self._stores.values():
            store.close()

    # Copying

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """`target_location`, a contiguous tensor of a page on the CPU, filled; None for a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        started = time.perf_counter()
        targets = target_locations or []
        if len(targets) != len(keys) or not self._stores or not all(map(_plain, targets)):
            return [None] * len(keys)
        got = self._stores[True].get(keys, _pieces_of(targets))
        self._record("prefetch", sum(got), started)
        return [target if there else None for target, there in zip(targets, got, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store `value`, a page as one tensor."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        started = time.perf_counter()
        values = values or []
        if len(values) != len(keys) or not self._stores or not all(map(_plain, values)):
            return False
        stored = self._stores[True].put(keys, _pieces_of(values))
        self._record("backup", sum(stored), started)
        return all(stored)

    # Figures

    def get_stats(self) -> Any:
        """What SGLang's own metrics show of this backend, since the last call."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            figures, self._figures = self._figures, {}
        return StorageMetrics(**figures)

    def _record(self, what: str, pages: int, started: float) -> None:
        if not self.storage_config.enable_storage_metrics or not pages:
            return
        rate = pages * self._stores[False].page_bytes / _GIB / (time.perf_counter() - started)
        with self._lock:
            self._figures.setdefault(f"{what}_pgs", []).append(pages)
            self._figures.setdefault(f"{what}_bandwidth", []).append(rate)

    def _pieces(self, host_indices: Any) -> Pieces:
        return Pieces(*self.mem_pool_host.get_page_buffer_meta(host_indices)) if self._stores else Pieces((), ())


def _facts() -> dict[str, str]:
    """What this process's server was started with, as far as it decides what its KV is. Empty where there is no server."""
    model = _published("get_model")
    if model is None:
        return {}
    facts = {name: str(getattr(model, name)) for name in FACTS if getattr(model, name, None) is not None}
    path = str(model.model_path)
    facts["files"] = files(path) or _commit(path, getattr(model, "revision", None))
    facts["adapters"] = " ".join(map(_adapter, getattr(_published("get_lora"), "lora_paths", None) or ()))
    return facts


def _published(settings: str) -> Any:
    """A group of the server's settings, None where there are none."""
    try:
        from sglang.srt import runtime_context

        return getattr(runtime_context, settings)()
    except (AttributeError, ImportError, ValueError):
        return None


def _adapter(reference: Any) -> str:
    """One of --lora-paths, in any of the forms that SGLang has for it. Its keys have name and path, and here are the files."""
    if isinstance(reference, str):
        name, _, path = reference.rpartition("=")
    elif isinstance(reference, dict):
        name, path = reference.get("lora_name", ""), reference.get("lora_path", "")
    else:
        name, path = reference.lora_name, reference.lora_path
    return f"{name} {path} {files(path)}"


def _commit(name: str, revision: str | None) -> str:
    """Which commit of a model of the hub is in this host's cache, "" if none. Asks nobody."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # no name that the hub could have
        return ""
    return Path(found).parent.name if isinstance(found, str) else ""


def _plain(page: Any) -> bool:
    return isinstance(page, torch.Tensor) and page.device.type == "cpu" and page.is_contiguous()


def _pieces_of(pages: list[torch.Tensor]) -> Pieces:
    return Pieces([page.data_ptr() for page in pages], [page.nbytes for page in pages])
