"""What `kvtier top` makes of two reports, and that it fits whatever window there is."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kvtier_client.top import Reports, lines, report, sample

TIER = {
    "name": "host",
    "medium": "host",
    "capacity": 1000,
    "allocated": 900,
    "used": 600,
    "leased": 200,
    "queue": 3,
    "reserved_bytes": 50,
    "filling_bytes": 50,
    "unsaved": 0,
    "closed": False,
}
COUNTERS = {
    "requested": 0,
    "hits": [0, 0],
    "hit_tokens": [0, 0],
    "commits": 0,
    "committed_tokens": 0,
    "lost": 0,
    "out_of_pages": 0,
    "unsaved": 0,
    "grow_failures": 0,
    "deaths": 0,
    "evictions": {},
}
DAEMON = {
    "version": "0.1.0",
    "pid": 1,
    "epoch": 7,
    "uptime": 100.0,
    "sessions": 2,
    "leases": 3,
    "pages": 9,
    "restarts": 0,
}
STATS: dict[str, Any] = {
    "daemon": DAEMON,
    "tiers": [TIER, {**TIER, "name": "ssd", "medium": "file", "leased": 0}],
    "counters": COUNTERS,
    "moves": [{"from": "ssd", "to": "host", "pages": 5, "bytes": 500, "seconds": 1.0, "failed": 0}],
    "latency": {"borrow": {"p99": 0.001}},
}
SESSION = {"id": 1, "name": "worker", "pid": 2, "tenant": "t", "requests": 0, "leased_pages": 4, "waiting": 0}
SPACE = {"digest": "ab", "tenant": "t", "model": "org/a-model-with-quite-a-long-name", "borrowed": 0, "pages": 9}
BEFORE = Reports(
    10.0,
    STATS,
    {"sessions": [SESSION, {**SESSION, "id": 2, "name": "other"}], "quarantined_frames": 0},
    {"namespaces": [SPACE]},
)


def later(**counters: Any) -> Reports:
    """Two seconds after BEFORE."""
    now = copy.deepcopy(BEFORE)._replace(at=12.0)
    now.stats["counters"].update(counters)
    return now


def test_rates_are_of_the_time_between() -> None:
    now = later(requested=100, hits=[60, 20], hit_tokens=[960, 320], commits=10, committed_tokens=160)
    now.stats["moves"][0].update(pages=25, bytes=4500, seconds=3.0)
    now.sessions["sessions"][1]["requests"] = 8
    now.inventory["namespaces"][0]["borrowed"] = 80
    view = sample(BEFORE, now)
    assert (view.asked, view.found, view.tokens, view.commits) == (50, 40, 640, 5)
    assert view.hit_share == 0.8
    assert [(tier.hits, tier.hit_share) for tier in view.tiers] == [(30, 0.6), (10, 0.2)]
    assert [(tier.leased, tier.held, tier.arriving) for tier in view.tiers] == [(200, 400, 100), (0, 600, 100)]
    (move,) = view.moves
    assert (move.pages, move.bytes, move.busy) == (10, 2000, 1.0)
    assert [(one.name, one.requests) for one in view.sessions] == [("other", 4), ("worker", 0)]
    assert view.namespaces[0].borrowed == 40
    assert not view.alarms
    assert report(view)["tiers"][1]["name"] == "ssd"


def test_a_share_of_hits_never_passes_all() -> None:
    view = sample(BEFORE, later(requested=1, hits=[5, 0]))
    assert view.hit_share == 1.0


def test_another_life_of_the_daemon_is_measured_from_its_start() -> None:
    now = later(requested=200, hits=[200, 0])
    now.stats["daemon"].update(epoch=8, uptime=4.0)
    view = sample(BEFORE, now)
    assert (view.seconds, view.asked, view.found) == (4.0, 50, 50)


def test_trouble_is_told() -> None:
    now = later(out_of_pages=2, lost=1)
    now.stats["tiers"][1]["closed"] = True
    view = sample(BEFORE, now)
    assert view.alarms[0] == "tier ssd is closed" and len(view.alarms) == 3
    drawn = [line.plain for line in lines(view, 80, 24)]
    assert drawn[-1].startswith("! tier ssd is closed; 1 pages failed") and any("CLOSED" in line for line in drawn)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(("width", "height"), [(40, 10), (80, 24), (80, 10), (100, 30), (140, 40), (300, 100)])
@pytest.mark.parametrize("tiers", [1, 2, 10])
def test_it_fits_the_window(width: int, height: int, tiers: int, plain: bool) -> None:
    now = later(requested=100, hits=[60, 20])
    before = copy.deepcopy(BEFORE)
    for one in (before, now):
        one.stats["tiers"] = [{**TIER, "name": f"hbm:{number}", "capacity": 1 << 40} for number in range(tiers)]
        one.stats["counters"]["hits"] = [5] * tiers if one is now else [0] * tiers
        one.sessions["sessions"] = [{**SESSION, "id": number, "name": "w" * 30} for number in range(50)]
        one.inventory["namespaces"] = [{**SPACE, "digest": str(number)} for number in range(50)]
    drawn = lines(sample(before, now), width, height, history=[0.0, 0.5, 1.0], plain=plain)
    assert len(drawn) == height
    assert max(line.cell_len for line in drawn) <= width
    assert not plain or all(line.plain.isascii() for line in drawn)
    shown = "\n".join(line.plain for line in drawn)
    assert "TIER" in shown and "RATES" in shown
    if (width, height) == (80, 24):
        for heading in ("MOVERS", "SESSION", "NAMESPACE", "held"):
            assert heading in shown, shown


def test_what_differs_in_colour_differs_in_shape() -> None:
    bar = lines(sample(BEFORE, later()), 80, 24, plain=True)[2].plain
    cells = [bar.count(glyph) for glyph in "#=+."]
    assert all(cells) and cells[0] < cells[1] > cells[2]
