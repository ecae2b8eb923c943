"""Many more requests than there is memory for: who runs gets frames before who waits, and one makes room at a time."""

from __future__ import annotations

import random
from contextlib import closing

from kvtier_client.transformers import Sampling, Worker
from tests.system.conftest import MakeDaemon
from tests.transformers.conftest import said
from tests.transformers.test_launch import tiny


def test_a_crowd_is_let_in_as_fast_as_its_prompts_are_computed(make: MakeDaemon) -> None:
    plain = tiny()
    draw = random.Random(1)
    prompts = [[draw.randrange(2, 100) for _ in range(draw.randrange(20, 120))] for _ in range(50)]
    daemon = make(host="768KiB", ssd="64MiB", slab="64KiB").start()
    client = daemon.client()
    with closing(Worker(plain.model, client, max_batch=50, step_tokens=64, patience=60)) as worker:
        requests = [worker.submit(prompt, Sampling(max_tokens=60, ignore_eos=True)) for prompt in prompts]
        together = 0
        while worker.step():
            worker.check()
            roster = worker.roster
            asked = [sequence for sequence in roster.waiting if sequence.errand is not None]
            uncomputed = sum(sequence.left for sequence in (*roster.running, *asked) if sequence.left > 1)
            assert uncomputed <= 4 * worker.step_tokens + 2 * 180, (
                "frames lie idle for prompts that nobody computes yet"
            )
            assert len(roster._yielding) + sum(requeue for _, requeue in roster._leaving) <= 1
            together = max(together, len(roster.running))
        assert together > 4
        assert worker.counters["preempted"], "there was room for all: this tests nothing"
        for request in requests:
            (answer,) = said(request)
            assert plain.agrees(request.prompt, answer, 60)
