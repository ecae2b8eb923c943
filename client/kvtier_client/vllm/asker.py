"""What the scheduler's side asks kvtierd, on a thread of its own: how much of a request every rank holds.

As soon as a request is queued its pages are looked up in every rank's namespaces, and those on a slow tier are on their way up
before its turn comes. A miss is one question a rank and group, all asked at once, and moves nothing.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier import wire
from kvtier.errors import DaemonLost, KvtierError
from kvtier.keys import KEY_BYTES, Namespace
from kvtier_client.vllm.hashes import BlockHashes
from kvtier_client.vllm.link import Link
from kvtier_client.vllm.naming import adapter_digest, page_key, variant
from kvtier_client.vllm.stats import Tally

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT = 5.0


@dataclass(slots=True)
class Request:
    """What is known of one request. `found` is how many pages of each group every rank holds."""

    request: Any
    hashes: BlockHashes
    groups: int
    lora: str | None = ""
    page_hashes: list[list[bytes]] = field(default_factory=list)
    found: list[int] = field(default_factory=list)
    asked: int = -1
    asked_at: float = 0.0
    answered: threading.Event = field(default_factory=threading.Event)
    prefetched: bool = False
    local: int = 0
    failed: bool = False
    blocks: list[list[int]] = field(default_factory=list)
    next_page: list[int] | None = None

    def __post_init__(self) -> None:
        self.page_hashes = [[] for _ in range(self.groups)]
        self.found = [0] * self.groups
        self.blocks = [[] for _ in range(self.groups)]


class Asker:
    """Asks the daemon about requests, one after another, on a thread. `spaces` are the namespaces of every rank, by group."""

    def __init__(self, link: Link, spaces: Sequence[Sequence[Namespace]], tally: Tally) -> None:
        self._link = link
        self._spaces = spaces
        self._tally = tally
        self._adapters: dict[tuple[int, str, str], str | None] = {}
        self._seeds: dict[tuple[str, str], list[list[bytes]]] = {}
        self._questions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.silent = False
        self._thread = threading.Thread(target=self._run, name="kvtier-ask", daemon=True)
        self._thread.start()

    def ask(self, known: Request, generation: str) -> None:
        """Look `known` up: its hashes so far. The answer is in `found` when `answered` is set."""
        known.answered.clear()
        hashes = [list(each) for each in known.page_hashes]
        adapter = known.request.lora_request
        self._questions.put(lambda: self._answer(known, hashes, adapter, generation))

    def close(self) -> None:
        self._questions.put(None)
        self._thread.join(1)

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            question()

    def _answer(self, known: Request, hashes: list[list[bytes]], adapter: Any, generation: str) -> None:
        found = [0] * len(hashes)
        keys: list[list[bytes]] = []
        try:
            known.lora = self._adapter(adapter)
            if known.lora is not None and any(hashes):
                keys = self._keys(hashes, known.lora, generation)
                found = self._look_up(keys)
            self.silent = False
        except KvtierError as error:
            self._tally.add(lookup_failures=1)
            self.silent = isinstance(error, DaemonLost)
        except Exception:
            logger.exception("kvtier: a lookup failed, and counts as a miss")
        finally:
            known.found = found
            known.answered.set()
        if any(found) and not known.prefetched:
            known.prefetched = True
            with contextlib.suppress(KvtierError):
                self._prefetch(keys, found)

    def _keys(self, hashes: list[list[bytes]], lora: str, generation: str) -> list[list[bytes]]:
        """By group, and in it by rank: the keys of all pages, joined."""
        return [
            [b"".join(page_key(seed, digest, number) for number, digest in enumerate(pages)) for seed in seeds]
            for pages, seeds in zip(hashes, self._seeds_of(lora, generation), strict=True)
        ]

    def _look_up(self, keys: list[list[bytes]]) -> list[int]:
        client = self._link.client()
        asked = [
            [client.submit("lookup", wire.Lookup(one), _body, timeout=_ANSWER_TIMEOUT) for one in ranks]
            for ranks in keys
        ]
        found = [min(wire.convert(one.result(), wire.Found).pages for one in ranks) for ranks in asked]
        self._tally.add(lookups=1)
        return found

    def _prefetch(self, keys: list[list[bytes]], found: list[int]) -> None:
        """Have what was found brought to the fastest tier that every worker can read."""
        client = self._link.client()
        tier = client.current().fastest
        asked = [
            client.submit("prefetch", wire.Prefetch(one[: pages * KEY_BYTES], tier), _body, timeout=_ANSWER_TIMEOUT)
            for ranks, pages in zip(keys, found, strict=True)
            for one in ranks
            if pages
        ]
        for one in asked:
            one.result()

    def seed(self, group: int, lora: str, generation: str) -> bytes:
        """Of the first rank's namespace."""
        return self._seeds_of(lora, generation)[group][0]

    def _seeds_of(self, lora: str, generation: str) -> list[list[bytes]]:
        seeds = self._seeds.get((lora, generation))
        if seeds is None:
            if len(self._seeds) >= 256:
                self._seeds.clear()
            seeds = [[variant(one, lora, generation).digest() for one in ranks] for ranks in self._spaces]
            self._seeds[lora, generation] = seeds
        return seeds

    def _adapter(self, adapter: Any) -> str | None:
        """What names an adapter's contents; None where its files cannot be read, and nothing can be kept for it."""
        if adapter is None:
            return ""
        named = (adapter.lora_int_id, adapter.lora_name, adapter.lora_path)
        if named not in self._adapters or getattr(adapter, "load_inplace", False):
            try:
                self._adapters[named] = adapter_digest(Path(adapter.lora_path))
            except OSError as error:
                logger.warning(
                    "kvtier: nothing is kept for adapter %s, whose files cannot be read: %s", named[1], error
                )
                self._adapters[named] = None
        return self._adapters[named]


def _body(_: Any, body: Any) -> Any:
    return body
