"""Media by themselves: bytes there and back, and what they do when the disk does not."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import Size, TierConfig
from kvtier.errors import SlabError
from kvtier_daemon.directory import Directory
from kvtier_daemon.media import FileMedium, HostMedium, copy
from kvtier_daemon.slabs import Frame, Slab
from kvtier_daemon.store import SourceLost
from kvtier_daemon.tiers import Tier
from tests.daemon.world import UNIT

FRAME = 16 * UNIT


def frame_of(medium: HostMedium | FileMedium, index: int = 1, slab_id: int = 1) -> Frame:
    """A frame of a new slab of four."""
    config = TierConfig(medium="host", capacity=Size(4 * FRAME), slab=Size(4 * FRAME))
    tier = Tier(0, "tier", config, persistent=medium.persistent, mappable=medium.mappable)
    owner = tier.slab_class(Directory(1).tenant("me"), FRAME)
    slab = Slab(slab_id, owner, 4 * FRAME, medium.grow(slab_id, 4 * FRAME))
    owner.adopt(slab)
    return slab.frames[index]


@pytest.fixture
def host() -> Iterator[tuple[HostMedium, Frame]]:
    medium = HostMedium("host")
    frame = frame_of(medium)
    yield medium, frame
    medium.shrink(1, frame.slab.backing)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[FileMedium, Frame]]:
    medium = FileMedium("ssd", tmp_path)
    frame = frame_of(medium)
    yield medium, frame
    medium.shrink(1, frame.slab.backing)


Pair = tuple[Any, Frame]


def test_there_and_back(host: Pair, disk: Pair) -> None:
    (memory, here), (medium, there) = host, disk
    data = os.urandom(FRAME)
    memory.view(here)[:] = data
    copy(here, memory, there, medium)
    assert medium.path(1).read_bytes()[FRAME : 2 * FRAME] == data
    memory.view(here)[:] = bytes(FRAME)
    copy(there, medium, here, memory)
    assert bytes(memory.view(here)) == data


def test_one_flipped_bit_is_seen(host: Pair, disk: Pair) -> None:
    (memory, here), (medium, there) = host, disk
    memory.view(here)[:] = os.urandom(FRAME)
    copy(here, memory, there, medium)
    with medium.path(1).open("r+b") as file:
        file.seek(2 * FRAME - 1)
        last = file.read(1)[0]
        file.seek(2 * FRAME - 1)
        file.write(bytes([last ^ 0x80]))
    with pytest.raises(SourceLost, match=r"byte 65536 of .*slab-00000001\.kv is not what was written"):
        copy(there, medium, here, memory)


def test_reads_and_writes_that_come_in_pieces(host: Pair, disk: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    (memory, here), (medium, there) = host, disk
    data = os.urandom(FRAME)
    memory.view(here)[:] = data
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: write(fd, [views[0][:UNIT]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:UNIT]], at))
    copy(here, memory, there, medium)
    memory.view(here)[:] = bytes(FRAME)
    copy(there, medium, here, memory)
    assert bytes(memory.view(here)) == data


def test_a_read_that_fails_and_one_that_ends(host: Pair, disk: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    (memory, here), (medium, there) = host, disk

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(SourceLost, match=r"cannot read .*Input/output error"):
            copy(there, medium, here, memory)
    os.truncate(medium.path(1), FRAME + UNIT)
    with pytest.raises(SourceLost, match="ends inside a page"):
        copy(there, medium, here, memory)


def test_a_write_that_fails_and_one_that_writes_nothing(
    host: Pair, disk: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    (memory, here), (medium, there) = host, disk
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="Input/output"):
        copy(here, memory, there, medium)


def test_no_room_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    medium = FileMedium("ssd", tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SlabError, match=r"No space left.*free disk, or lower tiers\.ssd\.capacity"):
        medium.grow(1, FRAME)
    assert not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.undo()
    (tmp_path / "slab-00000001.kv").write_bytes(b"someone's")
    with pytest.raises(SlabError, match="File exists"):
        medium.grow(1, FRAME)
    assert medium.path(1).read_bytes() == b"someone's"


def test_a_filesystem_without_direct_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.open

    def picky(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(path, flags, mode)

    monkeypatch.setattr(os, "open", picky)
    medium = FileMedium("ssd", tmp_path)
    frame = frame_of(medium)
    medium.store(frame, memoryview(bytearray(os.urandom(FRAME))))
    medium.load(frame, memoryview(bytearray(FRAME)))
    medium.shrink(1, frame.slab.backing)
    assert not list(tmp_path.iterdir())


def test_extents_are_there_and_private(disk: Pair) -> None:
    medium, _ = disk
    status = medium.path(1).stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == 4 * FRAME <= status.st_blocks * 512
    assert medium.adopt(1, 4 * FRAME + 1) is None
    assert medium.adopt(2, 1) is None
    again = medium.adopt(1, 4 * FRAME)
    assert again is not None
    os.close(again)
