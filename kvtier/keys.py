"""What a page is called: chain digests over tokens, seeded by everything that must match for KV to be reusable.

A page's key is 16 bytes of BLAKE2b over the key before it and the page's own tokens. So one key names the whole prefix
up to the page's end, and a chain of keys shares its head with every other request that shares those tokens. The first
page stands on the digest of its `Namespace`. The digest is cryptographic and takes no random seed: equal in every
process, and not to be collided by a chosen prompt.

Not here: where pages are cut (`kvtier.schedule`).
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kvtier.errors import InvalidRequest
from kvtier.layout import Layout
from kvtier.schedule import Schedule

KEY_BYTES = 16
_BLOCK = struct.Struct(f"{KEY_BYTES}s" * 128)  # many keys in one call: several times faster than slices
FORMAT = 1
"""Raised whenever the same namespace or tokens would get other keys."""


class Namespace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What must match for KV to be reusable. Identity is content: two that differ in any field share nothing.

    `revision` and `lora` name *contents* (a commit, a digest of the weights), so that new weights under an old name
    find nothing. `rope` describes scaling where the model's own configuration is overridden. `salt` separates users
    who must not learn from each other's hits. `extra` is for whatever else an engine knows to matter.
    """

    layout: Layout
    model: str
    revision: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    lora: str = ""
    rope: str = ""
    salt: str = ""
    extra: dict[str, str] = {}
    cap_tokens: int = 256

    def __post_init__(self) -> None:
        for axis, rank, size in (("tp", self.tp_rank, self.tp_size), ("pp", self.pp_rank, self.pp_size)):
            if not 0 <= rank < size:
                raise InvalidRequest(f"{axis}_rank {rank} is not below {axis}_size {size}")
        Schedule(self.layout.unit_tokens, self.cap_tokens)

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.layout.unit_tokens, self.cap_tokens)

    def digest(self) -> bytes:
        """16 bytes that stand for all fields; the seed of every chain of this namespace."""
        fields: list[Any] = [FORMAT, self.layout.fingerprint()]
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name != "layout":
                fields.append([name, sorted(value.items()) if isinstance(value, dict) else value])
        packed = msgspec.msgpack.encode(fields)
        return hashlib.blake2b(packed, digest_size=KEY_BYTES, person=b"kvtier-name").digest()

    def page_bytes(self, order: int) -> int:
        """Of a frame for a page of 2**order units."""
        return self.layout.unit_stride << order


def chain(
    namespace: Namespace,
    tokens: Sequence[int],
    media: Iterable[tuple[int, bytes]] = (),
    *,
    seed: bytes | None = None,
) -> list[bytes]:
    """The keys of every whole page of `tokens` (ids below 2**32), first page first.

    `media` places content that token ids do not tell, such as images behind placeholder tokens: (position of its first
    token, full digest of the content). It enters the key of the page that holds that position, and so all later ones.
    `seed` saves computing the namespace's digest again.

    Raises InvalidRequest for a token id that is negative or does not fit 32 bits, and for a medium outside `tokens`.
    """
    packed = _packed(tokens)
    schedule = namespace.schedule
    key = namespace.digest() if seed is None else seed
    pending = sorted(media)
    if pending and not 0 <= pending[0][0] <= pending[-1][0] < len(tokens):
        raise InvalidRequest(f"media at {pending[0][0]}..{pending[-1][0]} lie outside the {len(tokens)} tokens")
    keys = []
    blake2b = hashlib.blake2b
    for start, stop, _ in schedule.spans(len(tokens)):
        body = packed[4 * start : 4 * stop]
        if pending and pending[0][0] < stop:
            inside = [item for item in pending if item[0] < stop]
            pending = pending[len(inside) :]
            body += msgspec.msgpack.encode([(position - start, content) for position, content in inside])
        key = blake2b(key + body, digest_size=KEY_BYTES, person=b"kvtier-page").digest()
        keys.append(key)
    return keys


def count(packed: bytes) -> int:
    """How many keys a packed list has. Raises InvalidRequest for a length that is not a multiple of 16."""
    if len(packed) % KEY_BYTES:
        raise InvalidRequest(f"a packed list of keys has {len(packed)} bytes: not a multiple of {KEY_BYTES}")
    return len(packed) // KEY_BYTES


def split(packed: bytes) -> list[bytes]:
    """The keys of a packed list. Raises as `count` does."""
    count(packed)
    keys: list[bytes] = []
    at = 0
    while at + _BLOCK.size <= len(packed):
        keys += _BLOCK.unpack_from(packed, at)
        at += _BLOCK.size
    keys += [packed[at : at + KEY_BYTES] for at in range(at, len(packed), KEY_BYTES)]
    return keys


def _packed(tokens: Sequence[int]) -> bytes:
    try:
        words = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise InvalidRequest(f"token ids must be integers from 0 to 2**32 - 1: {error}") from error
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
