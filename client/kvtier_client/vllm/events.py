"""Which blocks kvtier holds, told through vLLM's own KV events, for routers that send a request where its prefix is.

A page's key tells nothing of its blocks, so what is announced are pages that this engine itself was about to save: noted when
the save is planned, told as stored when kvtierd says that the page is there, and as removed when it says that the last copy is
gone. kvtierd tells on a channel of its own (`Client.events`), read by a thread; nothing is asked on the engine's.
Only the first rank's pages are followed: a hit needs all ranks, and they save alike.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvtier.errors import KvtierError
from kvtier_client.vllm.link import Link

logger = logging.getLogger(__name__)

_MOST = 1 << 18
"""Pages that are followed; of more, the oldest are not told as removed."""
_PAUSE = 1.0


@dataclass(frozen=True, slots=True)
class Announced:
    """What is told of one page: its blocks' hashes, as this process's vLLM has them, and what vLLM adds."""

    hashes: list[bytes]
    parent: bytes | None
    tokens: list[int]
    block_tokens: int
    group: int
    lora_id: int | None
    lora_name: str | None


class Events:
    """Follows pages by key. `take` gives what happened as `stored` and `removed` make it."""

    def __init__(self, link: Link, stored: Callable[[Announced], Any], removed: Callable[[Announced], Any]) -> None:
        self._link = link
        self._stored, self._removed = stored, removed
        self._lock = threading.Lock()
        self._planned: OrderedDict[bytes, Announced] = OrderedDict()
        self._held: OrderedDict[bytes, Announced] = OrderedDict()
        self._happened: deque[Any] = deque()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="kvtier-events", daemon=True)
        self._thread.start()

    def plan(self, key: bytes, page: Announced) -> None:
        """A page is about to be saved."""
        with self._lock:
            if key not in self._held:
                self._planned[key] = page
                while len(self._planned) > _MOST:
                    self._planned.popitem(last=False)

    def happened(self, what: str, key: bytes) -> None:
        """kvtierd says that a page came or went."""
        with self._lock:
            if what == "stored" and (page := self._planned.pop(key, None)) is not None:
                self._held[key] = page
                self._happened.append(self._stored(page))
                while len(self._held) > _MOST:
                    self._held.popitem(last=False)
            elif what == "removed" and (page := self._held.pop(key, None)) is not None:
                self._happened.append(self._removed(page))

    def lost(self) -> None:
        """What came and went since is not known: nothing is promised any more."""
        with self._lock:
            self._happened.extend(self._removed(page) for page in self._held.values())
            self._held.clear()

    def take(self) -> list[Any]:
        with self._lock:
            taken = list(self._happened)
            self._happened.clear()
        return taken

    def close(self) -> None:
        self._ended.set()

    def _follow(self) -> None:
        while not self._ended.is_set():
            try:
                while not self._ended.is_set():
                    for what, _, _, key in self._link.client().events(timeout=_PAUSE):
                        self.happened(what, key)
            except KvtierError:
                self.lost()
            except Exception:
                logger.exception("kvtier: KV events are not told any more")
                return
            self._ended.wait(_PAUSE)
