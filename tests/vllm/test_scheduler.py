"""The scheduler's decisions, told as vLLM tells them, with no vLLM and no daemon: what is claimed, loaded and saved, and when."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvtier.schedule import Schedule
from kvtier_client.vllm import scheduler as module
from kvtier_client.vllm.groups import Plan, plan
from kvtier_client.vllm.hashes import BlockHashes
from kvtier_client.vllm.messages import Heard, Load
from kvtier_client.vllm.scheduler import Scheduler
from tests.vllm.stand_ins import (
    Cached,
    FullAttentionSpec,
    New,
    Request,
    SlidingWindowSpec,
    cache_config,
    hashing,
    output,
    vllm_config,
)


class Answers:
    """In place of the asker: `held` pages of each group, at once; or nothing, as from a daemon that does not answer."""

    def __init__(self, *held: int) -> None:
        self.held = list(held)
        self.silent = False
        self.answering = True
        self.asked = 0

    def ask(self, known: Any, generation: str) -> None:
        self.asked += 1
        known.answered.clear()
        if self.answering:
            known.found = [min(held, len(each)) for held, each in zip(self.held, known.page_hashes, strict=True)]
            known.answered.set()


def made(*held: int, of: Plan | None = None, cap: int = 256, **options: bool) -> tuple[Scheduler, Answers]:
    chosen = of or plan(vllm_config(), cache_config(FullAttentionSpec()))
    answers = Answers(*held)
    schedules = [Schedule(group.block_tokens, cap) for group in chosen.groups]
    ways = {"saves": True, "loads": True, **options}
    asker: Any = answers
    return Scheduler(chosen, schedules, asker, lambda: BlockHashes(hashing(), chosen.hash_tokens), **ways), answers


def request(name: str, tokens: int, **more: Any) -> Request:
    return Request(name, list(range(tokens)), **more).known()


def pages(items: Sequence[Any]) -> list[tuple[int, int]]:
    """(first, count) of each run."""
    return [(run.first, len(run.hashes)) for item in items for run in item.pages]


@pytest.mark.parametrize(
    "tokens, held, computed, claimed",
    [
        (200, 12, 0, 192),
        (200, 5, 0, 80),
        (192, 12, 0, 176),  # all of it is held: the last block is computed, for its output
        (193, 12, 0, 192),
        (16, 1, 0, 0),
        (15, 0, 0, 0),
        (200, 5, 80, 0),  # vLLM has that itself
        (200, 5, 96, 0),
        (200, 12, 80, 112),
    ],
)
def test_what_is_claimed_is_whole_blocks_beyond_what_is_computed_and_never_all(
    tokens: int, held: int, computed: int, claimed: int
) -> None:
    scheduler, answers = made(held)
    asked = request("a", tokens)
    scheduler.queued(asked)
    for _ in range(3):
        assert scheduler.matched(asked, computed) == claimed, "and asking changes nothing"
    assert answers.asked == 1


def test_a_hit_needs_every_group_and_suits_the_largest_block() -> None:
    of = plan(vllm_config(), cache_config(FullAttentionSpec(32), SlidingWindowSpec(16), hash_block_size=16))
    for held, claimed in (((6, 12), 192), ((6, 5), 64), ((2, 12), 64), ((0, 12), 0)):
        scheduler, _ = made(*held, of=of)
        assert scheduler.matched(request("a", 200), 0) == claimed


def test_a_draft_models_last_block_is_left() -> None:
    of = plan(vllm_config(), cache_config(FullAttentionSpec()))
    scheduler, _ = made(12, of=Plan(of.groups, of.step, of.hash_tokens, 16, ""))
    assert scheduler.matched(request("a", 200), 0) == 176


def test_who_may_not_load_or_save_does_not() -> None:
    scheduler, _ = made(12, loads=False)
    assert scheduler.matched(request("a", 200), 0) == 0
    scheduler, _ = made(0, saves=False)
    scheduler.matched(request("a", 200), 0)
    assert not scheduler.step(output([New("a", (list(range(1, 14)),))], a=200)).saves
    scheduler, _ = made(12)
    assert scheduler.matched(request("a", 200, skip_reading_prefix_cache=True), 0) == 0
    assert scheduler.matched(request("b", 200, resumable=True), 0) == 0


def test_a_load_names_the_blocks_after_those_that_are_there() -> None:
    scheduler, _ = made(12)
    asked = request("a", 200)
    assert scheduler.matched(asked, 32) == 160
    scheduler.allocated(asked, [list(range(50, 62))], 160)
    scheduler.allocated(asked, [list(range(50, 63))], 0)  # the second time, when it is over
    step = scheduler.step(output())
    (load,) = step.loads
    assert load == Load("a", "", load.pages) and pages([load]) == [(2, 10)]
    assert [block for page in load.pages[0].blocks for block in page] == list(range(52, 62)) == step.written
    assert not scheduler.step(output()).loads


def test_of_a_page_that_is_there_in_part_the_rest_is_loaded() -> None:
    scheduler, _ = made(40)
    asked = request("a", 33 * 16 + 16 * 16 + 1)  # after 32 pages of one block come pages of two
    computed = 32 * 16 + 16
    claimed = scheduler.matched(asked, computed)
    assert claimed == (40 - 32) * 32 - 16
    scheduler.allocated(asked, [list(range(100, 148))], claimed)
    (load,) = scheduler.step(output()).loads
    assert load.pages[0].first == 32 and load.pages[0].blocks[0] == (-1, 133)


def test_a_window_that_needs_no_blocks_gets_none() -> None:
    of = plan(vllm_config(), cache_config(FullAttentionSpec(), SlidingWindowSpec(), hash_block_size=16))
    scheduler, _ = made(12, 12, of=of)
    asked = request("a", 200)
    assert scheduler.matched(asked, 0) == 192
    scheduler.allocated(asked, [list(range(1, 13)), [0] * 8 + [20, 21, 22, 23]], 192)
    step = scheduler.step(output())
    assert pages(step.loads) == [(0, 12), (8, 4)]
    assert 0 not in step.written


def test_full_blocks_are_saved_once_when_they_are_computed() -> None:
    scheduler, _ = made(0)
    asked = request("a", 200)
    scheduler.matched(asked, 0)
    step = scheduler.step(output([New("a", (list(range(1, 9)),))], a=100))
    assert pages(step.saves) == [(0, 6)] and step.written == list(range(1, 9))
    assert [block for page in step.saves[0].pages[0].blocks for block in page] == [1, 2, 3, 4, 5, 6]
    step = scheduler.step(output(cached=Cached(["a"], [(list(range(9, 14)),)], [100]), a=100))
    assert pages(step.saves) == [(6, 6)] and step.written == list(range(9, 14))
    for n in range(8):
        asked.all_token_ids.append(n)
        step = scheduler.step(output(cached=Cached(["a"], [None], [200 + n]), a=1))
        assert not step.saves and not step.written
    asked.known()  # 208 tokens are known and computed: the thirteenth block is full
    step = scheduler.step(output(cached=Cached(["a"], [([14],)], [208]), a=1))
    assert pages(step.saves) == [(12, 1)] and step.saves[0].pages[0].before == asked.block_hashes[11]


def test_proposed_tokens_are_not_known_and_their_blocks_not_saved() -> None:
    """A draft of 8 tokens fills the block; whether they stay is not known until they are accepted."""
    scheduler, _ = made(0)
    asked = request("a", 28)
    scheduler.matched(asked, 0)
    scheduler.step(output([New("a", ([1, 2],))], a=28))
    step = scheduler.step(output(cached=Cached(["a"], [([3],)], [28]), a=9))
    assert not step.saves
    asked.all_token_ids += range(5)  # four were accepted
    step = scheduler.step(output(cached=Cached(["a"], [None], [32]), a=9))
    assert not step.saves, "hashes are made when tokens are"
    asked.known()
    assert pages(scheduler.step(output(cached=Cached(["a"], [None], [32]), a=9)).saves) == [(1, 1)]


def test_what_the_daemon_holds_is_not_saved_again() -> None:
    scheduler, _ = made(5)
    asked = request("a", 200)
    assert scheduler.matched(asked, 0) == 80
    assert pages(scheduler.step(output([New("a", (list(range(1, 14)),), 80)], a=120)).saves) == [(5, 7)]


def test_after_a_failed_load_the_request_asks_no_more_and_its_pages_are_saved_anew() -> None:
    scheduler, _ = made(12)
    asked = request("a", 200)
    assert scheduler.matched(asked, 0) == 192
    scheduler.allocated(asked, [list(range(1, 13))], 192)
    scheduler.step(output())
    scheduler.heard(Heard({"a", "somebody else"}))
    assert scheduler.matched(asked, 0) == 0
    assert pages(scheduler.step(output([New("a", (list(range(1, 14)),), 32)], a=168)).saves) == [(0, 12)]


def test_a_preempted_request_goes_on_with_other_blocks() -> None:
    scheduler, answers = made(0)
    asked = request("a", 100)
    scheduler.matched(asked, 0)
    scheduler.step(output([New("a", (list(range(1, 8)),))], a=100))
    asked.all_token_ids += range(30)
    asked.known()
    answers.held = [6]
    assert scheduler.matched(asked, 0) == 96, "it finds what it saved itself"
    scheduler.allocated(asked, [list(range(20, 29))], 96)
    scheduler.step(output())
    resumed = Cached(["a"], [(list(range(20, 29)),)], [96], {"a"})
    step = scheduler.step(output(cached=resumed, a=34))
    assert step.written == [26, 27, 28] and pages(step.saves) == [(6, 2)]
    assert step.saves[0].pages[0].blocks == ((26,), (27,))


def test_a_reset_leaves_nothing_to_be_found_and_saves_under_another_generation() -> None:
    scheduler, answers = made(12)
    first = scheduler.step(output()).generation
    asked = request("a", 200)
    scheduler.matched(asked, 0)
    scheduler.reset()
    answers.held = [0]
    assert scheduler.matched(asked, 0) == 0
    assert scheduler.step(output()).generation != first == ""


def test_a_request_that_ended_is_forgotten() -> None:
    scheduler, _ = made(0)
    asked = request("a", 200)
    scheduler.queued(asked)
    scheduler.finished(asked)
    scheduler.finished(asked)
    assert not scheduler.step(output([New("a", (list(range(1, 14)),))], a=200)).saves


def test_a_daemon_that_does_not_answer_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.2)
    scheduler, answers = made(12)
    answers.answering = False
    started = time.perf_counter()
    assert scheduler.matched(request("a", 200), 0) == 0
    assert time.perf_counter() - started >= 0.2
    started = time.perf_counter()
    for n in range(20):
        assert scheduler.matched(request(f"b{n}", 200), 0) == 0
    assert time.perf_counter() - started < 0.2
    answers.answering, answers.silent = True, False
    assert scheduler.matched(request("c", 200), 0) == 192


def test_an_answer_is_asked_for_again_when_it_is_old_or_there_are_more_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, answers = made(2)
    asked = request("a", 200)
    assert scheduler.matched(asked, 0) == 32
    answers.held = [12]
    assert scheduler.matched(asked, 0) == 32
    monkeypatch.setattr(module, "_FRESH", 0.0)
    assert scheduler.matched(asked, 0) == 192
