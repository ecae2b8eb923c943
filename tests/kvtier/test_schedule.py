"""Where pages are cut: the same places for every request, and little left over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import LayoutError
from kvtier.schedule import Schedule

schedules = st.builds(
    lambda unit, doublings: Schedule(unit, unit << doublings), st.sampled_from([16, 64]), st.integers(0, 8)
)


@given(schedules, st.integers(0, 200_000), st.integers(0, 200_000))
def test_every_request_cuts_at_the_same_places(schedule: Schedule, a: int, b: int) -> None:
    short, long = sorted((a, b))
    shorter, longer = list(schedule.spans(short)), list(schedule.spans(long))
    assert longer[: len(shorter)] == shorter
    assert len(longer) == len(shorter) or longer[len(shorter)].stop > short, "a whole page was left out"


@given(schedules, st.integers(0, 2_000_000))
def test_little_is_left_over(schedule: Schedule, tokens: int) -> None:
    covered = schedule.covered(tokens)
    assert 0 <= tokens - covered < max(schedule.unit_tokens + 1, tokens / 16 + 1)
    assert tokens - covered <= max(schedule.unit_tokens, tokens / 16)


@given(schedules, st.integers(0, 5000))
def test_a_page_starts_where_the_last_one_ends_and_is_as_large_as_it_may_be(schedule: Schedule, page: int) -> None:
    span, after = schedule.span(page), schedule.span(page + 1)
    assert span.stop == after.start
    assert span.stop - span.start == schedule.unit_tokens << span.order
    units = 1 << span.order
    allowed = max(1, span.start // schedule.unit_tokens // 16)
    assert units <= allowed and units <= 1 << schedule.top_order
    assert units == 1 << schedule.top_order or 2 * units > allowed
    assert schedule.pages(span.stop) == page + 1
    assert schedule.pages(span.stop - 1) == page
    assert schedule.order(page) == span.order


def test_a_million_tokens_are_about_four_thousand_pages() -> None:
    assert 3_900 <= Schedule().pages(1_000_000) <= 4_100
    assert Schedule(cap_tokens=16).pages(1_000_000) == 62_500


def test_by_hand() -> None:
    schedule = Schedule()
    assert [schedule.covered(tokens) for tokens in (0, 15, 16, 512, 543, 544)] == [0, 0, 16, 512, 512, 544]
    assert schedule.pages(1056) == 48 and schedule.covered(1056) == 1024
    assert schedule.pages(1040) == 48 and schedule.covered(1040) == 1024
    assert schedule.span(31) == (496, 512, 0) and schedule.span(32) == (512, 544, 1)


@pytest.mark.parametrize(("unit", "cap"), [(16, 0), (16, 8), (16, 48), (64, 32), (16, -16), (16, 100)])
def test_caps_that_are_none(unit: int, cap: int) -> None:
    with pytest.raises(LayoutError, match="nearest that is"):
        Schedule(unit, cap)


@given(schedules, st.integers(0, 500), st.integers(0, 300))
def test_tokens_of_a_run_are_those_of_its_pages(schedule: Schedule, first: int, count: int) -> None:
    spans = [schedule.span(page) for page in range(first, first + count)]
    assert schedule.tokens(first, count) == sum(span.stop - span.start for span in spans)
