"""What two SGLang servers must have in common to share pages, as a namespace; and the options of the backend.

SGLang's own keys cover tokens, adapters and salts, and nothing else: the model that it passes on is only the name it is
served under, an adapter is its name and path, and a pool of 8-bit numbers does not tell which 8-bit type. All that is added
here, and what files there were under those paths. What differs in any of it finds nothing of the other's.
Not here: how pages move (`pages`), what SGLang calls (`storage`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvtier.errors import ConfigError
from kvtier.keys import Namespace
from kvtier.layout import EngineLayout

_PREFIX = "kvtier_"
_GEOMETRY = (
    "page_size",
    "dtype",
    "layer_num",
    "target_layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "head_group_num",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "storage_format_tag",
)
"""Attributes of host pools that decide what the bytes of a page are. No pool has all of them."""
FACTS = (
    "model_path",
    "revision",
    "dtype",
    "quantization",
    "quantization_param_path",
    "kv_cache_dtype",
    "load_format",
    "json_model_override_args",
)
"""Settings of the server that decide what its KV is, by the names that SGLang has for them."""


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json")


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=lambda name: _PREFIX + name):
    """What stands in `--hicache-storage-backend-extra-config` under names that begin with "kvtier_"."""

    endpoint: str = ""
    timeout: float = 2.0
    revision: str = ""
    salt: str = ""
    kv_dtype: str = ""
    copy_threads: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.timeout <= 60:
            raise ValueError(f"kvtier_timeout is {self.timeout}: it must be above 0 and at most 60 seconds")
        if not 1 <= self.copy_threads <= 64:
            raise ValueError(f"kvtier_copy_threads is {self.copy_threads}: it must be from 1 to 64")


def options(extra: Mapping[str, Any]) -> Options:
    """Ours among SGLang's own settings. Raises ConfigError for one that is unknown or of the wrong type."""
    own = {name: value for name, value in extra.items() if name.startswith(_PREFIX)}
    try:
        return msgspec.convert(own, Options)
    except msgspec.ValidationError as error:
        known = ", ".join(_PREFIX + name for name in Options.__struct_fields__)
        raise ConfigError(f"hicache-storage-backend-extra-config: {error}; kvtier's options are {known}") from None


def namespace(
    config: Any, pool: Any, sizes: Sequence[int], given: Options, facts: Mapping[str, str], *, flat: bool
) -> Namespace:
    """Of one rank's pages. `config` is SGLang's HiCacheStorageConfig, `pool` its host pool, whose pages lie in pieces of
    `sizes`; `facts` is whatever else is known to decide what KV is; `flat` pages are in the order of the copying interface.

    MLA pages are the same on all ranks, so they belong to rank 0 of the width. Raises ConfigError where what the pages
    are cannot be told.
    """
    model = config.model_name or facts.get("model_path", "")
    if not model:
        raise ConfigError("SGLang did not say which model this is: start it with --served-model-name")
    kv_dtype = given.kv_dtype or facts.get("kv_cache_dtype", "")
    if str(pool.dtype).endswith("uint8") and not kv_dtype:
        raise ConfigError(
            "the KV pool holds 8-bit numbers and SGLang does not say of which type, so another server could misread them: "
            'name it in the extra config, as "kvtier_kv_dtype": "fp8_e4m3"'
        )
    extra = {**facts, "kv_cache_dtype": kv_dtype}
    extra["context_parallel"] = f"{config.attn_cp_rank}/{config.attn_cp_size} {config.dcp_rank}/{config.dcp_size}"
    extra["replicated"] = str(bool(config.is_mla_model))
    return Namespace(
        layout=EngineLayout(sum(sizes), arrangement(pool, sizes, flat=flat), pool.page_size),
        model=model,
        revision=given.revision,
        tp_rank=0 if config.is_mla_model else config.tp_rank,
        tp_size=config.tp_size,
        pp_rank=config.pp_rank,
        pp_size=config.pp_size,
        salt=given.salt,
        extra=extra,
        cap_tokens=pool.page_size,
    )


def arrangement(pool: Any, sizes: Sequence[int], *, flat: bool) -> str:
    """What the bytes of a page are, in words: equal exactly where they mean the same."""
    pieces = f"{len(sizes)} pieces of {'+'.join(map(str, sorted(set(sizes))))}"
    geometry = " ".join(f"{name}={getattr(pool, name)}" for name in _GEOMETRY if getattr(pool, name, None) is not None)
    order = "flat" if flat else "as it lies"
    return f"sglang {type(pool).__name__} {pool.layout} {order}, {pieces}, {geometry}"


def files(path: str) -> str:
    """What stands for the files of a model or adapter at `path`: names, sizes and times, since reading them takes minutes.
    "" where there are none."""
    folder = Path(path)
    if folder.is_dir():
        digest = hashlib.blake2b(digest_size=16)
        for file in sorted(each for each in folder.rglob("*") if each.suffix in _WEIGHTS and each.is_file()):
            status = file.stat()
            digest.update(f"{file.relative_to(folder)} {status.st_size} {status.st_mtime_ns}\n".encode())
        return digest.hexdigest()
    if folder.is_file():
        return f"{folder.stat().st_size} {folder.stat().st_mtime_ns}"
    return ""
