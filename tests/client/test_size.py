"""`kvtier size`: what it reads from configurations, against layouts, and against the KV that Transformers really makes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError, InvalidRequest
from kvtier.layout import AttentionLayout, LatentLayout
from kvtier_client import cli, size
from kvtier_client.size import KNOWN, Model, parse, read, report, row_of

BASE = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}


def told(model: Model, **options: Any) -> dict[str, Any]:
    return report(model, options.get("dtypes"), options.get("ranks", [1]), options.get("memory", 1 << 30))


@pytest.mark.parametrize(
    ("config", "kv_heads", "head_dim", "windows"),
    [
        (BASE, 8, 64, (0, 0, 0, 0)),
        (BASE | {"num_key_value_heads": 2}, 2, 64, (0, 0, 0, 0)),
        (BASE | {"num_key_value_heads": 1, "head_dim": 128}, 1, 128, (0, 0, 0, 0)),
        (BASE | {"multi_query": True}, 1, 64, (0, 0, 0, 0)),
        ({"n_layer": 2, "n_head": 12, "n_embd": 768}, 12, 64, (0, 0)),
        ({"n_layers": 2, "n_heads": 16, "d_model": 2048, "attn_config": {"kv_n_heads": 4}}, 4, 128, (0, 0)),
        ({"architectures": ["X"], "text_config": BASE | {"num_key_value_heads": 4}}, 4, 64, (0, 0, 0, 0)),
        (BASE | {"sliding_window": 100}, 8, 64, (100, 100, 100, 100)),
        (BASE | {"sliding_window": 100, "use_sliding_window": False}, 8, 64, (0, 0, 0, 0)),
        (
            BASE | {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 3},
            *(8, 64, (0, 0, 0, 100)),
        ),
        (BASE | {"sliding_window": 100, "model_type": "gemma2"}, 8, 64, (100, 0, 100, 0)),
        (BASE | {"sliding_window": 100, "sliding_window_pattern": 2}, 8, 64, (100, 0, 100, 0)),
        (
            BASE | {"num_hidden_layers": 7, "sliding_window": 9, "model_type": "gemma3_text"},
            *(8, 64, (9, 9, 9, 9, 9, 0, 9)),
        ),
        (
            BASE | {"sliding_window": 100, "layer_types": ["full_attention", "sliding_attention"] * 2},
            *(8, 64, (0, 100, 0, 100)),
        ),
        (
            BASE | {"model_type": "llama4_text", "attention_chunk_size": 8192, "no_rope_layers": [1, 1, 1, 0]},
            *(8, 64, (8192, 8192, 8192, 0)),
        ),
        (BASE | {"full_attention_interval": 4}, 8, 64, (0,)),
        (BASE | {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, 8, 64, (0,)),
        (BASE | {"layers_block_type": ["mamba", "attention", "mamba", "hybrid"]}, 8, 64, (0, 0)),
        (BASE | {"hybrid_override_pattern": "M-*M"}, 8, 64, (0,)),
        (BASE | {"attn_layer_period": 2, "attn_layer_offset": 1}, 8, 64, (0, 0)),
        (BASE | {"num_kv_shared_layers": 1}, 8, 64, (0, 0, 0)),
    ],
)
def test_what_a_configuration_says(
    config: dict[str, Any], kv_heads: int, head_dim: int, windows: tuple[int, ...]
) -> None:
    model = parse(config, "m")
    assert (model.kv_heads, model.head_dim, model.v_head_dim, model.windows) == (kv_heads, head_dim, head_dim, windows)
    assert model.layers + model.stateful == config.get("num_hidden_layers", model.layers) - (
        config.get("num_kv_shared_layers", 0)
    )


@pytest.mark.parametrize("dtype", size.DTYPES)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_bytes_are_those_of_kvtiers_own_layout(dtype: Any, tp: int) -> None:
    model = parse(BASE | {"num_key_value_heads": 4}, "m")
    layout = AttentionLayout(layers=4, kv_heads=max(1, 4 // tp), head_dim=64, dtype=dtype)
    row = row_of(model, dtype, tp, 1 << 30)
    assert row.rank_bytes == layout.token_bytes and row.token_bytes == layout.token_bytes * tp
    assert (row.smallest_page, row.largest_page) == (layout.unit_stride, 16 * layout.unit_stride)
    assert row.tokens == (1 << 30) // row.token_bytes
    assert row.gib_per_thousand == pytest.approx(row.token_bytes * 1000 / 2**30)
    assert row.open_bytes == row.token_bytes and row.window_bytes == 0


def test_a_latent_is_on_every_rank_and_counted_once() -> None:
    model = parse(
        {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128}, "m"
    )
    found = told(model, ranks=[1, 8])
    assert [(row["dtype"], row["tp"]) for row in found["rows"]] == [("bfloat16", 1), ("float8_e4m3fn", 1)]
    assert found["rows"][0]["token_bytes"] == LatentLayout(layers=61).token_bytes == 70400
    assert found["rows"][1]["token_bytes"] == pytest.approx(61 * 576, rel=0.01)
    assert (found["latent"], found["rope"]) == (512, 64) and "kv_heads" not in found


def test_an_indexer_is_said_not_to_be_counted() -> None:
    config = {"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    assert "not counted" in told(parse(config, "m"))["notes"][0]


def test_values_wider_than_keys() -> None:
    model = parse(BASE | {"head_dim": 192, "v_head_dim": 128, "num_key_value_heads": 2}, "m")
    row = row_of(model, "bfloat16", 1, 1 << 30)
    assert row.token_bytes == 4 * 2 * (192 + 128) * 2


def test_layers_with_a_window_are_counted_both_ways() -> None:
    config = BASE | {"sliding_window": 128, "layer_types": ["full_attention", *["sliding_attention"] * 3]}
    found = told(parse(config, "m"))
    row = found["rows"][0]
    each = 2 * 8 * 64 * 2
    assert row["token_bytes"] == 4 * each, "kvtier keeps all layers of a page"
    assert (row["open_bytes"], row["window_bytes"]) == (each, 3 * 128 * each)
    assert (found["window_layers"], found["windows"]) == (3, [128])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "num_hidden_layers"),
        ({"num_hidden_layers": 4}, "num_attention_heads"),
        ({"num_hidden_layers": 4, "num_attention_heads": 8}, "hidden_size"),
        (BASE | {"layer_types": ["full_attention"]}, "1 layer types for 4 layers"),
        (BASE | {"layer_types": ["full_attention"] * 3 + ["dreaming"]}, "dreaming"),
        (BASE | {"layer_types": ["sliding_attention"] * 4}, "no window"),
        (BASE | {"layer_types": ["mamba"] * 4}, "none of its 4 layers"),
        (BASE | {"compress_ratios": [4, 128]}, "compress_ratios"),
    ],
)
def test_what_it_cannot_tell_it_refuses(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(config, "m")


def test_files_directories_and_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert read(str(tmp_path)).windows == read(str(tmp_path / "config.json")).windows == (0, 0, 0, 0)
    assert read(str(tmp_path)).name == tmp_path.name
    for name in ("meta-llama/Llama-3.1-8B-Instruct", "llama 3.1 8b", "Llama-3.1-8B"):
        assert read(name).name == "Llama-3.1-8B"
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds no object"):
        read(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        read(str(tmp_path))
    with pytest.raises(InvalidRequest, match=r"no model that is known by name.*DeepSeek-V3"):
        read("llama-9")


@pytest.mark.parametrize("name", KNOWN)
def test_well_known_models_can_be_read(name: str) -> None:
    found = told(read(name), ranks=[1, 2])
    assert found["rows"] and found["rows"][0]["tokens"] > 0
    assert 1_000 < found["rows"][0]["token_bytes"] < 1_000_000


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"num_key_value_heads": 2}))
    command = ["size", str(tmp_path), "--dtype", "bfloat16", "--tp", "1,2,3", "--memory", "1MiB"]
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["tp"], row["kv_heads"], row["rank_bytes"]) for row in found["rows"]] == [(1, 2, 2048), (2, 1, 1024)]
    assert found["rows"][0]["tokens"] == 512 and found["not_split"] == [3]
    assert cli.main(command) == 0
    drawn = capsys.readouterr().out
    assert "tokens in 1.0 MiB" in drawn and "2,048" in drawn and "cannot be divided among 3 ranks" in drawn
    assert cli.main(["size", "Gemma-3-27B"]) == 0
    drawn = capsys.readouterr().out
    assert "52 of 62 layers see the last 1,024 tokens" in drawn and "81,920" in drawn
    assert cli.main(["size", "DeepSeek-V3"]) == 0 and "any" in capsys.readouterr().out
    assert cli.main(["size", "nonsense"]) == 1
    with pytest.raises(SystemExit, match="2"):
        cli.main(["size", "DeepSeek-V3", "--tp", "1,x"])


def test_it_needs_neither_torch_nor_a_daemon() -> None:
    code = "import sys, kvtier_client.size; print(*{'torch', 'numpy', 'zmq', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env={
        "PYTHONPATH": ":".join(sys.path)
    })  # fmt: skip
    assert not {"torch", "numpy", "rich"} & set(done.stdout.split())


def test_the_table_of_the_operations_guide_is_what_it_says() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    table = guide.partition("| model | layers |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert len(rows) >= 4
    for name, layers, heads, nbytes, short, long in rows:
        model = read(name.removesuffix(" (latent)"))
        row = row_of(model, "bfloat16", 1, 1 << 30)
        kept = f"{model.latent} + {model.rope}" if model.latent else f"{model.kv_heads} x {model.head_dim}"
        assert (layers, heads, nbytes) == (str(model.layers), kept, f"{row.token_bytes:,.0f}"), name
        assert short == f"{8 * row.gib_per_thousand:.2f} GiB" and long == f"{128 * row.gib_per_thousand:.1f} GiB", name


TINY = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Llama", {}),
        ("Mistral", {"sliding_window": 16}),
        ("Qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 4}),
        ("Gemma2", {"sliding_window": 16}),
        ("Gemma3Text", {"sliding_window": 16}),
        ("GptOss", {"sliding_window": 16, "num_local_experts": 2, "num_experts_per_tok": 1}),
    ],
)
def test_transformers_makes_as_much_kv_as_is_said(kind: str, more: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**TINY, **more)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = parse(config.to_dict(), kind)
    tokens = 80
    with torch.no_grad():
        cache = network(torch.arange(tokens)[None] % 64, use_cache=True).past_key_values
    held = [layer.keys.shape[-2] for layer in cache.layers]
    expected = [min(tokens, window - 1) if window else tokens for window in model.windows]
    assert held == expected, "the newest token's KV is made anew, so that W - 1 are kept"
    layer = cache.layers[0]
    each = (layer.keys[0, :, 0].nbytes + layer.values[0, :, 0].nbytes) * model.layers
    assert row_of(model, "float32", 1, 1 << 30).token_bytes == each
