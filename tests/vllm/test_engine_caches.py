"""kvtier under vLLM where a block's bytes are not a dense model's in float32 on one rank: stages of a pipeline, one latent
vector for all heads, eight bits, blocks of other sizes, and tokens that stand for sounds. Models are small and drawn, but that
of the pipeline.

Each has its control: with other bytes in the pages it says something else, so those that were loaded are what it speaks from.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from kvtier_client import NamespaceClient
from tests.system.conftest import Daemon, eventually
from tests.vllm.conftest import BLOCK, MakeEngine
from tests.vllm.test_engine_kinds import TWO, spaces_of
from tests.vllm.test_engines import cached_of, forget, nothing_is_held, prompt, spoil, tokens_of

WARMED = "llm.collective_rpc(lambda worker: worker.model_runner._dummy_run(8))"
"""What vLLM leaves out on the CPU where nothing is compiled, and a pipeline's second stage needs: room for what the first sends."""

CPU = Path("/proc/cpuinfo").read_text()
EIGHT_BITS = "avx512f" in CPU or "amx_tile" in CPU
"""Whether vLLM keeps KV of eight bits on this machine's CPU: it refuses others."""

pytestmark = pytest.mark.timeout(600)


def test_stages_of_a_pipeline(engines: MakeEngine, shared: Daemon) -> None:
    """Each stage keeps the KV of its own layers, and a hit needs both. An engine that was started again begins warm."""
    stages = {"environment": TWO, "pipeline_parallel_size": 2}
    asked = [prompt(200, 300), prompt(201, 4 * BLOCK), prompt(202, 20)]
    first = engines(shared.endpoint, **stages)
    first.do(WARMED)
    cold = first.generate(*asked)
    assert cached_of(cold) == [0, 0, 0]
    (spaces,) = spaces_of(first)
    assert {(one.tp_rank, one.tp_size, one.pp_rank, one.pp_size) for one in spaces} == {(0, 1, 0, 2), (0, 1, 1, 2)}
    with shared.client() as client:

        def saved() -> bool:
            kept = {one["digest"]: one["pages"] for one in client.inventory()["namespaces"]}
            return [kept.get(one.digest().hex(), 0) for one in spaces] == [9 + 4, 9 + 4]

        for _ in range(5):  # a save is taken back where the engine needs its blocks first: then they are served again
            with contextlib.suppress(AssertionError):
                eventually(saved, "all is saved", within=5)
                break
            forget(first)
            first.generate(*asked)
        assert saved()
        first.stop()
        second = engines(shared.endpoint, **stages)
        second.do(WARMED)
        warm = second.generate(*asked)
        assert cached_of(warm) == [9 * BLOCK, 3 * BLOCK, 0] and tokens_of(warm) == tokens_of(cold)
        forget(second)
        spoil(client, spaces[1:])
        spoiled = second.generate(asked[0])
        assert cached_of(spoiled) == [9 * BLOCK] and tokens_of(spoiled) != tokens_of(cold)[:1]
        forget(second)
        NamespaceClient(client, spaces[1]).evict()
        again = second.generate(asked[0])
        assert cached_of(again) == [0] and tokens_of(again) == tokens_of(cold)[:1], "a hit that one stage lacks is none"
        eventually(lambda: nothing_is_held(client), "no lease and no reservation is left")
    second.stop()


def test_latent_attention(engines: MakeEngine, shared: Daemon) -> None:
    """DeepSeek's: one head of 576 for all. vLLM's own prefix cache is off there on the CPU, so every hit is kvtier's. One token
    that is left goes another way in vLLM than several."""
    engine = engines(shared.endpoint, make="latent")
    asked = [prompt(210, 12 * 16 + 1), prompt(211, 200), prompt(212, 300), prompt(213, 9)]
    cold = engine.generate(*asked)
    assert cached_of(cold) == [0] * 4
    engine.settle()
    ((space,),) = spaces_of(engine)
    assert space.layout.unit_tokens == 16 and space.layout.unit_bytes == 2 * 16 * 576 * 4, "two layers, one head"
    warm = engine.generate(*asked)
    assert cached_of(warm) == [192, 192, 288, 0] and tokens_of(warm) == tokens_of(cold)
    with shared.client() as client:
        spoil(client, [space])
        spoiled = engine.generate(*asked)
        assert cached_of(spoiled) == [192, 192, 288, 0]
        assert all(one != other for one, other in zip(tokens_of(spoiled)[:3], tokens_of(cold)[:3], strict=True))
        eventually(lambda: nothing_is_held(client), "no lease and no reservation is left")
    engine.stop()


def test_sounds_are_told_apart_and_found_again(engines: MakeEngine, shared: Daemon) -> None:
    """The tokens of two requests are the same, and what stands for them is not: what was heard is in vLLM's hashes."""
    engine = engines(shared.endpoint, make="sounds")
    text, after = prompt(220, 70), prompt(221, 20)
    engine.do(
        "import numpy\n"
        f"text, after = {text}, {after}\n"
        "low, noise = numpy.sin(numpy.arange(32000) * 0.05), numpy.random.default_rng(1).normal(size=32000)\n"
        "def heard(sound):\n"
        "    asked = [*text, 49153, 49152, 49154, *after]\n"
        "    return generate([asked], 4, multi_modal_data={'audio': [(sound.astype('f4'), 16000)]})"
    )

    def heard(sound: str) -> dict[str, Any]:
        (answer,) = engine.do(f"result = heard({sound})")
        engine.settle()
        forget(engine)
        return dict(answer)

    low = heard("low")
    assert low["cached"] == 0
    assert heard("low") == {**low, "cached": 4 * BLOCK}, "70 tokens, some 50 that stand for the sound, and 22"
    noise = heard("noise")
    assert noise["cached"] == 2 * BLOCK, "what comes before the sound is shared"
    assert noise["tokens"] != low["tokens"]
    assert heard("noise") == {**noise, "cached": 4 * BLOCK} and heard("low") == {**low, "cached": 4 * BLOCK}
    engine.stop()


def test_block_sizes_salts_and_kv_of_eight_bits_keep_to_themselves(engines: MakeEngine, shared: Daemon) -> None:
    """Engines of one model and one daemon that differ in how they keep KV read nothing of each other's, and each its own."""
    asked = prompt(230, 300)
    first = engines(shared.endpoint, make="sounds")
    said = first.generate(asked)
    assert cached_of(said) == [0]
    first.settle()
    found: dict[str, list[list[int]]] = {}
    others: list[tuple[str, int, dict[str, Any]]] = [("blocks of another size", 64, {"block_size": 64})]
    if EIGHT_BITS:
        others.append(("eight bits", BLOCK, {"kv_cache_dtype": "fp8"}))
    with shared.client() as client:
        for name, size, options in others:
            other = engines(shared.endpoint, make="sounds", **options)
            cold = other.generate(asked)
            assert cached_of(cold) == [0], name
            other.settle()
            forget(other)
            warm = other.generate(asked)
            assert cached_of(warm) == [300 // size * size] and tokens_of(warm) == tokens_of(cold), name
            found[name] = tokens_of(cold)
            forget(other)
            spoil(client, spaces_of(other)[0])
            spoiled = other.generate(asked)
            assert cached_of(spoiled) == [300 // size * size] and tokens_of(spoiled) != tokens_of(cold), name
            other.stop()
    assert found["blocks of another size"] == tokens_of(said)
    forget(first)
    warm = first.generate(asked)
    assert cached_of(warm) == [9 * BLOCK] and tokens_of(warm) == tokens_of(said), "what the others have is not its"
    for salt, cached in (("one", 0), ("one", 9 * BLOCK), ("another", 0)):
        salted = first.generate(asked, cache_salt=salt)
        assert cached_of(salted) == [cached] and tokens_of(salted) == tokens_of(said), salt
        first.settle()
        forget(first)
    first.stop()
