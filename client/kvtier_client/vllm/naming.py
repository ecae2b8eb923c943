"""What pages of an engine are called: the namespace that each rank's groups have, and a key for each page.

vLLM names a block by a digest that chains all tokens up to its end, with the salt of its user, the content of images and the
name and path of an adapter. A page's key is a digest of its namespace, that hash at the page's last block, and the page's
number; so no token is hashed here. What those hashes do not cover is in the namespace, as content and not as a label:

    weights        the commit of a hub model; of a folder, a digest over its files (names, sizes, times, ends)
    configuration  a digest of the model's, with overrides (rope scaling) applied; quantisation, dtype, draft model
    KV             its dtype, the bytes of a unit (`blocks`), the attention backend, vLLM's version
    place          rank and width of tensor and pipeline parallelism; groups of a hybrid model
    adapter        a digest of its files
    options.salt

Not here: hashes of blocks, and what to do where a process seeds them (`hashes`).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvtier.errors import ConfigError
from kvtier.keys import KEY_BYTES, Namespace
from kvtier.layout import EngineLayout
from kvtier_client.vllm.groups import Group
from kvtier_client.vllm.options import Options

_ENDS = 64 << 10
"""Bytes at either end of a file of weights that its digest reads: its header, and what a cut file lacks."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".model", ".py")


class Model(msgspec.Struct, frozen=True):
    """What is the same for all ranks and groups of an engine."""

    name: str
    revision: str
    rope: str
    extra: dict[str, str]


class Rank(msgspec.Struct, frozen=True):
    """Whose KV a worker has. Ranks with the same KV have the same place, and one of them is the `writer`."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    writer: bool = True


def model_of(vllm_config: Any, options: Options, version: str) -> Model:
    """Raises ConfigError where nothing says which weights they are."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    name, revision = weights(str(model.model), model, options.revision)
    load_format = str(getattr(getattr(vllm_config, "load_config", None), "load_format", "auto"))
    if "dummy" in load_format:
        revision += f", dummy weights of seed {model.seed}"
    extra = {
        "engine": f"vllm {version}",
        "config": config_digest(model.hf_config),
        "dtype": str(model.dtype),
        "quantization": str(getattr(model, "quantization", None)),
        "cache_dtype": str(cache.cache_dtype),
    }
    adapters = getattr(vllm_config, "lora_config", None)
    if adapters is not None:
        extra["lora_dtype"] = str(adapters.lora_dtype)
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None:
        draft = getattr(speculative, "draft_model_config", None)
        named = f"{speculative.method}"
        if draft is not None:
            named += " {} {}".format(*weights(str(draft.model), draft, ""))
        extra["draft"] = named
    rope = getattr(model.hf_config, "rope_parameters", None) or getattr(model.hf_config, "rope_scaling", None)
    return Model(name, revision, json.dumps(rope, sort_keys=True, default=str) if rope else "", extra)


def weights(path: str, model: Any, given: str) -> tuple[str, str]:
    """A name for people, and what names the contents. Raises ConfigError where nothing does."""
    folder = Path(path)
    name = folder.name if folder.exists() else path
    if given:
        return name, given
    if folder.is_dir():
        return name, "files " + files_digest(folder)
    if folder.is_file():
        return name, "files " + files_digest(folder.parent, [folder])
    revision = getattr(model.hf_config, "_commit_hash", None)
    if not revision:
        raise ConfigError(
            f"{path} is no folder, and no commit of it is known: name its contents by the option revision, such as "
            '"kv_connector_extra_config": {"revision": "..."}, and change it whenever they change'
        )
    return name, str(revision)


def files_digest(folder: Path, files: Sequence[Path] | None = None) -> str:
    """Of a model's files, whatever the folder is called. Reads little: the ends of each, its size and time of change."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"kvtier-weights")
    for file in sorted(folder.iterdir() if files is None else files):
        if not file.is_file() or not file.name.endswith(_WEIGHTS):
            continue
        known = file.stat()
        with file.open("rb") as handle:
            head = handle.read(_ENDS)
            handle.seek(max(0, known.st_size - _ENDS))
            tail = handle.read(_ENDS)
        for part in (file.name.encode(), struct.pack("<QQ", known.st_size, known.st_mtime_ns), head, tail):
            digest.update(struct.pack("<Q", len(part)))
            digest.update(part)
    return digest.hexdigest()


def adapter_digest(folder: Path) -> str:
    """Of an adapter's files, all their bytes. Raises OSError, also where there are none."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"kvtier-adapter")
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name.endswith(_WEIGHTS))
    if not files:
        raise FileNotFoundError(f"no weights in {folder}")
    for file in files:
        digest.update(struct.pack("<QQ", len(file.name), file.stat().st_size) + file.name.encode())
        with file.open("rb") as handle:
            while chunk := handle.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def config_digest(config: Any) -> str:
    """Of a model's configuration as it is in force, without what says where it came from."""
    fields = dict(config.to_dict())
    for name in ("_name_or_path", "transformers_version", "_commit_hash", "name_or_path"):
        fields.pop(name, None)
    packed = json.dumps(fields, sort_keys=True, default=str).encode()
    return hashlib.blake2b(packed, digest_size=KEY_BYTES, person=b"kvtier-config").hexdigest()


def namespace_of(
    model: Model, rank: Rank, group: Group, unit_bytes: int, arrangement: str, options: Options
) -> Namespace:
    """The namespace of one group on one rank, of no adapter."""
    cap = group.block_tokens
    while cap * 2 <= options.cap_tokens:
        cap *= 2
    return Namespace(
        layout=EngineLayout(unit_bytes, f"vllm: {arrangement}", group.block_tokens),
        model=model.name,
        revision=model.revision,
        rope=model.rope,
        tp_rank=rank.tp_rank,
        tp_size=rank.tp_size,
        pp_rank=rank.pp_rank,
        pp_size=rank.pp_size,
        salt=options.salt,
        extra={**model.extra, "group": f"{group.number} {group.kind}", "layers": _layers(group)},
        cap_tokens=cap,
    )


def variant(space: Namespace, lora: str, generation: str) -> Namespace:
    """The same, with an adapter (its digest), and after the engine's cache was reset (`generation`, which nobody shares)."""
    if not lora and not generation:
        return space
    extra = {**space.extra, "generation": generation} if generation else space.extra
    return msgspec.structs.replace(space, lora=lora, extra=extra)


def page_key(seed: bytes, block_hash: bytes, number: int) -> bytes:
    """Of page `number` in the namespace with digest `seed`; `block_hash` is vLLM's, of the page's last block, whole."""
    return hashlib.blake2b(
        seed + struct.pack("<Q", number) + block_hash, digest_size=KEY_BYTES, person=b"kvtier-vllm"
    ).digest()


def _layers(group: Group) -> str:
    """Which layers they are, in short: a long list of names would be read by nobody."""
    packed = "\0".join(group.layers).encode()
    return f"{len(group.layers)} from {group.layers[0]}, {hashlib.blake2b(packed, digest_size=8).hexdigest()}"
