"""`model.generate` with a GenerationCache: the same tokens as without, and the next process is served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvtier.errors import InvalidRequest
from kvtier_client import Client
from kvtier_client.transformers import GenerationCache
from tests.system.conftest import Daemon
from tests.transformers.conftest import FOLDER, Plain, assert_holds_nothing

# Transformers 5.24 calls it `cache`; earlier ones know no other name than this.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

STORY = "Once upon a time a small dog found a map in the garden. It showed a river, a tower and a red door. "
COUNT = 12


@pytest.fixture
def client(served: Daemon) -> Iterator[Client]:
    made = served.client(name="worker")
    yield made
    assert_holds_nothing(served, made)


def generate(smol: Plain, cache: Any, ids: torch.Tensor, mask: Any = None, **wishes: Any) -> Any:
    mask = torch.ones_like(ids) if mask is None else mask
    wishes = {"max_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0, **wishes}
    with torch.inference_mode():
        out = smol.model.generate(ids, attention_mask=mask, past_key_values=cache, **wishes)
    return out[:, ids.shape[1] :].tolist()


def test_a_cold_prompt_then_a_hit_then_part_of_one(smol: Plain, client: Client) -> None:
    prompt = smol.tokens(STORY * 3)
    found = []
    for tokens in (prompt, prompt, prompt[:50] + smol.tokens(" never")):
        ids = torch.tensor([tokens])
        with GenerationCache(smol.model, client, ids) as cache:
            assert generate(smol, cache, ids) == [smol.says(tokens, COUNT)]
            found += cache.cached_tokens
    assert found == [0, (len(prompt) - 1) // 16 * 16, 48]
    assert smol.model.config._attn_implementation != "kvtier", "the model has its own attention back"


def test_an_answer_is_there_for_the_next_turn(smol: Plain, client: Client) -> None:
    ids = torch.tensor([smol.tokens(STORY)])
    with GenerationCache(smol.model, client, ids) as cache:
        answer = generate(smol, cache, ids)[0]
    turn = torch.tensor([[*ids[0].tolist(), *answer, *smol.tokens(" And so")]])
    with GenerationCache(smol.model, client, turn) as cache:
        assert cache.cached_tokens == [(ids.shape[1] + COUNT - 1) // 16 * 16]
        assert generate(smol, cache, turn) == [smol.says(turn[0].tolist(), COUNT)]


def test_a_batch_padded_on_the_left_with_unequal_hits(smol: Plain, client: Client) -> None:
    long, short = smol.tokens(STORY * 2), smol.tokens("The red door led to")
    for _ in range(2):
        width = max(len(long), len(short))
        rows = [long, [0] * (width - len(short)) + short, [0] * (width - 40) + long[:40]]
        ids = torch.tensor(rows)
        mask = torch.tensor([[0] * (width - n) + [1] * n for n in (len(long), len(short), 40)])
        with GenerationCache(smol.model, client, ids, mask) as cache:
            said = generate(smol, cache, ids, mask)
        assert said == [smol.says(tokens, COUNT) for tokens in (long, short, long[:40])]
    assert cache.cached_tokens == [(len(long) - 1) // 16 * 16, 0, 32]


def test_beams_fork_pages_and_say_what_plain_beams_say(smol: Plain, client: Client) -> None:
    ids = torch.tensor([smol.tokens(STORY)])
    wishes = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 12}
    plain = generate(smol, None, ids, **wishes)
    for _ in range(2):
        with GenerationCache(smol.model, client, ids) as cache:
            assert generate(smol, cache, ids, **wishes) == plain


def test_sampling_with_a_seed_draws_the_same(smol: Plain, client: Client) -> None:
    ids = torch.tensor([smol.tokens(STORY)])
    drawn = []
    for cached in (False, True):
        torch.manual_seed(3)
        wishes = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "num_return_sequences": 2}
        if cached:
            with GenerationCache(smol.model, client, ids) as cache:
                drawn.append(generate(smol, cache, ids, **wishes))
        else:
            drawn.append(generate(smol, None, ids, **wishes))
    assert drawn[0] == drawn[1]


def test_another_process_finds_what_this_one_stored(smol: Plain, client: Client, served: Daemon) -> None:
    prompt = smol.tokens(STORY * 2)
    ids = torch.tensor([prompt])
    with GenerationCache(smol.model, client, ids) as cache:
        generate(smol, cache, ids)
    other = served.worker()
    code = f"""
import torch
from bench.demo import smollm
from pathlib import Path
from kvtier_client.transformers import GenerationCache
torch.set_num_threads(1)
model, _ = smollm.load(Path({str(FOLDER)!r}))
ids = torch.tensor([{json.dumps(prompt)}])
with GenerationCache(model, client, ids) as cache:
    out = model.generate(ids, past_key_values=cache, max_new_tokens={COUNT}, do_sample=False)
result = [cache.cached_tokens, out[0, ids.shape[1]:].tolist()]
"""
    other.tell(code)
    assert other.heard(within=90) == [[(len(prompt) - 1) // 16 * 16], smol.says(prompt, COUNT)]


def test_without_kvtierd_it_goes_on_in_memory_of_its_own(smol: Plain, served: Daemon) -> None:
    ids = torch.tensor([smol.tokens(STORY * 2)])
    client = served.client()
    with GenerationCache(smol.model, client, ids) as cache:
        served.kill()
        assert generate(smol, cache, ids, max_new_tokens=24) == [smol.says(ids[0].tolist(), 24)]


def test_what_it_cannot_do_is_refused(smol: Plain, client: Client) -> None:
    ids = torch.tensor([smol.tokens(STORY)])
    right = torch.ones_like(ids)
    right[0, -1] = 0
    with pytest.raises(InvalidRequest, match="padding_side"):
        GenerationCache(smol.model, client, ids, right)
    with GenerationCache(smol.model, client, ids) as cache, pytest.raises(InvalidRequest, match="other tokens"):
        generate(smol, cache, ids + 1)
