"""The same tokens when frames run out, when kvtierd dies, when its pages are evicted; or a clear error, and the worker goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtier.errors import OutOfPages
from kvtier_client.transformers import Request, RequestFailed, Sampling, Worker
from tests.system.conftest import Daemon, MakeDaemon, eventually
from tests.transformers.conftest import Plain, assert_holds_nothing, run, said

STORY = "Once upon a time a small dog found a map in the garden. It showed a river, a tower and a red door. "
PAGE = 720 << 10
"""Bytes of a page of 16 tokens of the model."""

MakeWorker = Callable[..., Worker]


@pytest.fixture
def make_worker(smol: Plain) -> Iterator[MakeWorker]:
    """Workers, closed at the end, when they must hold nothing."""
    made: list[tuple[Worker, Daemon]] = []

    def factory(daemon: Daemon, **options: Any) -> Worker:
        worker = Worker(smol.model, daemon.client(name="worker"), **{"patience": 20.0, **options})
        made.append((worker, daemon))
        return worker

    yield factory
    for worker, daemon in made:
        worker.close()
        assert_holds_nothing(daemon, worker.client)


def prompts(smol: Plain, count: int, length: int) -> list[list[int]]:
    """Prompts that share nothing."""
    return [(smol.tokens(f"{at} {STORY * 12}"))[:length] for at in range(count)]


def agreed(smol: Plain, requests: list[Request], count: int) -> bool:
    return all(smol.agrees(request.prompt, answer, count) for request in requests for answer in said(request))


def steps(worker: Worker, tokens: int) -> None:
    """Until so many tokens more are made."""
    goal = worker.counters["tokens"] + tokens
    while worker.counters["tokens"] < goal:
        assert worker.step()
        worker.check()


def test_when_frames_run_out_the_youngest_makes_room(smol: Plain, make: MakeDaemon, make_worker: MakeWorker) -> None:
    daemon = make(host=str(20 * PAGE), ssd="256MiB", slab=str(2 * PAGE)).start()
    worker = make_worker(daemon)
    requests = [worker.submit(prompt, Sampling(max_tokens=30)) for prompt in prompts(smol, 3, 90)]
    run(worker)
    assert worker.counters["preempted"], "there was room for all: this tests nothing"
    assert agreed(smol, requests, 30)
    assert worker.counters["borrowed"], "what was preempted was borrowed again, not computed again"


def test_samples_that_are_preempted_go_on_each_for_itself(
    smol: Plain, make: MakeDaemon, make_worker: MakeWorker
) -> None:
    prompt, wishes = prompts(smol, 1, 45)[0], Sampling(max_tokens=30, n=4, temperature=1.0, seed=1, ignore_eos=True)
    answers = []
    for pages in (100, 10):
        worker = make_worker(make(host=str(pages * PAGE), ssd="256MiB", slab=str(2 * PAGE)).start())
        request = worker.submit(prompt, wishes)
        run(worker)
        answers.append(said(request))
        assert bool(worker.counters["preempted"]) is (pages == 10)
    assert answers[0] == answers[1]


def test_a_sequence_larger_than_the_tier_fails_and_the_next_one_is_served(
    smol: Plain, make: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make(host=str(8 * PAGE), slab=str(2 * PAGE)).start()
    worker = make_worker(daemon, patience=1.0)
    large, small = (worker.submit(prompt, Sampling(max_tokens=8)) for prompt in (*prompts(smol, 1, 130), [5, 6, 7]))
    run(worker)
    with pytest.raises(RequestFailed, match="no pages within 1 s"):
        said(large)
    assert agreed(smol, [small], 8)


def test_frames_that_others_hold_are_waited_for(smol: Plain, make: MakeDaemon, make_worker: MakeWorker) -> None:
    daemon = make(host=str(12 * PAGE), slab=str(2 * PAGE)).start()
    worker = make_worker(daemon)
    other = daemon.client().namespace(worker._space("").spec.layout, model="other")
    held = other.reserve_ahead(0, 12, timeout=1)
    with pytest.raises(OutOfPages):
        other.reserve_ahead(0, 1, timeout=0.1)
    request = worker.submit(prompts(smol, 1, 60)[0], Sampling(max_tokens=20))
    threading.Timer(1.0, held.abort).start()
    started = time.monotonic()
    run(worker)
    assert time.monotonic() - started > 0.9
    assert agreed(smol, [request], 20)


def test_kvtierd_is_killed_and_restarted_in_the_middle(smol: Plain, served: Daemon, make_worker: MakeWorker) -> None:
    worker = make_worker(served)
    requests = [
        worker.submit(prompt, Sampling(max_tokens=20, n=1 + at)) for at, prompt in enumerate(prompts(smol, 2, 70))
    ]
    steps(worker, 12)
    served.kill()
    worker.step()
    served.start()
    run(worker)
    assert worker.counters["restarted"] and agreed(smol, requests, 20)


def test_kvtierd_is_stopped_and_started_in_the_middle(smol: Plain, served: Daemon, make_worker: MakeWorker) -> None:
    worker = make_worker(served)
    request = worker.submit(prompts(smol, 1, 100)[0], Sampling(max_tokens=24))
    steps(worker, 5)
    while worker.roster.running[0].unpublished() or worker.roster.running[0].errand is not None:
        worker.step()
    served.stop()
    served.start()
    before = worker.counters["borrowed"]
    run(worker)
    assert agreed(smol, [request], 24)
    assert worker.counters["borrowed"] - before >= 96, "what had been saved to SSD was not computed again"


def test_while_kvtierd_is_gone_requests_fail_and_later_ones_are_served(
    smol: Plain, served: Daemon, make_worker: MakeWorker
) -> None:
    worker = make_worker(served, patience=0.5)
    running = worker.submit(prompts(smol, 1, 60)[0], Sampling(max_tokens=100))
    steps(worker, 3)
    served.kill()
    new = worker.submit([5, 6, 7], Sampling(max_tokens=5))
    run(worker)
    for request in (running, new):
        with pytest.raises(RequestFailed, match="no pages within"):
            said(request)
    served.start()
    late = worker.submit([5, 6, 7], Sampling(max_tokens=5))
    run(worker)
    assert agreed(smol, [late], 5)


def test_what_is_evicted_while_it_is_used_stays_readable(smol: Plain, served: Daemon, make_worker: MakeWorker) -> None:
    worker = make_worker(served)
    prompt = prompts(smol, 1, 90)[0]
    requests = [worker.submit(prompt, Sampling(max_tokens=24, n=2)), worker.submit(prompt, Sampling(max_tokens=24))]
    operator = served.client()
    for _ in range(4):
        steps(worker, 12)
        operator.evict(everything=True)
    run(worker)
    assert agreed(smol, requests, 24)


def test_two_workers_of_one_prompt_share_what_the_first_of_them_published(
    smol: Plain, served: Daemon, make_worker: MakeWorker
) -> None:
    workers = [make_worker(served) for _ in range(2)]
    prompt = prompts(smol, 1, 100)[0]
    requests = [worker.submit(prompt, Sampling(max_tokens=20)) for worker in workers]
    while sum(worker.step() for worker in workers):  # both, every time
        pass
    assert agreed(smol, requests, 20)
    for worker in workers:
        worker.close()
    assert smol.model.config._attn_implementation == "sdpa", (
        "the model has its own attention back, with the last of them"
    )
    tier = served.client().stats()["tiers"][0]
    assert tier["pages"] == (100 + 19) // 16, "one copy of each page is left"


def test_cancelled_at_any_time_nothing_is_left(smol: Plain, served: Daemon, make_worker: MakeWorker) -> None:
    worker = make_worker(served, step_tokens=40).start()
    for at in range(12):
        request = worker.submit(prompts(smol, 1, 90)[0], Sampling(max_tokens=100, n=1 + at % 3))
        time.sleep(0.05 * at)
        request.cancel()
        list(request)
        assert request.finish == ["cancelled"] * (1 + at % 3)
    eventually(lambda: _held(served) == 0, "leases and reservations are back")


def _held(daemon: Daemon) -> int:
    sessions = daemon.client().sessions()["sessions"]
    return sum(session["leases"] + session["reserved_pages"] for session in sessions if session["name"] == "worker")


def test_a_model_that_raises_fails_its_requests_and_not_the_worker(
    smol: Plain, served: Daemon, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(served)
    with monkeypatch.context() as patch:
        patch.setattr(smol.model, "forward", lambda **_: 1 // 0)
        worker.start()
        with pytest.raises(RequestFailed, match="ZeroDivisionError"):
            said(worker.submit([5, 6], Sampling(max_tokens=5)))
    request = worker.submit([5, 6], Sampling(max_tokens=5))
    assert agreed(smol, [request], 5)
