"""The presence table: what is in it is found, by whoever reads while it is written; and nobody else writes it."""

from __future__ import annotations

import itertools
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import presence
from kvtier.errors import InvalidRequest, ProtocolError, SlabError
from kvtier.memory import Mapping, create_memfd
from kvtier.presence import REACH, PresenceTable, PresenceView

ROOT = Path(__file__).parents[2]


def key(home: int, number: int = 0) -> bytes:
    """One of those whose home in the smallest table is word `home`, and in larger ones too if they are far apart."""
    return (home << 56 | number << 8).to_bytes(8, "little") + number.to_bytes(8, "little")


@contextmanager
def opened(*keys: bytes) -> Iterator[PresenceTable]:
    table = PresenceTable()
    os.close(table.share(keys))
    try:
        yield table
    finally:
        table.withdraw()


def viewed(table: PresenceTable) -> PresenceView:
    fd = table.share(())
    try:
        return PresenceView(fd, table.nbytes)
    finally:
        os.close(fd)


# Few homes, at both ends and side by side: so marks are crowded, and pushed into one another's places.
KEYS = st.builds(key, st.sampled_from([0, 1, 2, 7, 254, 255]), st.integers(0, 5))


@given(st.lists(st.tuples(st.booleans(), KEYS)), st.lists(KEYS, max_size=8))
def test_it_is_a_set(steps: list[tuple[bool, bytes]], chain: list[bytes]) -> None:
    held: set[bytes] = set()
    with opened() as table:
        view = viewed(table)
        for add, one in steps:
            if add == (one in held):
                continue
            (table.add if add else table.discard)(one)
            held ^= {one}
            table.check(held)
            assert view.count([one]) == (one in held)
        assert [view.count([one]) for one in chain] == [one in held for one in chain]
        run = next((at for at, one in enumerate(chain) if one not in held), len(chain))
        assert view.count(chain) == run
        assert not view.replaced


@pytest.mark.parametrize("numpy", [True, False])
def test_of_a_long_chain_the_leading_run_counts(numpy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not numpy:
        monkeypatch.setattr(presence, "_numpy", lambda: None)
    chain = [os.urandom(16) for _ in range(5000)]
    with opened(*chain) as table:
        view = viewed(table)
        assert view.count(chain) == 5000
        for at in (4999, 3000, 1056, 1055, 100, 33, 32, 31, 1, 0):
            table.discard(chain[at])
            assert view.count(chain) == at
            table.add(chain[at])
            assert view.count(chain) == 5000
        assert view.count([]) == 0


def test_it_grows_and_says_so() -> None:
    keys = [os.urandom(16) for _ in range(3000)]
    sizes = []
    with opened() as table:
        view = viewed(table)
        for number, one in enumerate(keys, 1):
            table.add(one)
            if view.replaced:
                sizes.append(number)
                view = viewed(table)
            assert view.count([one]) == 1
        assert sizes == [129, 257, 513, 1025, 2049], "at half full, each time"
        assert view.count(keys) == 3000
        assert table.nbytes / 3000 < 32
        table.check(keys)


def test_what_is_shared_late_has_all() -> None:
    keys = [os.urandom(16) for _ in range(1000)]
    table = PresenceTable()
    for one in keys[:500]:
        table.add(one)  # nobody has asked for it: nothing to keep up
    assert table.nbytes == 0
    with opened(*keys[:500]) as table:
        for one in keys[500:]:
            table.add(one)
        assert viewed(table).count(keys) == 1000


def test_a_view_of_a_withdrawn_table_says_so() -> None:
    with opened(key(1)) as table:
        view = viewed(table)
        table.withdraw()
        assert view.replaced
        table.add(key(2))
        table.discard(key(1))
        os.close(table.share([key(2)]))
        assert viewed(table).count([key(2)]) == 1 and viewed(table).count([key(1)]) == 0


def test_keys_that_are_no_digests_have_no_table() -> None:
    with opened() as table:
        view = viewed(table)
        for number in range(REACH + 1):
            table.add((7).to_bytes(8, "little") + number.to_bytes(8, "little"))
        assert table.unfit and view.replaced
        assert table.share([key(1)]) == -1
        table.add(key(3))
        table.discard(key(3))


def test_a_run_that_would_all_move_up_has_no_table() -> None:
    """Each mark stands where the next one has its home: if the first goes, all the others move, however many."""
    run = [(home << 54).to_bytes(8, "little") + bytes(8) for home in range(REACH + 50)]
    first = bytes(8) + b"another."
    with opened(first, *run) as table:
        view = viewed(table)
        assert view.count([first, *run]) == len(run) + 1
        table.discard(first)
        assert table.unfit and view.replaced


def test_many_of_them_from_the_start_have_no_table_either() -> None:
    table = PresenceTable()
    assert table.share([bytes(8) + number.to_bytes(8, "little") for number in range(REACH + 1)]) == -1
    assert table.unfit


def test_without_memory_there_is_none_until_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [os.urandom(16) for _ in range(200)]

    def refuse(name: str, nbytes: int, *, sealed: bool) -> int:
        raise SlabError("no memory")

    with opened(*keys[:128]) as table:
        view = viewed(table)
        with monkeypatch.context() as patched:
            patched.setattr(presence, "create_memfd", refuse)
            table.add(keys[128])
            assert view.replaced and table.nbytes == 0
            assert table.share(keys[:129]) == -1
            table.add(keys[129])
        os.close(table.share(keys))
        assert viewed(table).count(keys) == 200


def test_who_reads_it_cannot_write_it() -> None:
    with opened(key(1)) as table:
        fd = table.share(())
        with pytest.raises(SlabError):
            Mapping(fd, table.nbytes, writable=True)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x" * 8, 64)
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # as its owner, or root
        with pytest.raises(PermissionError):
            os.pwrite(again, b"x" * 8, 64)
        with pytest.raises(PermissionError):
            mmap.mmap(again, table.nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.ftruncate(again, 0)
        view = PresenceView(fd, table.nbytes)
        with pytest.raises(TypeError, match="read-only"):
            view._words[0] = 1
        os.close(again)
        os.close(fd)
        table.add(key(2))
        assert view.count([key(1), key(2)]) == 2, "its owner still can"


def test_what_is_no_table_is_refused() -> None:
    for content in (b"", b"kvtierpr" + (2).to_bytes(8, "little"), b"kvtierpr\1" + bytes(7) + b"\x09"):
        fd = create_memfd("test", 4096)
        os.pwrite(fd, content, 0)
        with pytest.raises(ProtocolError, match="no presence table"):
            PresenceView(fd, 4096)
        os.close(fd)


def test_what_is_no_key_is_refused() -> None:
    with opened(*(good := [os.urandom(16) for _ in range(40)])) as table:
        view = viewed(table)
        for bad in ([b"short"], [*good, b"x" * 15], [*good, b"x" * 15, b"x" * 18]):
            with pytest.raises(InvalidRequest, match="16"):
                view.count(bad)


class Written:
    """Words that note how they are written to."""

    def __init__(self, words: memoryview, log: list[tuple[int, int, int]], which: int) -> None:
        self.words, self.log, self.which = words, log, which

    def __getitem__(self, at: int) -> int:
        return self.words[at]

    def __setitem__(self, at: int, word: int) -> None:
        self.words[at] = word
        self.log.append((self.which, at, word))


class Read:
    """Words that are written to, as was noted, between any two of a reader's looks at them."""

    def __init__(
        self, both: list[list[int]], which: int, log: Iterator[tuple[int, int, int]], pace: Iterator[int]
    ) -> None:
        self.both, self.which, self.log, self.pace = both, which, log, pace

    def __getitem__(self, at: int) -> int:
        for which, where, word in itertools.islice(self.log, next(self.pace, 0)):
            self.both[which][where] = word
        return self.both[self.which][at]


CROWD = [key(home, number) for home in (9, 10) for number in range(5)]


@given(st.permutations(CROWD), st.lists(st.integers(0, 3)), st.integers(0, 9))
def test_however_writes_fall_between_reads_what_stays_is_found(goes: list[bytes], pace: list[int], stays: int) -> None:
    log: list[tuple[int, int, int]] = []
    with opened(*CROWD) as table:
        view = viewed(table)
        words, header = list(view._words), list(view._header)
        table._words, table._header = Written(table._words, log, 0), Written(table._header, log, 1)  # type: ignore
        for one in goes:
            if one != CROWD[stays]:
                table.discard(one)
        writes, speed = iter(log), iter(pace)
        both = [words, header]
        view._words, view._header = (Read(both, which, writes, speed) for which in (0, 1))  # type: ignore
        assert view.count([CROWD[stays]]) == 1


READER = """
import mmap, sys
from kvtier.presence import PresenceView
from tests.kvtier.test_presence import key
view = PresenceView(int(sys.argv[1]), int(sys.argv[2]))
there = memoryview(mmap.mmap(int(sys.argv[3]), 4096)).cast("Q")
print("ready", flush=True)
turns = missed = 0
while not view.replaced:
    if number := there[0]:
        found = view.count([key(9, number)])
        if there[0] == number:
            turns += 1
            missed += not found
print(turns, missed)
"""


def test_a_reader_misses_nothing_while_others_come_and_go() -> None:
    """`there` tells of one mark after another that lies behind others with its home, and moves up as those go."""
    crowd = [key(9, 100_000 + number) for number in range(6)]
    memory = os.memfd_create("there")
    os.ftruncate(memory, 4096)
    there = memoryview(mmap.mmap(memory, 4096)).cast("Q")
    with opened() as table:
        fd = table.share(())
        command = [sys.executable, "-c", READER, *map(str, (fd, table.nbytes, memory))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        reader = subprocess.Popen(
            command, pass_fds=[fd, memory], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        os.close(fd)
        assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
        until, number = time.monotonic() + 1, 0
        while time.monotonic() < until:
            number += 1
            for one in crowd:
                table.add(one)
            table.add(key(9, number))
            there[0] = number
            for one in crowd:
                table.discard(one)
            there[0] = 0
            table.discard(key(9, number))
        table.withdraw()
        turns, missed = map(int, reader.stdout.readline().split())
        assert reader.wait(20) == 0
        reader.stdout.close()
    os.close(memory)
    assert turns > 100 and missed == 0, f"missed {missed} of {turns}"
