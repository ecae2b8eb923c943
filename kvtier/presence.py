"""The presence table: which pages a tenant has, in memory that its workers read, so that a lookup asks nobody.

A memfd of 64-bit words that the daemon alone can write: a header, then an open-addressing table with linear probing. A
page stands in it as its *mark*, 8 bytes of its key. Keys are digests, so marks are spread evenly, and a key that is not
there is taken for one that is about once in 2^60 lookups. An answer from here is what a lookup's always was, a hint: a
page may be gone by the time that it is borrowed, and the borrow tells.

    words 0 to 7    magic, version, bits, replaced, shifts, and three that are unused
    2^bits words    where a mark's home is: word (mark >> 64 - bits), or the next one that was free
    REACH words     for those that do not fit at the end; the last is always free

Readers take no lock, since an aligned word is read and written whole. When a page goes, marks behind it move up: each is
written in its new place, then *shifts* is counted up, and only then is its old place used or freed. So who did not find a
mark looks again if shifts have changed meanwhile. A table more than half full is made anew, twice the size, and the old one
says that it was *replaced*.
Not here: how a worker gets the table (`kvtier_daemon.attach`, `kvtier_client.attachment`).
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from kvtier.errors import InvalidRequest, ProtocolError, SlabError
from kvtier.keys import KEY_BYTES
from kvtier.memory import Mapping, create_memfd, read_only, seal

MAGIC = int.from_bytes(b"kvtierpr", "little")
VERSION = 1
REACH = 248
"""Words from its home on that a mark may lie in, and the longest run of words in use that is walked. Half full of digests,
a table needs a fraction of it. A tenant whose keys are none has no table, instead of costing the daemon long walks."""
_MAGIC, _VERSION, _BITS, _REPLACED, _SHIFTS, _HEADER = 0, 1, 2, 3, 4, 8
_FREE = 0
_FEWEST_BITS = 8
"""With header and reach this makes 4,096 bytes."""
_FEW = 32
"""Keys that are looked up one by one: for so few numpy takes longer."""
_MANY = 1024
"""Keys that are looked up at once: of a long chain often only the head is there."""
_first_word = struct.Struct(f"<Q{KEY_BYTES - 8}x").unpack


@functools.cache
def _numpy() -> Any:
    try:
        import numpy
    except Exception:  # noqa: BLE001 - not installed, or whatever is wrong with it: it is of use, not needed
        return None
    return numpy


def _joined(keys: Sequence[bytes]) -> bytes:
    joined = b"".join(keys)
    if len(joined) != KEY_BYTES * len(keys):
        raise InvalidRequest(f"{len(joined)} bytes that are not {len(keys)} keys of {KEY_BYTES}")
    return joined


def _nbytes(bits: int) -> int:
    return 8 * (_HEADER + (1 << bits) + REACH)


class PresenceTable:
    """A tenant's table as the daemon keeps it, from when a worker first asks for it.

    There is none while there is no memory for one, and never again once keys turned out to be no digests (`unfit`): then
    workers ask the daemon. Nothing here raises for want of memory.
    """

    __slots__ = ("_fd", "_header", "_held", "_shift", "_words", "nbytes", "unfit")

    def __init__(self) -> None:
        self._words: memoryview | None = None
        self._header = memoryview(b"")
        self._fd = -1
        self._shift = 0
        self._held = 0
        self.nbytes = 0
        self.unfit = False

    def share(self, keys: Iterable[bytes]) -> int:
        """A descriptor to read it by, which is the caller's to close; -1 if there is none to be had. If there was no table
        yet, it is made of `keys`: all that there are."""
        if self._words is None and not self.unfit:
            self._make([_first_word(key)[0] | 2 for key in keys])
        try:
            return read_only(self._fd) if self._words is not None else -1
        except OSError:  # no descriptors left
            return -1

    def add(self, key: bytes) -> None:
        """A page that was not there."""
        words = self._words
        if words is None:
            return
        mark = _first_word(key)[0] | 2
        home = mark >> self._shift
        for at in range(home, home + REACH):
            if words[at] == _FREE:
                break
        else:
            self._give_up()
            return
        words[at] = mark
        self._held += 1
        if self._held << 1 > 1 << (64 - self._shift):
            self._make([word for word in words.tolist() if word != _FREE])

    def discard(self, key: bytes) -> None:
        """A page that was there."""
        words, shift = self._words, self._shift
        if words is None:
            return
        mark = _first_word(key)[0] | 2
        hole = mark >> shift
        while words[hole] != mark:
            hole += 1
        for at in range(hole + 1, hole + REACH):
            word = words[at]
            if word == _FREE:
                break
            if word >> shift <= hole:
                words[hole] = word
                self._header[_SHIFTS] += 1
                hole = at
        else:
            self._give_up()
            return
        words[hole] = _FREE
        self._held -= 1

    def withdraw(self) -> None:
        """There is none from now on, until it is asked for again."""
        if self._words is not None:
            self._header[_REPLACED] = 1
            os.close(self._fd)
            self._words, self._header, self._fd, self._held, self.nbytes = None, memoryview(b""), -1, 0, 0

    def check(self, keys: Collection[bytes]) -> None:
        """Assert that it holds these keys and nothing else, each where a reader finds it."""
        words = self._words
        if words is None:
            return
        marks = sorted(_first_word(key)[0] | 2 for key in keys)
        assert sorted(word for word in words if word != _FREE) == marks
        assert len(marks) == self._held <= 1 << (63 - self._shift)
        assert words[-1] == _FREE
        for mark in marks:
            at = mark >> self._shift
            while words[at] != mark:
                assert words[at] != _FREE, "a mark stands where no reader comes"
                at += 1

    def _make(self, marks: list[int]) -> None:
        """A table of these marks, at most half full, instead of the one there is."""
        self.withdraw()
        bits = max(_FEWEST_BITS, (2 * len(marks) - 1).bit_length())
        shift, nbytes = 64 - bits, _nbytes(bits)
        fd = -1
        try:
            fd = create_memfd("kvtier-presence", nbytes, sealed=False)
            whole = Mapping(fd, nbytes, writable=True).view.cast("Q")
        except SlabError:
            if fd >= 0:
                os.close(fd)
            return
        seal(fd, future_writes=True)
        whole[_MAGIC], whole[_VERSION], whole[_BITS] = MAGIC, VERSION, bits
        words = whole[_HEADER:]
        self._words, self._header, self._fd, self._shift, self.nbytes = words, whole[:_HEADER], fd, shift, nbytes
        self._held = len(marks)
        marks.sort()  # in the order of their homes: each lies at its home, or right behind the one before
        at = -1
        for mark in marks:
            home = mark >> shift
            at = home if home > at else at + 1
            if at >= home + REACH:
                self._give_up()
                return
            words[at] = mark

    def _give_up(self) -> None:
        self.unfit = True
        self.withdraw()


class PresenceView:
    """The table as a worker sees it. Threads may share it; it is unmapped when nobody refers to it any more."""

    __slots__ = ("_header", "_shift", "_words")

    def __init__(self, fd: int, nbytes: int) -> None:
        """Maps `fd`, which may be closed then. Raises SlabError, and ProtocolError for what is no table that it knows."""
        whole = Mapping(fd, nbytes, writable=False).view.cast("Q")
        self._header, self._words = whole[:_HEADER], whole[_HEADER:]
        if self._header[_MAGIC] != MAGIC or self._header[_VERSION] != VERSION or nbytes != _nbytes(self._header[_BITS]):
            raise ProtocolError(f"the daemon sent {nbytes} bytes that are no presence table of version {VERSION}")
        self._shift = 64 - self._header[_BITS]

    @property
    def replaced(self) -> bool:
        """Whether this one is not kept up any more."""
        return self._header[_REPLACED] != 0

    def count(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are there. Raises InvalidRequest for what is no key."""
        try:
            found = self._walk([_first_word(key)[0] | 2 for key in keys[:_FEW]])
            at = _FEW
            while found == at < len(keys):
                part = keys[at : at + _MANY]
                found += self._gather(_joined(part))
                at += len(part)
        except struct.error:
            raise InvalidRequest(f"a key has {KEY_BYTES} bytes") from None
        return found

    def _walk(self, marks: Iterable[int]) -> int:
        """How many leading marks are there, one by one."""
        words, shift, shifts = self._words, self._shift, self._header[_SHIFTS]
        found = 0
        for mark in marks:
            at = mark >> shift
            while (word := words[at]) != mark:
                if word != _FREE:
                    at += 1
                elif shifts == (now := self._header[_SHIFTS]):
                    return found
                else:
                    at, shifts = mark >> shift, now
            found += 1
        return found

    def _gather(self, keys: bytes) -> int:
        """How many leading ones of these keys are there: most by a look at where they should be, the rest one by one."""
        np = _numpy()
        if np is None:
            return self._walk([word | 2 for word in struct.unpack(f"<{len(keys) // 8}Q", keys)[::2]])
        words: Any = np.frombuffer(self._words, np.uint64)
        marks = np.frombuffer(keys, "<u8")[:: KEY_BYTES // 8] | 2
        at = (marks >> self._shift).view(np.int64)
        rest = np.flatnonzero(words[at] != marks)
        for _ in range(2):
            at[rest] += 1
            rest = rest[words[at[rest]] != marks[rest]]
        for index in rest.tolist():
            if not self._walk((int(marks[index]),)):
                return int(index)
        return len(marks)
