"""From device memory to kvtierd and back through SGLang's own radix tree, as a scheduler drives it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.srt import runtime_context
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from tests.sglang.real.server import PAGE, fields, hashes, prompt
from tests.sglang.real.tree import Tree, without_a_gpu
from tests.system.conftest import Daemon, eventually

MakeTree = Callable[..., Tree]


@pytest.fixture
def tree(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeTree]:
    """Caches of servers of one model at `daemon`. One server's settings are published at a time, those of the last."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    config |= {"num_hidden_layers": 2, "vocab_size": 100, "intermediate_size": 64, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    without_a_gpu(monkeypatch)
    made: list[Tree] = []

    def factory(**options: Any) -> Tree:
        made.append(Tree(daemon.endpoint, tmp_path, **options))
        return made[-1]

    yield factory
    for one in made:
        one.close()
    runtime_context.reset_context()


@pytest.mark.parametrize("told", [True, False], ids=["prefix told", "prefix not told"])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_a_conversation_that_a_new_server_goes_on_with(tree: MakeTree, layout: str, told: bool) -> None:
    io = "direct" if layout == "page_first_direct" else "kernel"
    options = {"hicache_mem_layout": layout, "hicache_io_backend": io, "told": told}
    first, tokens = tree(**options), prompt(1, 20)
    assert first.serve(tokens[: 8 * PAGE]) == (0, 0)
    assert first.serve(tokens[: 15 * PAGE]) == (8, 0)
    assert first.serve(tokens[: 8 * PAGE] + prompt(2, 4)) == (8, 0), "a branch"
    first.close()
    second = tree(**options)
    assert second.serve(tokens) == (0, 15)
    assert second.serve(tokens[: 8 * PAGE] + prompt(2, 4)) == (8, 4), "what follows pages that it has now"
    assert second.serve(prompt(3, 5)) == (0, 0)
    third = tree(**options)
    assert third.serve(tokens) == (0, 20)


def test_more_than_the_device_holds_is_served_from_kvtierd(tree: MakeTree) -> None:
    """Pools of 32 pages on the device and 65 on the host; ten prompts of 12, twice."""
    one = tree(tokens=32 * PAGE)
    prompts = [prompt(seed, 12) for seed in range(10)]
    from_kvtierd = 0
    for turn in range(2):
        for tokens in prompts:
            need = 12 * PAGE
            if one.allocator.available_size() < 2 * need:
                evict(one, 2 * need)
            _, loaded = one.serve(tokens)
            from_kvtierd += loaded
            assert turn or not loaded
    assert from_kvtierd >= 40


def test_kvtierd_killed_between_two_requests(tree: MakeTree, daemon: Daemon) -> None:
    one, tokens = tree(), prompt(1, 10)
    one.serve(tokens)
    client = daemon.client()
    eventually(lambda: client.stats()["tiers"][1]["pages"] == 10, "saved")
    client.close()
    daemon.kill()
    other = tree()
    assert other.serve(tokens) == (0, 0), "computed"
    assert one.serve(tokens + prompt(2, 3)) == (10, 0)
    daemon.start()
    third = tree()
    assert third.serve(tokens) == (0, 10)


def test_what_is_stored_is_one_chain_where_the_prefix_is_told(tree: MakeTree, daemon: Daemon) -> None:
    one, tokens = tree(told=True), prompt(1, 9)
    for pages in (3, 5, 9):
        one.serve(tokens[: pages * PAGE])
    client = daemon.client()
    (space,) = client.inventory()["namespaces"]
    pages = client.inventory(bytes.fromhex(space["digest"]))["pages"]
    assert sorted(page["number"] for page in pages) == list(range(9))


def test_a_corrupted_page_reaches_the_device_and_is_seen(tree: MakeTree, daemon: Daemon) -> None:
    """The control."""
    one, tokens = tree(), prompt(1, 6)
    one.serve(tokens)
    store = one.cache.cache_controller.storage_backend._stores[False]
    space = daemon.client().namespace(store.spec.layout, **fields(store.spec))
    with space.borrow([store.key(key) for key in hashes(tokens)]) as lease:
        lease[4].view[0] ^= 1
    with pytest.raises(AssertionError, match="page 4 is wrong"):
        tree().serve(tokens)


def evict(tree: Tree, tokens: int) -> None:
    tree.cache.evict(EvictParams(num_tokens=tokens))
