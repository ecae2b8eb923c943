"""What the connector counts. Plain numbers by name, summed over ranks and steps; vLLM's classes around them are made in
`connector`, since this is used where there is no vLLM."""

from __future__ import annotations

import threading
from typing import NamedTuple


class Count(NamedTuple):
    """A counter: its name in Prometheus, after "vllm:kvtier_", and what it says."""

    name: str
    help: str


COUNTS = {
    "loaded_bytes": Count("loaded_bytes_total", "Bytes copied from kvtier's pages into blocks"),
    "loaded_tokens": Count("loaded_tokens_total", "Tokens whose KV was loaded, on all ranks and in all groups"),
    "load_seconds": Count("load_seconds_total", "Seconds from the start of a load to its last byte, summed"),
    "loads": Count("loads_total", "Loads, one a request and rank"),
    "failed_loads": Count("failed_loads_total", "Loads of which blocks were missing; vLLM computes those"),
    "saved_bytes": Count("saved_bytes_total", "Bytes copied from blocks into kvtier's pages"),
    "saved_pages": Count("saved_pages_total", "Pages published"),
    "known_pages": Count("known_pages_total", "Pages that were to be saved and were there, or in other hands, already"),
    "dropped_pages": Count("dropped_pages_total", "Pages not saved: no frame, no daemon, or blocks needed too soon"),
    "save_seconds": Count("save_seconds_total", "Seconds that saves took in the background, summed"),
    "waits": Count("waits_total", "Steps that waited for a save to finish reading a block"),
    "lookups": Count("lookups_total", "Requests looked up"),
    "lookup_failures": Count("lookup_failures_total", "Lookups without an answer: no daemon, or a slow one"),
}


class Tally:
    """Counts since the last `take`. Safe between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}

    def add(self, **counts: float) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] = self._counts.get(name, 0) + count

    def take(self) -> dict[str, float]:
        """What was counted, which is then 0 again."""
        with self._lock:
            taken, self._counts = self._counts, {}
        return taken


def summed(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def summary(counts: dict[str, float]) -> dict[str, int | float]:
    """For a line in vLLM's log."""
    said: dict[str, int | float] = {name: int(count) for name, count in counts.items() if not name.endswith("seconds")}
    for what in ("load", "save"):
        seconds, nbytes = (
            counts.get(f"{what}_seconds", 0),
            counts.get(f"{what}{'d' if what == 'save' else 'ed'}_bytes", 0),
        )
        if seconds:
            said[f"{what}_GBps"] = round(nbytes / seconds / 1e9, 2)
    return said
