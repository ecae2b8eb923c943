"""kvtier under other versions of vLLM than the one of the other tests: found by each, loaded, failed and recovered from.

Of what differs between versions (`kvtier_client.vllm.versions`), all that a dense model on one rank meets: how loads that ended
and those that failed are reported, how a request's blocks are told after a preemption, hashes, statistics.
"""

from __future__ import annotations

import os

import pytest

from tests.system.conftest import Daemon, eventually
from tests.vllm.conftest import BLOCK, HOME, VERSION, MakeEngine, version
from tests.vllm.test_engines import cached_of, engine_space, forget, nothing_is_held, prompt, spoil, tokens_of

pytestmark = pytest.mark.timeout(600)

OLDEST, NEWEST = "0.26.0", "0.33.0"
"""What CI has; others are looked at where `.ci/vllm VERSION` has put them."""
LOSE_COUNTS = {"0.26.0", "0.27.1"}
"""`LLM` of these does not count what happens in a step that gives no token; their servers do."""
PLACES = {one.name for one in (HOME / "versions").glob("0.*")}


@pytest.mark.skipif(bool(VERSION), reason="all engines are of another version already")
@pytest.mark.parametrize("number", sorted({OLDEST, NEWEST} | PLACES))
def test_another_version(number: str, engines: MakeEngine, shared: Daemon) -> None:
    if number not in PLACES:
        assert not os.environ.get("KVTIER_VLLM"), f"no vLLM {number} in {HOME}: .ci/vllm {number} puts one there"
        pytest.skip(f"no vLLM {number}: .ci/vllm {number} puts one there")
    straits = {"num_gpu_blocks_override": 21, "max_num_seqs": 5, "max_model_len": 256}
    engine = engines(shared.endpoint, version(number), anew=True, disable_log_stats=False, **straits)
    assert engine.do("import vllm; result = vllm.__version__") == number
    alike = prompt(300, 3 * BLOCK + 4)
    asked = [alike + prompt(301 + n, 24) for n in range(5)]  # each needs a fourth block, and soon a fifth
    cold = engine.generate(*asked, tokens=7)
    engine.settle()
    forget(engine)
    warm = engine.generate(*asked, tokens=7)
    assert min(cached_of(warm)) >= 3 * BLOCK and tokens_of(warm) == tokens_of(cold)
    engine.settle()
    forget(engine)
    engine.do(
        "inside = llm.llm_engine.engine_core.engine_core.scheduler.connector\n"
        "allocated, evicted = inside._scheduler.allocated, []\n"
        "def evicting(*given):\n"
        "    worker()._link.client().evict(everything=True)\n"
        "    evicted.append(given[2])\n"
        "    allocated(*given)\n"
        "inside._scheduler.allocated = evicting"
    )
    counting = "result = {one.name: one.value for one in llm.get_metrics() if hasattr(one, 'value')}"
    # On a busy machine a lookup may be answered late, and is a miss; or a load comes after another request, which computed
    # the same, has saved it again. Then no load fails.
    for _ in range(5):
        assert tokens_of(engine.generate(*asked, tokens=7)) == tokens_of(cold), "pages that go are computed"
        engine.settle()
        forget(engine)
        counted = engine.do(counting)
        failed = number in LOSE_COUNTS or counted["vllm:kvtier_failed_loads"]
        if failed and engine.do("result = len(evicted)"):
            break
    else:
        pytest.fail("no load failed: this shows nothing")
    engine.do("del inside._scheduler.allocated")
    assert counted["vllm:kvtier_saved_pages"] >= 3
    if number not in LOSE_COUNTS:
        assert counted["vllm:kvtier_failed_loads"] > 0 and counted["vllm:kvtier_loaded_tokens"] >= 3 * BLOCK
    with shared.client() as client:
        spoil(client, [engine_space(engine)])
        spoiled = engine.generate(asked[0])
        assert cached_of(spoiled) >= [3 * BLOCK] and tokens_of(spoiled)[0] != tokens_of(cold)[0][:4]
        client.evict(everything=True)
        eventually(lambda: nothing_is_held(client), "no lease and no reservation is left")
    engine.stop()
