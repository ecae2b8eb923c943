"""What one engine wrote, who else may read: equal names exactly where the KV is. Each case that went wrong somewhere is here:
labels for contents, short hashes, seeds of a process, ranks, widths, dtypes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.keys import Namespace
from kvtier_client.vllm.groups import Group, plan
from kvtier_client.vllm.hashes import BlockHashes, is_shared
from kvtier_client.vllm.naming import Rank, adapter_digest, files_digest, model_of, namespace_of, page_key, variant
from kvtier_client.vllm.options import Options, parse
from tests.vllm.stand_ins import (
    FullAttentionSpec,
    HfConfig,
    MambaSpec,
    MLAAttentionSpec,
    Request,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    cache_config,
    hashing,
    vllm_config,
)

ALONE = Rank(0, 1, 0, 1)
GROUP = Group(0, ("model.layers.0.attn", "model.layers.1.attn"), 16, "FullAttentionSpec torch.bfloat16")


def name(
    rank: Rank = ALONE,
    group: Group = GROUP,
    nbytes: int = 65536,
    arrangement: str = "CPU_ATTN: bfloat16",
    options: dict[str, Any] | None = None,
    version: str = "0.32.0",
    **changes: Any,
) -> Namespace:
    chosen = parse(options)
    return namespace_of(model_of(vllm_config(**changes), chosen, version), rank, group, nbytes, arrangement, chosen)


def test_whatever_changes_the_kv_changes_the_name() -> None:
    other = HfConfig(rope_scaling={"type": "yarn", "factor": 4})
    other._commit_hash = "0123abcd"
    later = HfConfig()
    later._commit_hash = "4567cdef"
    draft = SimpleNamespace(method="eagle", draft_model_config=vllm_config().model_config)
    names = [
        name(),
        name(version="0.33.0"),
        name(model__model="org/other"),
        name(model__hf_config=later),
        name(model__hf_config=other),
        name(model__dtype="torch.float16"),
        name(model__quantization="fp8"),
        name(cache__cache_dtype="fp8"),
        name(load__load_format="dummy"),
        name(load__load_format="dummy", model__seed=1),
        name(lora_config=SimpleNamespace(lora_dtype="torch.float16")),
        name(speculative_config=draft),
        name(nbytes=32768),
        name(arrangement="CPU_ATTN: float16"),
        name(group=Group(1, GROUP.layers, 16, GROUP.kind)),
        name(group=Group(0, GROUP.layers[:1], 16, GROUP.kind)),
        name(group=Group(0, GROUP.layers, 32, GROUP.kind)),
        name(group=Group(0, GROUP.layers, 16, "SlidingWindowSpec torch.bfloat16 64")),
        name(options={"salt": "a"}),
        name(options={"revision": "mine"}),
        name(options={"cap_tokens": 64}),
        *(name(rank=Rank(rank, size, 0, 1)) for rank, size in ((1, 8), (1, 16), (0, 8))),
        *(name(rank=Rank(0, 1, rank, 2)) for rank in (0, 1)),
        variant(name(), "adapter's digest", ""),
        variant(name(), "", "after a reset"),
        variant(name(), "adapter's digest", "after a reset"),
    ]
    assert len({one.digest() for one in names}) == len(names)
    assert name().digest() == name().digest()
    assert variant(name(), "", "") == name()


def test_a_folders_name_is_no_identity_and_its_contents_are(tmp_path: Path) -> None:
    """New weights under an old name find nothing; the same files under another name are the same."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(os.urandom(300_000))
    before = name(model__model=str(folder), model__hf_config=HfConfig())
    assert before.model == "model"
    shutil.copytree(folder, tmp_path / "renamed")
    assert files_digest(tmp_path / "renamed") == files_digest(folder)
    for change in (0, 150_000, 299_999):
        with (folder / "model.safetensors").open("r+b") as weights:
            weights.seek(change)
            weights.write(bytes([weights.read(1)[0] ^ 1]))
        after = name(model__model=str(folder), model__hf_config=HfConfig())
        assert after.digest() != before.digest()
        before = after


def test_weights_that_nothing_names_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r'"revision"'):
        name(model__model="s3://bucket/model", model__hf_config=HfConfig())
    assert (
        name(model__model="s3://bucket/model", model__hf_config=HfConfig(), options={"revision": "v3"}).revision == "v3"
    )


def test_an_adapter_is_its_files(tmp_path: Path) -> None:
    """One name, other weights: another namespace."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(bytes(100_000))
    one = adapter_digest(folder)
    shutil.copytree(folder, tmp_path / "copied")
    assert adapter_digest(tmp_path / "copied") == one
    (folder / "adapter_model.safetensors").write_bytes(bytes(50_000) + b"\1" + bytes(49_999))
    two = adapter_digest(folder)
    assert one != two
    assert variant(name(), one, "").digest() != variant(name(), two, "").digest()
    (tmp_path / "empty").mkdir()
    for nothing in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(OSError):
            adapter_digest(nothing)


def test_a_key_is_of_its_namespace_its_tokens_and_its_place() -> None:
    seeds, digests = [bytes([n]) * 16 for n in range(3)], [bytes([n]) * 32 for n in range(3)]
    keys = {page_key(seed, digest, number) for seed in seeds for digest in digests for number in range(3)}
    assert len(keys) == 27 and {len(key) for key in keys} == {16}


def test_all_of_a_block_hash_counts() -> None:
    """100,000 images behind the same tokens: as many keys. (Cut to 16 bits, half would be another image's.)"""
    asked = Request("a", list(range(16)))
    keys = set()
    for n in range(100_000):
        asked.images = [(3, f"{n:064x}")]
        keys.add(page_key(bytes(16), asked.known().block_hashes[0], 0))
    assert len(keys) == 100_000


def test_salt_adapter_and_position_of_an_image_are_in_the_hash() -> None:
    def key(**more: Any) -> bytes:
        return page_key(bytes(16), Request("a", list(range(64)), **more).known().block_hashes[-1], 3)

    adapter = SimpleNamespace(lora_name="one", lora_path="/a")
    keys = [key(), key(cache_salt="a"), key(cache_salt="b"), key(lora_request=adapter)]
    keys += [key(images=[(3, "x")]), key(images=[(4, "x")]), key(images=[(3, "y")])]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("seed, algorithm", [("0", "sha256"), ("1", "sha256"), ("random", "sha256"), ("0", "xxhash")])
def test_keys_do_not_depend_on_the_process(seed: str, algorithm: str) -> None:
    """Whatever PYTHONHASHSEED or the hash algorithm of the process, hashes are those of one that has set nothing."""
    plain = Request("a", list(range(200)), images=[(5, "x"), (100, "y")], cache_salt="salt").known()
    seeded = Request("a", list(range(200)), images=[(5, "x"), (100, "y")], cache_salt="salt").known(hashing(seed))
    assert is_shared(hashing()) and not is_shared(hashing(seed, algorithm))
    assert BlockHashes(hashing(), 16).of(plain) is plain.block_hashes, "no token is hashed twice"
    own = BlockHashes(hashing(seed, algorithm), 16)
    assert own.of(seeded) == plain.block_hashes != seeded.block_hashes
    for asked, by in ((plain, hashing()), (seeded, hashing(seed))):
        asked.all_token_ids += range(40)
        asked.known(by)
    assert own.of(seeded) == plain.block_hashes, "and those of tokens that came later"


def test_names_and_keys_are_equal_in_every_process() -> None:
    code = (
        "from tests.vllm.test_naming import *; print(name(options={'salt': 's'}).digest().hex(),"
        "page_key(bytes(16), BlockHashes(hashing(), 16).of(Request('a', list(range(64))).known())[-1], 3).hex())"
    )
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(str(root / part) for part in (".", "client", "daemon", "kernels"))
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert len(said) == 1


@pytest.mark.parametrize("block, cap, largest", [(16, 256, 256), (128, 256, 256), (48, 256, 192), (256, 64, 256)])
def test_the_largest_page_is_whole_blocks(block: int, cap: int, largest: int) -> None:
    made = name(group=Group(0, GROUP.layers, block, GROUP.kind), options={"cap_tokens": cap})
    assert made.cap_tokens == largest and made.schedule.unit_tokens == block


def test_options_are_checked() -> None:
    assert parse(None) == Options() == parse({})
    for given, said in (
        ({"endpint": "/run"}, "did you mean endpoint?"),
        ({"zzz": 1}, "there are: endpoint"),
        ({"wait": "long"}, "Expected `float`"),
        ({"wait": 0}, "wait is 0"),
        ({"cap_tokens": 0}, "cap_tokens is 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse(given)


def test_hybrid_models_have_a_group_for_each_kind_and_hits_that_suit_all() -> None:
    made = plan(vllm_config(), cache_config(FullAttentionSpec(32), SlidingWindowSpec(16), hash_block_size=16))
    assert not made.unserved
    assert [group.block_tokens for group in made.groups] == [32, 16] and made.step == 32
    assert made.groups[0].kind != made.groups[1].kind and "64" in made.groups[1].kind
    latent = plan(vllm_config(), cache_config(MLAAttentionSpec(64)))
    assert not latent.unserved and "fp8_ds_mla" in latent.groups[0].kind
    mixed = UniformTypeKVCacheSpecs(16, {"a": FullAttentionSpec(), "b": MLAAttentionSpec()})
    assert not plan(vllm_config(), cache_config(mixed)).unserved


@pytest.mark.parametrize(
    "config, changes, said",
    [
        (cache_config(FullAttentionSpec(), MambaSpec(), hash_block_size=16), {}, "MambaSpec"),
        (cache_config(UniformTypeKVCacheSpecs(16, {"a": FullAttentionSpec(), "b": MambaSpec()})), {}, "MambaSpec"),
        (cache_config(), {}, "no KV"),
        (cache_config(FullAttentionSpec(), SlidingWindowSpec()), {}, "unknown size"),
        (cache_config(FullAttentionSpec(), needs_kv_cache_zeroing=True), {}, "more than one precision"),
        (cache_config(FullAttentionSpec()), {"parallel__decode_context_parallel_size": 2}, "decode_context_parallel"),
        (cache_config(FullAttentionSpec()), {"cache__calculate_kv_scales": True}, "calculate_kv_scales"),
    ],
)
def test_what_cannot_be_served_is_said(config: Any, changes: dict[str, Any], said: str) -> None:
    assert said in plan(vllm_config(**changes), config).unserved


def test_of_a_draft_model_the_last_block_is_computed_again() -> None:
    speculative = SimpleNamespace(use_eagle=lambda: True)
    assert plan(vllm_config(speculative_config=speculative), cache_config(FullAttentionSpec())).drop == 16
    assert plan(vllm_config(), cache_config(FullAttentionSpec())).drop == 0
