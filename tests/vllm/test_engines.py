"""kvtier under real vLLM, on the CPU: what it may change is time. Whatever becomes of pages, daemon or engine, tokens are those
that vLLM computes by itself.

Greedy and in float32, so that the same prompt gives the same tokens however its KV came about.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest

from kvtier.keys import Namespace
from kvtier.layout import EngineLayout
from kvtier_client import Client, NamespaceClient
from tests.system.conftest import Daemon, eventually
from tests.vllm.conftest import BLOCK, Engine, MakeEngine

pytestmark = pytest.mark.timeout(600)


def prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(100, 40_000) for _ in range(tokens)]


def tokens_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [one["tokens"] for one in answers]


def cached_of(answers: list[dict[str, Any]]) -> list[int]:
    return [one["cached"] for one in answers]


def forget(engine: Engine) -> None:
    """vLLM's own prefix cache, so that what is cached next comes from kvtier."""
    assert engine.do("result = llm.reset_prefix_cache()")


def nothing_is_held(client: Client) -> bool:
    sessions = client.sessions()
    held = sum(one["leases"] + one["leased_pages"] + one["reserved_pages"] for one in sessions["sessions"])
    return bool(held == 0 and sessions["quarantined_frames"] == 0)


def engine_space(engine: Engine) -> Namespace:
    """Of an engine of one rank and one kind of layer."""
    (packed,) = engine.do(
        "import msgspec; result = [msgspec.msgpack.encode(one).hex() for one in worker()._spaces.values()]"
    )
    return msgspec.msgpack.decode(bytes.fromhex(packed), type=Namespace)


def spoil(client: Client, spaces: Iterable[Namespace]) -> None:
    """Put other bytes into their pages, under the keys that they have: every number with its other sign."""
    for named in spaces:
        space = NamespaceClient(client, named)
        assert isinstance(named.layout, EngineLayout)
        width = 4 if "float32" in named.layout.arrangement else 1
        pages = client.inventory(space.seed)["pages"]
        assert pages, "there are some"
        for page in pages:
            with space.borrow([bytes.fromhex(page["key"])]) as lease:
                for one in lease:
                    one.numpy()[..., width - 1 :: width] ^= 0x80


@pytest.fixture(scope="module")
def plain(engines: MakeEngine) -> Engine:
    """Without kvtier: what every other must say."""
    return engines(None)


@pytest.fixture(scope="module")
def first(engines: MakeEngine, shared: Daemon) -> Engine:
    return engines(shared.endpoint)


@pytest.fixture(scope="module")
def second(engines: MakeEngine, shared: Daemon) -> Callable[[], Engine]:
    """Another process, with another PYTHONHASHSEED; started when it is first asked for."""
    return functools.cache(lambda: engines(shared.endpoint, environment={"PYTHONHASHSEED": "123"}, anew=True))


def test_a_second_engine_starts_warm_and_says_the_same(
    shared: Daemon, plain: Engine, first: Engine, second: Callable[[], Engine]
) -> None:
    """Hits to the last whole block, and never of the whole prompt."""
    long, exact, short = prompt(1, 300), prompt(2, 4 * BLOCK), prompt(3, BLOCK - 1)
    other_end = long[: 8 * BLOCK] + prompt(4, BLOCK + 9)
    asked = (long, exact, short)
    cold = first.generate(*asked)
    assert cached_of(cold) == [0, 0, 0]
    assert tokens_of(cold) == tokens_of(plain.generate(*asked))
    first.settle()
    warm = second().generate(*asked)
    assert cached_of(warm) == [9 * BLOCK, 3 * BLOCK, 0]
    assert tokens_of(warm) == tokens_of(cold)
    again = second().generate(other_end)
    assert cached_of(again) == [8 * BLOCK], "all but its last blocks are shared"
    assert tokens_of(again) == tokens_of(plain.generate(other_end))
    with shared.client() as client:
        eventually(lambda: nothing_is_held(client), "no lease and no reservation is left")


def test_two_engines_at_once(shared: Daemon, plain: Engine, first: Engine, second: Callable[[], Engine]) -> None:
    """Both compute, save and load the same prefixes in the same moment."""
    both = (first, second())
    system = prompt(10, 5 * BLOCK)
    for turn in range(2):
        asked = [system + prompt(100 * turn + n, 40 + 30 * n) for n in range(3)]
        for engine in both:
            engine.tell(f"result = generate({asked}, 4)")
        answers = [engine.heard() for engine in both]
        wanted = tokens_of(plain.generate(*asked))
        assert [tokens_of(one) for one in answers] == [wanted, wanted]
    for engine in both:
        engine.settle()
        forget(engine)
    assert min(cached_of(second().generate(*asked))) >= 5 * BLOCK
    with shared.client() as client:
        eventually(lambda: nothing_is_held(client), "no lease and no reservation is left")
    second().stop()


def test_decoded_tokens_are_kept_as_well(plain: Engine, first: Engine) -> None:
    """The next turn of a conversation begins with the answer of the last."""
    asked = prompt(20, 3 * BLOCK - 6)
    answer = first.generate(asked, tokens=10)[0]["tokens"]
    first.settle()
    forget(first)
    following = asked + answer + prompt(21, 10)
    warm = first.generate(following)
    assert cached_of(warm) == [3 * BLOCK]
    assert tokens_of(warm) == tokens_of(plain.generate(following))


def test_pages_that_go_between_lookup_and_load_are_computed(plain: Engine, first: Engine, shared: Daemon) -> None:
    asked = [prompt(30 + n, 200) for n in range(3)]
    first.generate(*asked)
    first.settle()
    forget(first)
    first.do(
        "from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole\n"
        "scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler\n"
        "allocated = scheduler.allocated\n"
        "def evicting(*given):\n"
        "    worker()._link.client().evict(everything=True)\n"
        "    allocated(*given)\n"
        "scheduler.allocated = evicting"
    )
    answers = first.generate(*asked)
    first.do("del scheduler.allocated")
    assert tokens_of(answers) == tokens_of(plain.generate(*asked))
    assert first.do("result = len(worker()._heard.failed)") == 0, "what failed was told"
    first.settle()
    forget(first)
    assert cached_of(first.generate(*asked)) == [6 * BLOCK] * 3, "and what was computed instead is kept"


def test_only_right_bytes_give_right_tokens(plain: Engine, first: Engine, shared: Daemon) -> None:
    """The control: with other bytes under the right keys the answer changes. So the KV that other tests load is used."""
    asked = prompt(40, 300)
    wanted = tokens_of(first.generate(asked))
    first.settle()
    forget(first)
    assert tokens_of(first.generate(asked)) == wanted == tokens_of(plain.generate(asked))
    forget(first)
    with shared.client() as client:
        spoil(client, [engine_space(first)])
    spoiled = first.generate(asked)
    assert cached_of(spoiled) == [9 * BLOCK] and tokens_of(spoiled) != wanted
    with shared.client() as client:
        client.evict(everything=True)


def test_kvtierd_may_be_killed_and_come_back(engines: MakeEngine, plain: Engine, first: Engine, shared: Daemon) -> None:
    asked = [prompt(50 + n, 150) for n in range(2)]
    wanted = tokens_of(plain.generate(*asked))
    first.generate(*asked)
    first.settle()
    forget(first)
    first.tell(f"result = generate({asked}, 4)")
    shared.kill()
    assert tokens_of(first.heard()) == wanted
    forget(first)
    assert tokens_of(first.generate(*asked)) == wanted, "nobody is there, and it serves"
    late = engines(shared.endpoint)  # it comes up without kvtierd too
    assert tokens_of(late.generate(*asked)) == wanted
    shared.start()

    def found() -> bool:
        for engine in (first, late):
            forget(engine)
            answers = engine.generate(*asked)
            assert tokens_of(answers) == wanted
            engine.settle()
        return cached_of(answers) == [4 * BLOCK] * 2

    eventually(found, "both have found it again, and each other's pages", within=90)
    late.stop()


def test_a_small_kv_cache_with_preemption(engines: MakeEngine, shared: Daemon) -> None:
    """Blocks are taken from requests and used again while they are saved and loaded. Beside vLLM in the same straits."""
    straits = {"num_gpu_blocks_override": 21, "max_num_seqs": 5, "max_model_len": 256}
    asked = [prompt(60 + n % 4, 100) + prompt(600 + n, 24) for n in range(8)]  # four blocks, and soon a fifth
    alone = engines(None, **straits)
    wanted = tokens_of(alone.generate(*asked, tokens=7))
    alone.stop()
    engine = engines(shared.endpoint, **straits)
    engine.do(
        "scheduler = llm.llm_engine.engine_core.engine_core.scheduler\nseen = set()\npreempt = scheduler._preempt_request\n"
        "def spying(request, *given, **more):\n    seen.add(request)\n    return preempt(request, *given, **more)\n"
        "scheduler._preempt_request = spying"
    )
    for turn in range(2):
        answers = engine.generate(*asked, tokens=7)
        assert tokens_of(answers) == wanted, turn
        engine.settle()
        forget(engine)
    assert min(cached_of(answers)) >= 3 * BLOCK, "what was saved in the middle of it is found"
    assert engine.do("result = sum(one.num_preemptions for one in seen)") > 0, "no preemption: the test shows nothing"
    with shared.client() as client:
        eventually(lambda: nothing_is_held(client), "no lease and no reservation is left")
    engine.stop()


def test_another_dtype_finds_nothing_and_prefix_caching_may_be_off(
    engines: MakeEngine, shared: Daemon, first: Engine
) -> None:
    asked = prompt(70, 200)
    first.generate(asked)
    first.settle()
    other = engines(shared.endpoint, dtype="bfloat16", enable_prefix_caching=False)
    cold = other.generate(asked)
    assert cached_of(cold) == [0], "what one wrote the other does not read"
    other.settle()
    warm = other.generate(asked)
    assert cached_of(warm) == [6 * BLOCK] and tokens_of(warm) == tokens_of(cold)
    salted = other.generate(asked, cache_salt="another user")
    assert cached_of(salted) == [0], "nor a user with a salt of his own"
    other.stop()


def test_a_connector_that_serves_nothing_answers_everything(plain: Engine) -> None:
    """Where a rank did not tell its namespaces, or this vLLM lacks what a hybrid model needs: said once, and a miss."""
    said = plain.do(
        "import copy\n"
        "from types import SimpleNamespace\n"
        "from vllm.config import KVTransferConfig\n"
        "from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole\n"
        "from kvtier_client.vllm import connector, versions\n"
        "from kvtier_client.vllm.messages import Heard\n"
        "core = llm.llm_engine.engine_core.engine_core\n"
        "config, caches = copy.copy(core.vllm_config), copy.copy(core.scheduler.kv_cache_config)\n"
        "config.kv_transfer_config = KVTransferConfig(kv_connector='KVTierConnector', kv_role='kv_both')\n"
        "config.parallel_config = copy.copy(config.parallel_config)\n"
        "config.parallel_config.tensor_parallel_size = 2\n"
        "result = []\n"
        "def answers(groups):\n"
        "    caches.kv_cache_groups = list(groups)\n"
        "    one = connector.KVTierConnector(config, KVConnectorRole.SCHEDULER, caches)\n"
        "    one.set_xfer_handshake_metadata_pp_aware({(0, 0): connector.KVTierHandshake({0: b'', 1: b''})})\n"
        "    request = SimpleNamespace(request_id='a')\n"
        "    one.on_new_request(request)\n"
        "    assert one.get_num_new_matched_tokens(request, 0) == (0, False)\n"
        "    one.update_state_after_alloc(request, None, 0)\n"
        "    one.bind_connector_metadata(one.build_connector_meta(None))\n"
        "    one.start_load_kv(None); one.wait_for_save()\n"
        "    assert one.get_finished(set()) == (None, None) and one.get_block_ids_with_load_errors() == set()\n"
        "    assert one.request_finished(request, []) == (False, None) and not list(one.take_events())\n"
        "    assert one.reset_cache() and not one.requires_kv_delivery\n"
        "    one.update_connector_output(SimpleNamespace(kv_connector_worker_meta=None))\n"
        "    one.shutdown()\n"
        "    result.append(one._unserved)\n"
        "groups = caches.kv_cache_groups\n"
        "answers(groups)\n"
        "config.kv_transfer_config.kv_connector_extra_config = {'endpint': '/nowhere'}\n"
        "try:\n"
        "    answers(groups)\n"
        "except Exception as error:\n"
        "    result.append(str(error))\n"
        "config.kv_transfer_config.kv_connector_extra_config = {}\n"
        "versions.tells_failed_requests = lambda: False\n"
        "caches.hash_block_size = groups[0].kv_cache_spec.block_size\n"
        "answers([*groups, *groups])\n"
        "a, b = (connector.KVTierWorkerMetadata(Heard({name})) for name in 'ab')\n"
        "assert a.aggregate(b).heard.failed == {'a', 'b'}\n"
        "a, b = (connector.KVTierStats(data={'loads': n, 'load_seconds': 0.5, 'loaded_bytes': 10**9}) for n in (1, 2))\n"
        "assert a.aggregate(b).reduce() == {'loads': 3, 'loaded_bytes': 2 * 10**9, 'load_GBps': 2.0}\n"
        "assert not a.is_empty(); a.reset(); assert a.is_empty()\n"
    )
    assert said[0].startswith("1 of 2 ranks told their namespaces")
    assert said[1].endswith("endpint is no option; did you mean endpoint?")
    assert said[2].startswith("a model with 2 KV cache groups")
