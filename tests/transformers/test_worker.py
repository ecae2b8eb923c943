"""The worker says what plain `generate` says, token for token, however its pages come and go."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import closing

import pytest

from kvtier.errors import DaemonLost, InvalidRequest
from kvtier_client.transformers import Sampling, Worker
from tests.system.conftest import Daemon
from tests.transformers.conftest import Plain, run, said
from tests.transformers.test_launch import tiny

STORY = "Once upon a time a small dog found a map in the garden. It showed a river, a tower and a red door. "
COUNT = 12


def test_cold_prompts_of_unequal_lengths_run_together(smol: Plain, worker: Worker) -> None:
    prompts = [smol.tokens(text) for text in ("The capital of France is", STORY * 3, "def fibonacci(n):", STORY)]
    requests = [worker.submit(prompt, Sampling(max_tokens=COUNT)) for prompt in prompts]
    run(worker)
    for prompt, request in zip(prompts, requests, strict=True):
        assert said(request) == [smol.says(prompt, COUNT)]
        assert request.cached_tokens == 0 and request.prompt_tokens == len(prompt)
    assert worker.counters["steps"] <= COUNT + 4, "they did not run together"


def test_what_one_request_computed_the_next_one_borrows(smol: Plain, worker: Worker) -> None:
    prompt = smol.tokens(STORY * 3)
    first = worker.submit(prompt, Sampling(max_tokens=COUNT))
    run(worker)
    again = worker.submit(prompt, Sampling(max_tokens=COUNT))
    longer = worker.submit(prompt + smol.tokens(" Then"), Sampling(max_tokens=COUNT))
    part = worker.submit(prompt[:50] + smol.tokens(" never"), Sampling(max_tokens=COUNT))
    run(worker)
    whole = (len(prompt) - 1) // 16 * 16
    assert (first.cached_tokens, again.cached_tokens, part.cached_tokens) == (0, whole, 48)
    assert longer.cached_tokens >= whole
    assert said(first) == said(again) == [smol.says(prompt, COUNT)]
    for request in (longer, part):
        assert said(request) == [smol.says(request.prompt, COUNT)]


def test_an_answer_is_borrowed_by_the_turn_that_follows(smol: Plain, worker: Worker) -> None:
    prompt = smol.tokens(STORY)
    answer = said_by(worker, prompt)
    turn = prompt + answer + smol.tokens(" And so")
    request = worker.submit(turn, Sampling(max_tokens=COUNT))
    run(worker)
    assert request.cached_tokens >= (len(prompt) + COUNT - 1) // 16 * 16
    assert said(request) == [smol.says(turn, COUNT)]


def test_a_prompt_is_prefilled_in_chunks(smol: Plain, worker: Worker) -> None:
    worker.step_tokens = 37
    prompt, short = smol.tokens(STORY * 3), smol.tokens("Two plus two is")
    requests = [worker.submit(tokens, Sampling(max_tokens=COUNT)) for tokens in (prompt, short)]
    run(worker)
    assert [said(request) for request in requests] == [[smol.says(prompt, COUNT)], [smol.says(short, COUNT)]]
    assert worker.counters["steps"] > len(prompt) // 37


def test_samples_share_the_prompt_and_part_with_their_first_token(smol: Plain, worker: Worker) -> None:
    prompt = smol.tokens(STORY * 2)
    request = worker.submit(prompt, Sampling(max_tokens=COUNT, n=3))
    run(worker)
    assert said(request) == [smol.says(prompt, COUNT)] * 3
    assert request.finish == ["length"] * 3
    assert worker.counters["prefilled"] == len(prompt), "the prompt was computed once"
    drawn = worker.submit(prompt, Sampling(max_tokens=COUNT, n=3, temperature=1.0, seed=7))
    single = worker.submit(prompt, Sampling(max_tokens=COUNT, temperature=1.0, seed=8))
    run(worker)
    samples = said(drawn)
    assert samples[0] != samples[1] != samples[2]
    assert samples[1] == said(single)[0], "sample i is drawn from seed + i, whatever runs beside it"


def test_streaming_and_a_thread_of_its_own(smol: Plain, worker: Worker) -> None:
    prompt = smol.tokens(STORY)
    worker.start()
    seen: list[int] = []
    request = worker.submit(prompt, Sampling(max_tokens=COUNT))
    for token in request:
        assert request.finish == [None] or len(seen) >= COUNT - 2, "it came while the rest was computed"
        seen.append(token.token)
    assert seen == smol.says(prompt, COUNT)
    assert list(request) == [], "an iteration that is over stays over"


def test_cancelling_frees_all_that_was_held(smol: Plain, worker: Worker) -> None:
    prompt = smol.tokens(STORY * 3)
    running, waiting = (worker.submit(prompt, Sampling(max_tokens=400, n=2)) for _ in range(2))
    while worker.counters["tokens"] < 20:
        worker.step()
    running.cancel()
    waiting.cancel()
    run(worker)
    for request in (running, waiting):
        assert request.finish == ["cancelled"] * 2
        list(request)


def test_one_sample_is_cancelled_and_the_others_go_on(smol: Plain, worker: Worker) -> None:
    prompt = smol.tokens(STORY * 2)
    request = worker.submit(prompt, Sampling(max_tokens=COUNT, n=3))
    request.cancel(2)  # before there is more than the prompt that all share
    while worker.counters["tokens"] < 9:
        worker.step()
    request.cancel(0)
    run(worker)
    first, second, third = said(request)
    assert request.finish == ["cancelled", "length", "cancelled"]
    assert second == smol.says(prompt, COUNT)
    assert len(third) <= 1 < len(first) < COUNT and first == second[: len(first)]


def test_cancelled_while_its_pages_are_on_their_way(smol: Plain, worker: Worker) -> None:
    prompt = smol.tokens(STORY * 2)
    said_by(worker, prompt)
    request = worker.submit(prompt, Sampling(max_tokens=COUNT))
    worker.step()
    (sequence,) = worker.roster.waiting
    assert sequence.errand is not None
    assert sequence.errand.result().borrowed
    request.cancel()
    run(worker)  # the fixture sees that nothing is held


def test_what_cannot_be_served_is_refused(smol: Plain, worker: Worker) -> None:
    for tokens, samples in (([], 1), ([1 << 20], 1), ([-1], 1), ([5] * 9000, 1), ([5], 1000)):
        with pytest.raises(InvalidRequest):
            worker.submit(tokens, Sampling(n=samples))
    with pytest.raises(InvalidRequest, match="temperature"):
        Sampling(temperature=-1)


def said_by(worker: Worker, prompt: list[int]) -> list[int]:
    request = worker.submit(prompt, Sampling(max_tokens=COUNT))
    run(worker)
    return said(request)[0]


def test_all_sequences_hear_at_once_that_kvtierd_is_lost(daemon: Daemon) -> None:
    """The first to hear sends the others away, whose own answers are there already: none may be left behind."""
    plain = tiny()
    with closing(Worker(plain.model, daemon.client(), max_batch=4)) as worker:
        prompts = [[5 + at] * 60 for at in range(3)]
        requests = [worker.submit(tokens, Sampling(max_tokens=20)) for tokens in prompts]
        while len(worker.roster.running) < 3 or any(
            one.computed < 65 or one.errand is not None for one in worker.roster.running
        ):
            assert worker.step()
        for sequence in worker.roster.running:
            sequence.errand = Future()
            sequence.errand.set_exception(DaemonLost("it is gone"))
        worker.roster._collect()
        assert not worker.roster.running and not worker.roster._leaving and len(worker.roster.waiting) == 3
        run(worker)
        for tokens, request in zip(prompts, requests, strict=True):
            assert said(request) == [plain.says(tokens, 20)]


def test_a_salt_for_each_user_does_not_add_up(daemon: Daemon) -> None:
    with closing(Worker(tiny().model, daemon.client())) as worker:
        for user in range(300):
            worker._space(f"user {user}")
        assert len(worker._spaces) <= 257 and "" in worker._spaces and "user 299" in worker._spaces
