"""`kvtier size`: how much memory a model's KV takes, from its configuration; needs neither weights nor a daemon.

Reads `config.json` as Transformers writes it, under the names that its models have for the same things. What it cannot tell
it refuses: a wrong size would be believed. Layers with a sliding window are counted twice over: kvtier keeps all layers of
every page that it is given, and an engine that frees what left the window needs less. Layers with a state of fixed size
(Mamba, linear attention) have no KV and are left out.
Bytes are those of kvtier's own layouts, scales and padding included; engines that store blocks of their own come within
their padding of that. Not here: how it is drawn (`kvtier_client.tables`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from kvtier.errors import ConfigError, InvalidRequest
from kvtier.layout import AttentionLayout, DType, EngineLayout, LatentLayout, Layout
from kvtier.schedule import Schedule

DTYPES: tuple[str, ...] = ("bfloat16", "float8_e4m3fn", "int8", "int4")
_LATENT_DTYPES = DTYPES[:2]
_UNIT = 16
_GIB = 1 << 30
_SUFFIXES = ("-instruct", "-chat", "-base", "-it", "-hf")
_NESTED = ("text_config", "llm_config", "language_config")
_UNREADABLE = ("compress_ratios", "global_head_dim", "num_global_key_value_heads", "cross_attention_layers")
"""Keys of models whose layers keep something that this does not count."""


class Model(NamedTuple):
    """What of a model decides the size of its KV. `windows` has an entry a layer that keeps KV: the tokens that it looks
    back on, 0 for all. With `latent` it is MLA's, and heads do not matter."""

    name: str
    windows: tuple[int, ...]
    kv_heads: int
    head_dim: int
    v_head_dim: int
    latent: int
    rope: int
    stateful: int
    notes: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        return len(self.windows)


class Row(NamedTuple):
    """One dtype on one number of ranks. Bytes a token: `rank_bytes` on one rank, `token_bytes` on all, `open_bytes` of
    those in layers that see all tokens; `window_bytes` is what the others need, however long the context is."""

    dtype: str
    tp: int
    kv_heads: int
    rank_bytes: float
    token_bytes: float
    open_bytes: float
    window_bytes: float
    smallest_page: int
    largest_page: int
    tokens: int

    @property
    def gib_per_thousand(self) -> float:
        return self.token_bytes * 1000 / _GIB


def run(given: argparse.Namespace) -> int:
    """The command."""
    told = report(read(given.model), given.dtype, given.tp, given.memory)
    if given.json:
        print(json.dumps(told, indent=2))
    else:
        from kvtier_client import tables

        tables.size(told)
    return 0


def report(model: Model, dtypes: Sequence[str] | None, ranks: Sequence[int], memory: int) -> dict[str, Any]:
    """What is drawn, or printed with --json. A latent is the same on all ranks, so for one of them."""
    windows = sorted({window for window in model.windows if window})
    ranks = [1] if model.latent else ranks
    split = [tp for tp in ranks if _splits(model.kv_heads, tp)]
    chosen = dtypes or (_LATENT_DTYPES if model.latent else DTYPES)
    rows = [row_of(model, dtype, tp, memory) for dtype in chosen for tp in split]
    return {
        "model": model.name,
        "layers": model.layers,
        "window_layers": sum(map(bool, model.windows)),
        "windows": windows,
        "stateful_layers": model.stateful,
        **({"latent": model.latent, "rope": model.rope} if model.latent else {}),
        **({} if model.latent else {"kv_heads": model.kv_heads, "head_dim": model.head_dim}),
        "notes": list(model.notes),
        "memory": memory,
        "not_split": [tp for tp in ranks if tp not in split],
        "rows": [{**row._asdict(), "gib_per_thousand": row.gib_per_thousand} for row in rows],
    }


def _splits(kv_heads: int, tp: int) -> bool:
    """Whether engines can divide the heads among `tp` ranks, or give each a copy of one."""
    return not max(kv_heads, tp) % min(kv_heads, tp)


def row_of(model: Model, dtype: str, tp: int, memory: int) -> Row:
    """Ranks beyond the heads have a copy of another's."""
    own = max(1, model.kv_heads // tp)
    unit = _layout(model, dtype, own).unit_stride
    ranks = 1 if model.latent else tp
    per_layer = unit / _UNIT / max(1, model.layers) * ranks
    seen = sum(not window for window in model.windows)
    token = unit / _UNIT * ranks
    return Row(
        dtype=dtype,
        tp=tp,
        kv_heads=0 if model.latent else own,
        rank_bytes=unit / _UNIT,
        token_bytes=token,
        open_bytes=per_layer * seen,
        window_bytes=per_layer * sum(model.windows),
        smallest_page=unit,
        largest_page=unit << Schedule(_UNIT).top_order,
        tokens=int(memory // token),
    )


def _layout(model: Model, dtype: str, kv_heads: int) -> Layout:
    """Of one rank's pages."""
    if model.latent and dtype in ("bfloat16", "float16", "float32"):
        return LatentLayout(model.layers, model.latent, model.rope, _dtype(dtype))
    if model.latent:
        row = model.latent + model.rope
    elif model.head_dim == model.v_head_dim:
        return AttentionLayout(model.layers, kv_heads, model.head_dim, _dtype(dtype))
    else:
        row = kv_heads * (model.head_dim + model.v_head_dim)
    bits = {"float32": 32, "float16": 16, "bfloat16": 16, "int4": 4}.get(dtype, 8)
    return EngineLayout(model.layers * _UNIT * row * bits // 8, f"{dtype} rows, without scales", _UNIT)


def _dtype(name: str) -> DType:
    for known in get_args(DType):
        if name == known:
            found: DType = known
            return found
    raise InvalidRequest(f"no dtype {name!r}; there are: {', '.join(get_args(DType))}")


# A model's configuration


def read(what: str) -> Model:
    """The model at `what`, a config.json or the directory of one, or the well-known model of that name. Raises
    InvalidRequest where it is none of these, ConfigError where its size cannot be told."""
    path = Path(what)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        try:
            config = json.loads(file.read_bytes())
        except ValueError as error:
            raise ConfigError(f"{file} is no JSON: {error}") from None
        if not isinstance(config, dict):
            raise ConfigError(f"{file} holds no object: is it a model's config.json?")
        return parse(config, str(config.get("_name_or_path") or path.resolve().name.removesuffix(".json")))
    name = _short(what)
    for known, config in KNOWN.items():
        if _short(known) == name:
            return parse(config, known)
    raise InvalidRequest(
        f"{what!r} is no config.json, no directory with one, and no model that is known by name; these are: "
        f"{', '.join(KNOWN)}"
    )


def parse(config: Mapping[str, Any], name: str) -> Model:
    """A model from its configuration, as of Transformers. Raises ConfigError where its size cannot be told."""
    for key in _NESTED:
        if isinstance(config.get(key), dict):
            config = {**config, **config[key]}
    strange = [key for key in _UNREADABLE if config.get(key)]
    if strange:
        raise ConfigError(
            f"{name}: {', '.join(strange)} in its configuration: kvtier size does not know what that keeps"
        )
    layers = _number(config, name, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    windows = _windows(config, name, layers)
    shared = int(config.get("num_kv_shared_layers") or 0)
    windows = windows[: layers - shared]
    kept = tuple(window for window in windows if window is not None)
    if not kept:
        raise ConfigError(f"{name}: none of its {layers} layers keeps KV")
    notes = [f"{shared} of {layers} layers use the KV of another"] if shared else []
    latent = int(config.get("kv_lora_rank") or 0)
    if latent:
        if config.get("index_head_dim"):
            notes.append("its indexer keeps keys of its own, which are not counted")
        rope = _number(config, name, "qk_rope_head_dim")
        return Model(name, kept, 1, 0, 0, latent, rope, len(windows) - len(kept), tuple(notes))
    heads = _number(config, name, "num_attention_heads", "n_head", "n_heads", "num_heads")
    kv_heads = _kv_heads(config, heads)
    head_dim = int(
        config.get("head_dim")
        or config.get("kv_channels")
        or _number(config, name, "hidden_size", "n_embd", "d_model") // heads
    )
    v_head_dim = int(config.get("v_head_dim") or head_dim)
    return Model(name, kept, kv_heads, head_dim, v_head_dim, 0, 0, len(windows) - len(kept), tuple(notes))


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    nested = config.get("attn_config")
    given = nested.get("kv_n_heads") if isinstance(nested, dict) else None
    for key in ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "num_query_groups"):
        given = given or config.get(key)
    if given:
        return int(given)
    return 1 if config.get("multi_query") else heads


def _windows(config: Mapping[str, Any], name: str, layers: int) -> list[int | None]:
    """Of each layer: 0 where it sees all tokens, else how many; None where it keeps no KV."""
    window = int(config.get("sliding_window") or config.get("attention_chunk_size") or 0)
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if kinds:
        if len(kinds) != layers:
            raise ConfigError(f"{name}: {len(kinds)} layer types for {layers} layers")
        return [_window_of(str(kind), window, name) for kind in kinds]
    if config.get("hybrid_override_pattern"):
        return [0 if kind == "*" else None for kind in config["hybrid_override_pattern"][:layers]]
    if config.get("attn_layer_period"):
        period, offset = int(config["attn_layer_period"]), int(config.get("attn_layer_offset") or 0)
        return [0 if layer % period == offset else None for layer in range(layers)]
    if config.get("full_attention_interval"):
        every = int(config["full_attention_interval"])
        return [None if (layer + 1) % every else 0 for layer in range(layers)]
    if not window or config.get("use_sliding_window") is False:
        return [0] * layers
    return [window if _slides(config, layer) else 0 for layer in range(layers)]


def _window_of(kind: str, window: int, name: str) -> int | None:
    if kind in ("full_attention", "attention", "hybrid"):
        return 0
    if kind in ("sliding_attention", "chunked_attention"):
        if not window:
            raise ConfigError(f"{name}: it has layers of type {kind}, and no window")
        return window
    if kind in ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe", "mlp"):
        return None
    raise ConfigError(f"{name}: kvtier size does not know what a layer of type {kind!r} keeps")


def _slides(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has the window, in configurations from before `layer_types`."""
    kind = str(config.get("model_type", ""))
    rope_layers = config.get("no_rope_layers")
    if kind.startswith("llama4") and rope_layers:
        return bool(rope_layers[layer])
    if kind.startswith("gemma2"):
        return layer % 2 == 0
    every = config.get("sliding_window_pattern") or (6 if kind.startswith("gemma3") else 0)
    if every:
        return bool((layer + 1) % int(every))
    if "max_window_layers" in config:
        return layer >= int(config["max_window_layers"])
    return True


def _number(config: Mapping[str, Any], name: str, *keys: str) -> int:
    for key in keys:
        if isinstance(config.get(key), int) and config[key] > 0:
            return int(config[key])
    raise ConfigError(f"{name}: no {keys[0]} in its configuration: is it that of a language model?")


def _short(name: str) -> str:
    short = name.strip().rstrip("/").rpartition("/")[2].lower().replace(" ", "-").replace("_", "-")
    for suffix in _SUFFIXES:
        short = short.removesuffix(suffix)
    return short


def _gqa(layers: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        **more,
    }


def _mla(layers: int) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def _alternating(layers: int) -> list[str]:
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]


_GEMMA3 = {"sliding_window": 1024, "sliding_window_pattern": 6}

KNOWN: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": _gqa(32, 8, 128),
    "Llama-3.1-70B": _gqa(80, 8, 128),
    "Llama-3.1-405B": _gqa(126, 8, 128),
    "Llama-3.2-1B": _gqa(16, 8, 64),
    "Llama-3.2-3B": _gqa(28, 8, 128),
    "Llama-3.3-70B": _gqa(80, 8, 128),
    "Qwen2.5-7B": _gqa(28, 4, 128),
    "Qwen2.5-32B": _gqa(64, 8, 128),
    "Qwen2.5-72B": _gqa(80, 8, 128),
    "Qwen3-8B": _gqa(36, 8, 128),
    "Qwen3-32B": _gqa(64, 8, 128),
    "Qwen3-30B-A3B": _gqa(48, 4, 128),
    "Qwen3-235B-A22B": _gqa(94, 4, 128),
    "Mistral-7B-v0.3": _gqa(32, 8, 128),
    "Mixtral-8x7B-v0.1": _gqa(32, 8, 128),
    "Mixtral-8x22B-v0.1": _gqa(56, 8, 128),
    "Phi-4": _gqa(40, 10, 128),
    "SmolLM2-135M": _gqa(30, 3, 64),
    "SmolLM2-1.7B": _gqa(24, 32, 64),
    "Gemma-2-9B": _gqa(42, 8, 256, model_type="gemma2", sliding_window=4096),
    "Gemma-2-27B": _gqa(46, 16, 128, model_type="gemma2", sliding_window=4096),
    "Gemma-3-12B": _gqa(48, 8, 256, **_GEMMA3),
    "Gemma-3-27B": _gqa(62, 16, 128, **_GEMMA3),
    "gpt-oss-20b": _gqa(24, 8, 64, layer_types=_alternating(24), sliding_window=128),
    "gpt-oss-120b": _gqa(36, 8, 64, layer_types=_alternating(36), sliding_window=128),
    "DeepSeek-V2-Lite": _mla(27),
    "DeepSeek-V3": _mla(61),
    "DeepSeek-R1": _mla(61),
    "Kimi-K2": _mla(61),
}
"""Well-known models, as much of their configuration as counts."""
