"""An engine's memory in tests: pages in pieces that lie apart, and bytes that follow from a page's name."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvtier_client.sglang.pages import Pieces

PIECES = 4
PIECE_BYTES = 1500
"""So that a page is no multiple of anything."""
PAGE_BYTES = PIECES * PIECE_BYTES


class Memory:
    """`slots` pages: piece p of slot s at row p * slots + s, as layers before tokens have it."""

    def __init__(self, slots: int = 64) -> None:
        self.slots = slots
        self.bytes = np.zeros((PIECES, slots, PIECE_BYTES), np.uint8)

    def pieces(self, slots: Sequence[int]) -> Pieces:
        base = self.bytes.ctypes.data
        rows = [part * self.slots + slot for slot in slots for part in range(PIECES)]
        return Pieces([base + row * PIECE_BYTES for row in rows], [PIECE_BYTES] * len(rows))

    def fill(self, slot: int, name: str) -> None:
        self.bytes[:, slot] = content(name).reshape(PIECES, PIECE_BYTES)

    def holds(self, slot: int, name: str) -> bool:
        return bool((self.bytes[:, slot].reshape(-1) == content(name)).all())

    def filled(self, names: Sequence[str]) -> Pieces:
        """The first slots, filled from `names`."""
        for slot, name in enumerate(names):
            self.fill(slot, name)
        return self.pieces(range(len(names)))


def content(name: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).integers(0, 256, PAGE_BYTES, np.uint8)


def names(seed: str, pages: int) -> list[str]:
    """Keys as SGLang makes them: each a digest of the one before."""
    found: list[str] = []
    for _ in range(pages):
        found.append(hashlib.sha256((found[-1] if found else seed).encode()).hexdigest())
    return found
