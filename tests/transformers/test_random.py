"""Whatever happens to a worker in whatever order: every request ends with the right tokens, cancelled, or in a clear error;
between steps all counts hold, and at the end nothing is held."""

from __future__ import annotations

import random

import pytest

from kvtier_client.transformers import Request, RequestFailed, Sampling, Worker
from tests.system.conftest import MakeDaemon
from tests.transformers.conftest import assert_holds_nothing
from tests.transformers.test_launch import tiny

PAGE = 16 << 10
"""Bytes of a page of 16 tokens of the tiny model."""
PROMPTS = [[(7 * at + seed * at * at + seed) % 120 + 4 for at in range(70)] for seed in range(4)]


def outcome(request: Request) -> tuple[list[list[int]], RequestFailed | None]:
    """(tokens by sample, the error that it ended in)."""
    samples: list[list[int]] = [[] for _ in request.finish]
    try:
        for token in request:
            samples[token.sample].append(token.token)
    except RequestFailed as error:
        return samples, error
    return samples, None


@pytest.mark.parametrize("seed", [3, 5, 16, 21])
def test_a_worker_survives_what_comes(seed: int, make: MakeDaemon) -> None:
    plain, rng = tiny(), random.Random(seed)
    daemon = make(host=str(28 * PAGE), ssd="4MiB", slab=str(4 * PAGE)).start()
    operator = daemon.client()
    worker = Worker(plain.model, daemon.client(name="worker"), max_batch=6, step_tokens=50, patience=20)
    asked: list[tuple[Request, int]] = []
    while len(asked) < 30:
        for _ in range(rng.randrange(12)):
            worker.step()
            worker.check()
        act = rng.random()
        if act < 0.7:
            count, prompt = rng.randrange(1, 40), rng.choice(PROMPTS)[: rng.randrange(1, 70)]
            wishes = Sampling(max_tokens=count, n=rng.choice((1, 1, 1, 2, 3)), ignore_eos=True)
            asked.append((worker.submit(prompt, wishes, salt=rng.choice(("", "", "other"))), count))
        elif act < 0.8 and asked:
            request = rng.choice(asked)[0]
            request.cancel(rng.choice((None, rng.randrange(request.sampling.n))))
        elif act < 0.9:
            operator.evict(everything=True)
        elif act < 0.95:
            daemon.kill()
            daemon.start()
            operator = daemon.client()
        else:
            daemon.stop()
            for _ in range(3):
                worker.step()
            daemon.start()
            operator = daemon.client()
    for _ in range(100_000):
        if not worker.step():
            break
        worker.check()
    for request, count in asked:
        samples, error = outcome(request)
        assert error is None, (request, error)
        wanted = plain.says(request.prompt, 40)[:count]
        for sample, (how, tokens) in enumerate(zip(request.finish, samples, strict=True)):
            assert tokens == (wanted if how == "length" else wanted[: len(tokens)]), (request, how)
            assert how == "length" or not request.wants(sample)
    worker.close()
    assert_holds_nothing(daemon, worker.client)
