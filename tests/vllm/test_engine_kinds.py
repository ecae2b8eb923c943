"""kvtier under vLLM as not everyone runs it: two ranks, layers with windows of their own, adapters, and what it tells."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
import zmq

from kvtier.keys import Namespace
from kvtier_client import NamespaceClient
from tests.system.conftest import Daemon, eventually
from tests.vllm.conftest import BLOCK, Engine, MakeEngine
from tests.vllm.test_engines import cached_of, forget, nothing_is_held, prompt, spoil, tokens_of

pytestmark = pytest.mark.timeout(600)

TWO = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
"""A core a rank."""
INSIDE = "inside = llm.llm_engine.engine_core.engine_core.scheduler.connector\n"


def spaces_of(engine: Engine) -> list[list[Namespace]]:
    """By group: each rank's namespace."""
    packed: list[list[str]] = engine.do(
        INSIDE + "import msgspec\n"
        "result = [[msgspec.msgpack.encode(one).hex() for one in ranks] for ranks in inside._asker._spaces]"
    )
    return [[msgspec.msgpack.decode(bytes.fromhex(one), type=Namespace) for one in ranks] for ranks in packed]


def test_two_ranks_and_layers_with_windows(engines: MakeEngine, shared: Daemon) -> None:
    """A page for each rank and group, twelve in all: a hit needs every one, and a failed load of one fails the load."""
    engine = engines(shared.endpoint, environment=TWO, make="windows", tensor_parallel_size=2)
    asked = [prompt(1, 300), prompt(2, 4 * BLOCK), prompt(3, 20)]
    cold = engine.generate(*asked)
    assert cached_of(cold) == [0, 0, 0]

    spaces = spaces_of(engine)
    assert len(spaces) == 6 and {(one.tp_rank, one.tp_size) for ranks in spaces for one in ranks} == {(0, 2), (1, 2)}
    with shared.client() as client:

        def pages() -> dict[str, int]:
            kept = {one["digest"]: one["pages"] for one in client.inventory()["namespaces"]}
            return {name.hex(): kept.get(name.hex(), 0) for ranks in spaces for name in (one.digest() for one in ranks)}

        def until_saved(counts: set[int], *prompts: list[int]) -> None:
            """A save is taken back where the engine needs its blocks first: then the prompts are served again."""
            for _ in range(5):
                with contextlib.suppress(AssertionError):
                    eventually(lambda: set(pages().values()) == counts, "all is saved", within=5)
                    return
                forget(engine)
                engine.generate(*prompts)
            raise AssertionError(f"never all saved: {pages()}")

        assert len(pages()) == 12
        until_saved({9 + 4}, *asked)
        forget(engine)
        warm = engine.generate(*asked)
        assert cached_of(warm) == [9 * BLOCK, 3 * BLOCK, 0] and tokens_of(warm) == tokens_of(cold)

        # One rank's pages of one group go while the load is on its way: it fails, and the prompt is computed.
        forget(engine)
        engine.do(
            INSIDE + "allocated = inside._scheduler.allocated\n"
            "def evicting(*given):\n"
            f"    inside._link.client().evict(namespace=bytes.fromhex('{spaces[0][1].digest().hex()}'))\n"
            "    allocated(*given)\n"
            "inside._scheduler.allocated = evicting"
        )
        assert tokens_of(engine.generate(*asked)) == tokens_of(cold)
        engine.do("del inside._scheduler.allocated")
        until_saved({9 + 4}, *asked)  # what was computed, where it was missing

        # Gone for good: a hit that one rank lacks is none.
        forget(engine)
        NamespaceClient(client, spaces[5][0]).evict()
        assert cached_of(engine.generate(asked[0])) == [0]

        # The control: with other bytes in the windows' pages alone, it says something else.
        until_saved({9 + 4, 9}, asked[0])
        forget(engine)
        spoil(client, (one for ranks in spaces[:5] for one in ranks))
        spoiled = engine.generate(asked[0])
        assert cached_of(spoiled) == [9 * BLOCK] and tokens_of(spoiled) != tokens_of(cold)[:1]
        eventually(lambda: nothing_is_held(client), "no lease and no reservation is left")
    engine.stop()


class Heard:
    """What vLLM publishes of blocks outside its own memory."""

    def __init__(self, endpoint: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.connect(endpoint)
        self.blocks: set[bytes] = set()

    def held(self) -> set[bytes]:
        """Hashes of blocks that are stored and not removed."""
        while self.socket.poll(50):
            for event in msgpack.unpackb(self.socket.recv_multipart()[-1])[1]:
                if event["type"] == "BlockStored" and event["medium"] == "CPU":
                    self.blocks |= set(event["block_hashes"])
                elif event["type"] == "BlockRemoved" and event["medium"] == "CPU":
                    self.blocks -= set(event["block_hashes"])
        return self.blocks

    def close(self) -> None:
        self.socket.close(0)


def test_adapters_metrics_and_events(engines: MakeEngine, shared: Daemon, room: Path) -> None:
    events = f"ipc://{room}/events"
    folder = room / "adapter"
    publish = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events}
    engine = engines(
        shared.endpoint, enable_lora=True, max_lora_rank=8, disable_log_stats=False, kv_events_config=publish
    )
    heard = Heard(events)
    try:
        asked = prompt(70, 200)
        engine.do(
            "from pathlib import Path\nfrom tests.vllm.models import adapter\n"
            f"folder = Path({str(folder)!r})\nadapter(folder, 1)\n"
            "from vllm import SamplingParams\nfrom vllm.lora.request import LoRARequest\n"
            "def adapted(prompt, number):\n"
            "    named = LoRARequest('one', number, str(folder))\n"
            "    how = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)\n"
            "    (one,) = llm.generate([{'prompt_token_ids': prompt}], how, lora_request=named, use_tqdm=False)\n"
            "    return [{'tokens': list(one.outputs[0].token_ids), 'cached': one.num_cached_tokens}]"
        )

        def adapted(number: int) -> list[dict[str, Any]]:
            answers: list[dict[str, Any]] = engine.do(f"result = adapted({asked}, {number})")
            engine.settle()
            forget(engine)
            return answers

        base = engine.generate(asked)
        engine.settle()
        forget(engine)
        one = adapted(1)
        assert cached_of(one) == [0] and tokens_of(one) != tokens_of(base)
        again = adapted(1)
        assert cached_of(again) == [6 * BLOCK] and tokens_of(again) == tokens_of(one)
        engine.do("adapter(folder, 2)")  # other weights under the same name, in the same place
        two = adapted(2)
        assert cached_of(two) == [0] and tokens_of(two) != tokens_of(one)
        base_again = engine.generate(asked)
        assert cached_of(base_again) == [6 * BLOCK] and tokens_of(base_again) == tokens_of(base)

        def told(blocks: int) -> bool:
            engine.generate(prompt(71, 5), tokens=1)  # events go out with steps
            return len(heard.held()) == blocks

        # vLLM's own hashes do not tell the two contents of one adapter's name and path apart.
        eventually(lambda: told(2 * 6), "every block is told of", within=60)
        metrics = engine.do("result = {one.name: one.value for one in llm.get_metrics() if hasattr(one, 'value')}")
        assert metrics["vllm:kvtier_saved_pages"] == 3 * 6
        assert metrics["vllm:kvtier_loaded_tokens"] == 2 * 6 * BLOCK
        assert metrics["vllm:kvtier_failed_loads"] == 0
        with shared.client() as client:
            client.evict(everything=True)
        eventually(lambda: told(0), "and that they are gone", within=60)

        # A reset, as after weights were updated in place: nothing of before is found, though it is there.
        engine.generate(asked)
        engine.settle()
        assert engine.do("result = llm.reset_prefix_cache(reset_connector=True)")
        assert cached_of(engine.generate(asked)) == [0]
        engine.settle()
        forget(engine)
        assert cached_of(engine.generate(asked)) == [6 * BLOCK], "what was saved since then is"
    finally:
        heard.close()
    engine.stop()
