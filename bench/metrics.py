"""What metrics cost the requests of a daemon whose metrics are scraped, beside one that serves none, in the same run.

    python bench/metrics.py [--json FILE] [--pairs N]

Two daemons take turns of a second each, so that both see the same machine. The one with metrics is scraped in the middle
of each of its turns: once a second, where Prometheus asks every 15 s by default. Ratios are medians over pairs of turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent)]

from core import TINY, Row, daemon, fill, run, say

from kvtier_client import NamespaceClient

TURN = 1.0


def borrows(space: NamespaceClient, keys: list[bytes], seconds: float) -> tuple[float, float]:
    """Median of the seconds that a borrow of one resident page takes, and requests a second."""
    one, times = keys[:1], []
    end = time.perf_counter() + seconds
    while (started := time.perf_counter()) < end:
        lease = space.borrow(one)
        times.append(time.perf_counter() - started)
        lease.release()
    return statistics.median(times), 2 * len(times) / seconds


def lookups(space: NamespaceClient, keys: list[bytes], seconds: float) -> tuple[float, float]:
    """The same of lookups of a thousand keys, in which the daemon is what works."""
    times = []
    end = time.perf_counter() + seconds
    while (started := time.perf_counter()) < end:
        space.lookup(keys)
        times.append(time.perf_counter() - started)
    return statistics.median(times), len(times) / seconds


def bench(directory: Path, pairs: int) -> list[Row]:
    with (
        daemon(directory / "off", "http_port=off") as off,
        daemon(directory / "on", "http_port=0") as on,
    ):
        clients = {"off": off.client(), "on": on.client()}
        spaces = {side: client.namespace(TINY, model="bench", cap_tokens=16) for side, client in clients.items()}
        keys = spaces["on"].keys(range(16 * 1000))
        for space in spaces.values():
            fill(space, keys, np.zeros(4096, np.uint8))
        address = f"http://127.0.0.1:{clients['on'].stats()['daemon']['http_port']}/metrics"
        scrapes: list[float] = []

        def scrape() -> None:
            started = time.perf_counter()
            with urllib.request.urlopen(address, timeout=10) as answer:
                assert b"kvtier_borrow_hit_pages_total" in answer.read()
            scrapes.append(time.perf_counter() - started)

        def turn(work: Callable[..., tuple[float, float]], side: str) -> tuple[float, float]:
            timer = threading.Timer(TURN / 2, scrape)
            if side == "on":
                timer.start()
            result = work(spaces[side], keys, TURN)
            timer.join() if side == "on" else None
            return result

        rows = []
        for name, work in (("borrow of one resident page", borrows), ("lookup of 1,000 keys", lookups)):
            say(f"{name}: {pairs} pairs of turns of {TURN:.0f} s")
            measured: dict[str, list[tuple[float, float]]] = {"off": [], "on": []}
            for pair in range(pairs):
                for side in ("off", "on") if pair % 2 else ("on", "off"):
                    measured[side].append(turn(work, side))
            for at, what, unit in ((0, "p50", "us"), (1, "requests", "1/s")):
                ratio = statistics.median(
                    with_[at] / without[at] for with_, without in zip(measured["on"], measured["off"], strict=True)
                )
                limit = statistics.median(each[at] for each in measured["off"]) * (1e6 if at == 0 else 1)
                met = ratio <= 1.03 if at == 0 else ratio >= 0.97
                goal = "<= 1.03" if at == 0 else ">= 0.97"
                rows.append(Row(f"{name}, {what}, scraped", ratio * limit, limit, f"{unit} (limit: off)", goal, met))
        rows.append(Row("a scrape, p50", statistics.median(scrapes) * 1e3, 0, "ms, beside that load", "", True))
        return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="What metrics cost.")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--pairs", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtm") as directory:
        return run([lambda: bench(Path(directory), given.pairs)], given.json)


if __name__ == "__main__":
    sys.exit(main())
