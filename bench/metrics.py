"""What metrics cost the requests of a daemon, in one run of three that take turns of a second each.

    python bench/metrics.py [--json FILE] [--rounds N]

    off       a daemon that serves no metrics
    idle      one that serves them, in turns in which nobody asks: the same code runs, so what it differs from `off` by
              is what two daemons differ by on this machine
    scraped   the same daemon, scraped in the middle of each turn: once a second, where Prometheus asks every 15 s

Judged is the processor time of the daemon, all its threads together, a request: scraped over idle.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path[:0] = [str(Path(__file__).parent)]

from core import TINY, Row, daemon, fill, run, say

from kvtier_client import NamespaceClient

TURN = 1.0
SIDES = ("off", "idle", "scraped")
Work = Callable[[NamespaceClient, list[bytes], float], list[float]]


class Turn(NamedTuple):
    """What each request took, and the daemon's processor time in all."""

    times: list[float]
    spent: float


def processor_time(pid: int) -> float:
    """Seconds that a process has run, its ended threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def borrows(space: NamespaceClient, keys: list[bytes], seconds: float) -> list[float]:
    """What each borrow of one resident page, with its release, took."""
    times = []
    end = time.perf_counter() + seconds
    while (started := time.perf_counter()) < end:
        space.borrow(keys[:1]).release()
        times.append(time.perf_counter() - started)
    return times


def locates(space: NamespaceClient, keys: list[bytes], seconds: float) -> list[float]:
    """The same of lookups of all keys with their tiers, in which the daemon is what works."""
    times = []
    end = time.perf_counter() + seconds
    while (started := time.perf_counter()) < end:
        space.locate(keys)
        times.append(time.perf_counter() - started)
    return times


def bench(directory: Path, rounds: int) -> list[Row]:
    with (
        daemon(directory / "off", "http_port=off") as off,
        daemon(directory / "on", "http_port=0") as on,
    ):
        clients = [off.client(), on.client()]
        spaces = [client.namespace(TINY, model="bench", cap_tokens=16) for client in clients]
        keys = spaces[0].keys(range(16 * 1000))
        for space in spaces:
            fill(space, keys, np.zeros(4096, np.uint8))
        pids = [client.stats()["daemon"]["pid"] for client in clients]
        address = f"http://127.0.0.1:{clients[1].stats()['daemon']['http_port']}/metrics"
        scrapes: list[float] = []

        def scrape() -> None:
            started = time.perf_counter()
            with urllib.request.urlopen(address, timeout=10) as answer:
                assert b"kvtier_borrow_hit_pages_total" in answer.read()
            scrapes.append(time.perf_counter() - started)

        def turn(work: Work, side: str) -> Turn:
            number = int(side != "off")
            timer = threading.Timer(TURN / 2, scrape)
            before = processor_time(pids[number])
            if side == "scraped":
                timer.start()
            times = work(spaces[number], keys, TURN)
            if side == "scraped":
                timer.join()
            return Turn(times, processor_time(pids[number]) - before)

        rows = []
        for name, work in (("borrow and release", borrows), ("locate 1,000 keys", locates)):
            say(f"{name}: {rounds} rounds of {len(SIDES)} turns of {TURN:.0f} s")
            turns: dict[str, list[Turn]] = {side: [] for side in SIDES}
            for number in range(rounds):
                for side in SIDES if number % 2 else reversed(SIDES):
                    turns[side].append(turn(work, side))
            spent = {side: sum(turn.spent for turn in all_) for side, all_ in turns.items()}
            times = {side: [each for turn in all_ for each in turn.times] for side, all_ in turns.items()}
            busy = {side: spent[side] / len(times[side]) * 1e6 for side in SIDES}
            median = {side: statistics.median(times[side]) * 1e6 for side in SIDES}
            met = busy["scraped"] <= 1.03 * busy["idle"]
            rows += [
                Row(f"{name}: scraped, over idle", busy["scraped"], busy["idle"], "us of the daemon's", "<= 1.03", met),
                Row(f"{name}: idle, over off", busy["idle"], busy["off"], "us of the daemon's", "", True),
                Row(f"{name}: p50, scraped over idle", median["scraped"], median["idle"], "us", "", True),
                Row(f"{name}: p50, idle over off", median["idle"], median["off"], "us", "", True),
                Row(
                    f"{name}: rate, scraped over idle",
                    *(len(times["scraped"]) / rounds / TURN, len(times["idle"]) / rounds / TURN, "1/s", "", True),
                ),
            ]
        rows.append(Row("a scrape, p50", statistics.median(scrapes) * 1e3, 0, "ms, beside that load", "", True))
        return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="What metrics cost.")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtm") as directory:
        return run([lambda: bench(Path(directory), given.rounds)], given.json)


if __name__ == "__main__":
    sys.exit(main())
