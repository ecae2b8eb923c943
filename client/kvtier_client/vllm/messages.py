"""What the scheduler's side tells the workers' each step. Plain data: it is pickled on its way.

Pages are named by vLLM's block hash and their number, not by key, so that one message serves all ranks: each makes its own
keys. Blocks are those of the page, in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Pages:
    """A run of pages of one group, from number `first` on. Of `blocks[n]`, page n's, 0 is one that is not there (vLLM's
    null block). `before` is the hash of the page before the first, empty at the start."""

    group: int
    first: int
    before: bytes
    hashes: tuple[bytes, ...]
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks to fill before `request` may go on. A block that is not wanted is -1."""

    request: str
    lora: str
    pages: tuple[Pages, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Full blocks, computed when this step is; they never change."""

    request: str
    lora: str
    pages: tuple[Pages, ...]


@dataclass(slots=True)
class Step:
    """All of one scheduler step. `written` are the blocks that this step, or a load of it, may write for the first time:
    what still reads them must be done. `generation` is another after every reset of the cache."""

    number: int = 0
    generation: str = ""
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    written: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Heard:
    """What workers tell the scheduler: requests whose load failed, on any rank."""

    failed: set[str] = field(default_factory=set)
