"""Every kind of host pool and layout, through both interfaces, byte by byte; and what must not be shared is not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.server_args import ServerArgs

from tests.sglang.real.conftest import MakeServer
from tests.sglang.real.server import PAGE, Server, hashes, prompt
from tests.system.conftest import Daemon

LAYOUTS = ["layer_first", "page_first", "page_first_direct"]
KINDS = ["mha", "mla"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_pages_come_back_byte_by_byte_without_a_copy_between(server: MakeServer, kind: str, layout: str) -> None:
    writer, keys = server(kind=kind, layout=layout), hashes(prompt(1, 9))
    assert writer.backend.batch_exists(keys) == 0
    assert writer.backend.batch_set_v1(keys, writer.fill(keys)) == [True] * 9
    reader = server(kind=kind, layout=layout, tokens=4096)  # whose pages lie at other distances
    assert reader.backend.batch_exists(keys) == 9 and reader.backend.exists(keys[8])
    assert reader.backend.batch_exists(["0" * 64, *keys]) == 0
    reader.host.alloc(5 * PAGE)
    indices = reader.host.alloc(10 * PAGE)
    unknown = hashes(prompt(2, 1))
    assert reader.backend.batch_get_v1(keys + unknown, indices) == [True] * 9 + [False]
    assert all(reader.right(indices, keys))
    assert not reader.page(indices, 9).contiguous().view(torch.uint8).any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_pages_come_back_byte_by_byte_through_the_copying_interface(server: MakeServer, kind: str, layout: str) -> None:
    writer, tokens = server(kind=kind, layout=layout, zero_copy=False), prompt(1, 9)
    assert writer.store(tokens) == 9 * PAGE
    reader = server(kind=kind, layout=layout, tokens=4096, zero_copy=False)
    assert reader.load(tokens) == 9
    keys = hashes(tokens)
    page = reader.host.get_dummy_flat_data_page()
    assert reader.backend.get(keys[3], page) is page
    assert torch.equal(page.view(torch.uint8), reader.content(keys[3]).flatten().view(torch.uint8))
    assert reader.backend.get("0" * 64, page) is None and reader.backend.exists(keys[3])
    assert reader.backend.set("1" * 64, page) and writer.backend.exists("1" * 64)
    assert not reader.backend.set("2" * 64, page[1:]), "half a page is none"
    assert not reader.backend.set("2" * 64, None) and reader.backend.batch_get(["1" * 64], None) == [None]
    assert not writer.backend.exists("2" * 64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype_through_sglangs_own_threads(server: MakeServer, kind: str, dtype: torch.dtype) -> None:
    tokens = prompt(1, 4)
    assert server(kind=kind, dtype=dtype).store(tokens) == 4 * PAGE
    assert server(kind=kind, dtype=dtype).load(tokens) == 4


def test_eight_bit_pages_of_two_types_are_not_mistaken_for_each_other(server: MakeServer) -> None:
    """SGLang keeps both as uint8, so the pool alone does not tell (case 3)."""
    tokens = prompt(1, 4)
    one = server(dtype=torch.float8_e4m3fn, kvtier_kv_dtype="fp8_e4m3")
    assert one.host.dtype == torch.uint8 and one.store(tokens) == 4 * PAGE
    assert server(dtype=torch.float8_e4m3fn, kvtier_kv_dtype="fp8_e4m3").load(tokens) == 4
    assert server(dtype=torch.float8_e5m2, kvtier_kv_dtype="fp8_e5m2").load(tokens) == 0


OTHERS: list[dict[str, Any]] = [
    {"model": "another"},
    {"rank": 1, "width": 2},
    {"rank": 0, "width": 2},
    {"dtype": torch.float16},
    {"kind": "mla"},
    {"layout": "layer_first"},
    {"layout": "page_first_direct"},
    {"zero_copy": False},
    {"kvtier_revision": "2"},
    {"kvtier_salt": "tenant"},
]


@pytest.mark.parametrize("other", OTHERS, ids=[" ".join(map(str, one.items())) for one in OTHERS])
def test_what_one_server_stores_a_different_one_never_reads(server: MakeServer, other: dict[str, Any]) -> None:
    tokens = prompt(1, 4)
    assert server().store(tokens) == 4 * PAGE
    different = server(**other)
    assert different.load(tokens) == 0
    assert different.store(tokens) == 4 * PAGE and different.load(tokens) == 4
    assert server().load(tokens) == 4, "and what it stores does not harm the first"


Start = Callable[..., None]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Publishes settings of a server, as SGLang resolves them, for a model and an adapter in `tmp_path`."""
    for name in ("model", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.safetensors").write_bytes(b"1")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    config |= {"num_hidden_layers": 2, "vocab_size": 100, "intermediate_size": 64, "max_position_embeddings": 256}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))

    def publish(**options: Any) -> None:
        arguments = ServerArgs(**{"model_path": str(tmp_path / "model"), "device": "cpu", **options})
        runtime_context.publish(arguments, role="scheduler")

    yield publish
    runtime_context.reset_context()


@pytest.mark.parametrize("form", ["name=path", "path", "mapping", "reference"])
@pytest.mark.parametrize("what", ["model", "adapter"])
def test_new_weights_under_an_old_path_find_nothing_of_the_old(
    server: MakeServer, start: Start, tmp_path: Path, what: str, form: str
) -> None:
    """Cases 1 and 43: what SGLang passes on is a name, and the same."""
    tokens, path = prompt(1, 4), str(tmp_path / "adapter")
    named = {"lora_name": "mine", "lora_path": path}
    adapters = [{"name=path": f"mine={path}", "path": path, "mapping": named, "reference": LoRARef(**named)}[form]]
    start(lora_paths=adapters)
    assert server().store(tokens) == 4 * PAGE
    start(lora_paths=adapters)
    assert server().load(tokens) == 4, "a restart alone changes nothing"
    (tmp_path / what / "weights.safetensors").write_bytes(b"22")
    start(lora_paths=adapters)
    assert server().load(tokens) == 0


def test_a_server_says_which_eight_bit_type_its_pages_are_of(server: MakeServer, start: Start) -> None:
    tokens = prompt(1, 4)
    start(kv_cache_dtype="fp8_e4m3")
    assert server(dtype=torch.float8_e4m3fn).store(tokens) == 4 * PAGE
    start(kv_cache_dtype="fp8_e5m2")
    assert server(dtype=torch.float8_e5m2).load(tokens) == 0
    start(kv_cache_dtype="fp8_e4m3")
    assert server(dtype=torch.float8_e4m3fn).load(tokens) == 4


def test_two_models_that_are_served_under_one_name_share_nothing(
    server: MakeServer, start: Start, tmp_path: Path
) -> None:
    tokens = prompt(1, 4)
    start(served_model_name="assistant")
    assert server(model="assistant").store(tokens) == 4 * PAGE
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    start(served_model_name="assistant", model_path=str(tmp_path / "other"))
    assert server(model="assistant").load(tokens) == 0


def test_a_model_of_the_hub_is_known_by_the_commit_that_is_cached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub.constants

    from kvtier_client.sglang.storage import _commit

    repository = tmp_path / "models--org--model"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert _commit("org/model", None) == "" == _commit("/no/such/folder", None)
    for commit in ("a" * 40, "b" * 40):
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
        assert _commit("org/model", None) == commit
    assert _commit("org/model", "a" * 40) == "a" * 40


def test_mla_is_written_by_one_rank_and_read_by_all(server: MakeServer) -> None:
    tokens = prompt(1, 4)
    first, second = (server(kind="mla", rank=rank, width=2) for rank in (0, 1))
    assert second.store(tokens) == 0 and first.ask(tokens).storage_hit_count == 0, "SGLang has rank 1 skip it"
    assert first.store(tokens) == 4 * PAGE
    assert second.load(tokens) == 4 and first.load(tokens) == 4


def test_keys_of_adapters_and_salts_are_sglangs_own(server: MakeServer) -> None:
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    one, tokens = server(), prompt(1, 2)
    plain = RadixKey(tokens)
    adapter, salted = RadixKey(tokens, extra_key="adapter"), RadixKey(tokens, cache_salt="tenant")
    keys = [get_storage_hash_str(key, None, page_size=PAGE) for key in (plain, adapter, salted)]
    assert one.backend.batch_set_v1(keys[1], one.fill(keys[1])) == [True, True]
    assert [one.backend.batch_exists(each) for each in keys] == [0, 2, 0]


def test_a_server_in_another_process_finds_what_this_one_stored(server: MakeServer, daemon: Daemon) -> None:
    tokens = prompt(1, 6)
    assert server(layout="layer_first").store(tokens) == 6 * PAGE
    command = [sys.executable, "-W", "ignore", "-m", "tests.sglang.real.server", daemon.endpoint]
    answer = subprocess.run(
        [*command, json.dumps({"layout": "layer_first"}), *map(str, tokens)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "7"},
        cwd=Path(__file__).parents[3],
    )
    assert json.loads(answer.stdout.splitlines()[-1]) == [6, 6], answer.stderr


def test_prefix_keys_tell_what_a_batch_follows(server: MakeServer, daemon: Daemon) -> None:
    one, keys = server(), hashes(prompt(1, 8))
    for start in (0, 4):
        info = HiCacheStorageExtraInfo(prefix_keys=keys[:start])
        assert all(one.backend.batch_set_v1(keys[start : start + 4], one.fill(keys[start : start + 4]), info))
    client = daemon.client()
    (space,) = client.inventory()["namespaces"]
    pages = client.inventory(bytes.fromhex(space["digest"]))["pages"]
    assert sorted(page["number"] for page in pages) == list(range(8)), "one chain, in order"


def test_nothing_listens_on_the_network(server: MakeServer) -> None:
    """Case 35."""
    one = server()
    assert one.store(prompt(1, 2)) == 2 * PAGE
    mine = {os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    assert not [line for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in mine]


def test_pools_beside_the_kv_are_refused_at_start(server: MakeServer) -> None:
    one = server()
    one.backend.register_mem_host_pool_v2(one.host, "kv")
    with pytest.raises(NotImplementedError, match="'swa' beside its KV"):
        one.backend.register_mem_host_pool_v2(one.host, "swa")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kvtier_endpoints": "/run"}, "kvtier_endpoint"),
        ({"model": None}, "served-model-name"),
        ({"dtype": torch.float8_e4m3fn}, "kvtier_kv_dtype"),
    ],
)
def test_settings_that_cannot_work_stop_the_server_at_start(daemon: Daemon, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said):
        Server(daemon.endpoint, **wrong)


def test_sglangs_metrics_get_pages_and_rates(server: MakeServer) -> None:
    one, tokens = server(metrics=True), prompt(1, 5)
    one.store(tokens), one.load(tokens)
    stats = one.backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([5], [5])
    assert stats.backup_bandwidth[0] > 0 < stats.prefetch_bandwidth[0]
    assert one.backend.get_stats().prefetch_pgs == []
    quiet = server()
    quiet.load(tokens)
    assert quiet.backend.get_stats().prefetch_pgs == []


def test_the_factory_makes_it_by_name(server: MakeServer) -> None:
    made = StorageBackendFactory.create_backend("dynamic", server().controller.storage_config, None)
    assert type(made).__name__ == "KVTierStorage"
    assert made.batch_exists(["a"]) == 0 and made.get("a") is None, "before it is told of a pool, all is a miss"
