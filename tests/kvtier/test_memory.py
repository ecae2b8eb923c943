"""Shared memory: really there, never shrunk, unmapped only when nobody looks."""

from __future__ import annotations

import errno
import mmap
import os
import threading

import pytest

from kvtier import memory
from kvtier.errors import SlabError
from kvtier.memory import Mapping, available_memory, create_memfd, read_only

SIZE = 1 << 20


def test_a_memfd_is_private_whole_and_sealed() -> None:
    fd = create_memfd("test", SIZE)
    status = os.fstat(fd)
    assert (status.st_size, status.st_blocks * 512, status.st_mode & 0o777) == (SIZE, SIZE, 0o600)
    for size in (0, SIZE - 4096, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_no_memory_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", -1)  # as a kernel that does not know it
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SlabError, match="lower the tier's capacity"):
        create_memfd("test", SIZE)
    assert len(os.listdir("/proc/self/fd")) == before


def test_more_than_there_is_kills_nobody() -> None:
    with pytest.raises(SlabError, match=r"are left; lower the tier's capacity"):
        create_memfd("test", 1 << 62)


def test_two_mappings_show_the_same_bytes() -> None:
    fd = create_memfd("test", SIZE)
    one, two = Mapping(fd, SIZE, writable=True), Mapping(fd, SIZE, writable=False, populate=True)
    os.close(fd)
    one.view[5:9] = b"abcd"
    assert bytes(two.view[5:9]) == b"abcd"
    assert one.address != two.address and one.address % mmap.PAGESIZE == 0
    with pytest.raises(TypeError):
        two.view[0:1] = b"x"
    assert one.close() and two.close()


def test_a_read_only_descriptor_maps_for_reading_alone() -> None:
    fd = create_memfd("test", SIZE)
    reader = read_only(fd)
    with pytest.raises(SlabError, match="cannot map"):
        Mapping(reader, SIZE, writable=True)
    assert Mapping(reader, SIZE, writable=False).close()
    os.close(reader)
    os.close(fd)


def test_a_mapping_stays_while_anyone_looks() -> None:
    fd = create_memfd("test", SIZE)
    mapping = Mapping(fd, SIZE, writable=True)
    os.close(fd)
    piece = mapping.view[10:20]
    assert not mapping.close()
    piece[0:1] = b"x"
    assert mapping.view[10] == ord("x")
    piece.release()
    assert mapping.close()
    with pytest.raises(SlabError, match="unmapped"):
        _ = mapping.view


def test_closing_disturbs_no_other_thread() -> None:
    fd = create_memfd("test", SIZE)
    mapping = Mapping(fd, SIZE, writable=True)
    os.close(fd)
    held = mapping.view
    stop = threading.Event()
    errors: list[Exception] = []

    def look() -> None:
        try:
            while not stop.is_set():
                assert len(mapping.view[8:16]) == 8
        except (AssertionError, SlabError, ValueError) as error:
            errors.append(error)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3000):
        assert not mapping.close()
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    held.release()
    assert mapping.close()


def test_memory_that_can_be_had() -> None:
    assert 0 < available_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
