"""Hashes of blocks that are equal in every process, whatever seeds them.

vLLM chains its block hashes from a root. Where that is the fixed one of newer versions, and the algorithm the default, the
request's own hashes are used, and no token is hashed twice. A root that follows from `PYTHONHASHSEED`, or is random as in
older versions, or an algorithm that is none for keys that others choose (xxhash), would give every process keys of its own:
then the chain is computed again from the fixed root, by vLLM's own functions, so that it is the one that others have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_SEED = "vllm-none-hash"
"""What vLLM derives its root from where nothing else is set."""


class Hashing(NamedTuple):
    """vLLM's functions, and the root of this process. Made by `versions.hashing`."""

    algorithm: str
    root: bytes
    sha256: Callable[[Any], bytes]
    block: Callable[..., bytes]
    extra_keys: Callable[..., tuple[Any, int]]


class BlockHashes:
    """The hashes of one request's full blocks of `tokens` tokens, as far as its tokens are known."""

    __slots__ = ("_at", "_hashing", "_own", "_root", "_tokens")

    def __init__(self, hashing: Hashing, tokens: int) -> None:
        self._hashing = hashing
        self._tokens = tokens
        self._root = hashing.sha256(_SEED)
        self._own: list[bytes] | None = None if is_shared(hashing) else []
        self._at = 0

    def of(self, request: Any) -> Sequence[bytes]:
        """One for every full block of `request`, which is the same request each time."""
        known: Sequence[bytes] = request.block_hashes
        if self._own is None:
            return known
        hashing, tokens = self._hashing, self._tokens
        while len(self._own) < len(known):
            start = len(self._own) * tokens
            extra, self._at = hashing.extra_keys(request, start, start + tokens, self._at)
            parent = self._own[-1] if self._own else self._root
            self._own.append(
                hashing.block(hashing.sha256, parent, request.all_token_ids[start : start + tokens], extra)
            )
        return self._own


def is_shared(hashing: Hashing) -> bool:
    """Whether this process's own hashes are those of every other."""
    return hashing.algorithm == "sha256" and hashing.root == hashing.sha256(_SEED)
