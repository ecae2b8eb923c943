"""Media: what slabs are made of. The one place to plug another kind of memory in.

A medium makes and unmakes slabs, and moves the bytes of a frame to and from memory of this process. Its methods block;
only movers' threads call them. Host memory is memory of this process itself, so every copy has it at one end or passes
through it.
Not here: which frame is copied where, and when (`kvtier_daemon.store`); what of a file tier survives (`kvtier_daemon.index`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import xxhash

from kvtier import device
from kvtier.device import CudaUnavailable, Device
from kvtier.errors import SlabError
from kvtier.memory import Mapping, create_memfd
from kvtier_daemon.jobs import Job
from kvtier_daemon.lanes import Lane
from kvtier_daemon.slabs import Frame
from kvtier_daemon.store import SourceLost, WrongBytes

log = logging.getLogger(__name__)

_SET_MEMPOLICY = 238 if os.uname().machine == "x86_64" else 237
_MPOL_DEFAULT, _MPOL_PREFERRED = 0, 1


class Medium(Protocol):
    """`persistent`: frames outlive the daemon. `mappable`: workers can have the slabs in their own memory. A copy runs
    on the lane of that end whose `rank` is higher."""

    persistent: bool
    mappable: bool
    rank: int

    def grow(self, slab_id: int, nbytes: int) -> Any:
        """The backing of a new slab. Raises SlabError, with nothing left behind."""

    def shrink(self, slab_id: int, backing: Any) -> None:
        """Give a slab's memory back. Never raises."""

    def open_lane(
        self, threads: int, run: Callable[[list[Job]], None], report: Callable[[list[Job]], None], media: list[Medium]
    ) -> Lane:
        """Start the threads that make this medium's slabs and copies: they `run` jobs, or run them in their own way and
        `report` them. `media` are those of all tiers."""

    def view(self, frame: Frame) -> memoryview | None:
        """The frame's own memory, where it lies in this process and the processor can use it."""

    def address(self, frame: Frame) -> int:
        """Of the frame, for a GPU's copies. Not for media that have none."""

    def load(self, frame: Frame, into: memoryview) -> None:
        """Copy the frame's page to `into`. Raises SourceLost if it cannot be read or is not what was written."""

    def store(self, frame: Frame, data: memoryview) -> None:
        """Copy `data` to the frame. Raises OSError."""


class HostBacking:
    """A memfd and the daemon's own mapping of it."""

    __slots__ = ("fd", "mapping", "pinned")

    def __init__(self, fd: int, mapping: Mapping, pinned: bool) -> None:
        self.fd = fd
        self.mapping = mapping
        self.pinned = pinned


class HostMedium:
    """Memory shared with workers through memfds. With `gpu`, pinned for its copies, and on its NUMA node."""

    persistent = False
    mappable = True
    rank = 0

    def __init__(self, name: str, gpu: Device | None = None) -> None:
        self.name = name
        self.gpu = gpu
        self.pinning = gpu is not None

    def open_lane(
        self, threads: int, run: Callable[[list[Job]], None], report: Callable[[list[Job]], None], media: list[Medium]
    ) -> Lane:
        return Lane(self.name, threads, run)

    def grow(self, slab_id: int, nbytes: int) -> HostBacking:
        with prefer_node(self.gpu.node if self.gpu is not None else -1):
            fd = create_memfd(f"kvtier-{self.name}-{slab_id}", nbytes)
        try:
            mapping = Mapping(fd, nbytes, writable=True, populate=self.pinning)
        except SlabError:
            os.close(fd)
            raise
        return HostBacking(fd, mapping, self._pin(mapping))

    def shrink(self, slab_id: int, backing: HostBacking) -> None:
        if backing.pinned:
            device.unpin(backing.mapping.address, backing.mapping.nbytes)
        backing.mapping.close()
        os.close(backing.fd)

    def address(self, frame: Frame) -> int:
        backing: HostBacking = frame.slab.backing
        return backing.mapping.address + frame.offset

    def _pin(self, mapping: Mapping) -> bool:
        """Pin a slab for the GPUs; if that cannot be done, the tier goes on without, and slower."""
        if not self.pinning:
            return False
        try:
            device.pin(mapping.address, mapping.nbytes)
        except CudaUnavailable as error:
            self.pinning = False
            log.warning(
                "tier %s: %s; its slabs are not pinned from here on, and copies to GPUs are slower", self.name, error
            )
            return False
        return True

    def view(self, frame: Frame) -> memoryview:
        backing: HostBacking = frame.slab.backing
        offset = frame.offset
        return backing.mapping.view[offset : offset + frame.nbytes]

    def load(self, frame: Frame, into: memoryview) -> None:
        _memmove(into, self.view(frame))

    def store(self, frame: Frame, data: memoryview) -> None:
        _memmove(self.view(frame), data)


class FileMedium:
    """Preallocated extent files, one a slab, read and written with O_DIRECT where the filesystem allows it."""

    persistent = True
    mappable = False
    rank = 1

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self.direct = os.O_DIRECT

    def open_lane(
        self, threads: int, run: Callable[[list[Job]], None], report: Callable[[list[Job]], None], media: list[Medium]
    ) -> Lane:
        return Lane(self.name, threads, run)

    def address(self, frame: Frame) -> int:
        raise AssertionError("a file has no address")

    def path(self, slab_id: int) -> Path:
        return self.directory / f"slab-{slab_id:08d}.kv"

    def grow(self, slab_id: int, nbytes: int) -> int:
        path = self.path(slab_id)
        try:
            fd = self._open(path, os.O_CREAT | os.O_EXCL)
        except OSError as error:
            raise SlabError(f"tier {self.name}: cannot create {path}: {error.strerror}") from error
        try:
            os.posix_fallocate(fd, 0, nbytes)
            os.fsync(fd)
            self._sync_directory()
        except OSError as error:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise SlabError(
                f"tier {self.name}: no room for {nbytes} bytes at {path} ({error.strerror}): free disk, or lower "
                f"tiers.{self.name}.capacity; the tier goes on with what it has"
            ) from error
        return fd

    def adopt(self, slab_id: int, nbytes: int) -> int | None:
        """The descriptor of a slab that an earlier daemon left, or None if the file is not there whole."""
        try:
            fd = self._open(self.path(slab_id), 0)
        except OSError:
            return None
        if os.fstat(fd).st_size < nbytes:
            os.close(fd)
            return None
        return fd

    def remove_others(self, keep: set[int]) -> None:
        """Delete the extent files of no slab in `keep`."""
        kept = {self.path(slab_id) for slab_id in keep}
        for path in self.directory.glob("slab-*.kv"):
            if path not in kept:
                path.unlink(missing_ok=True)

    def shrink(self, slab_id: int, backing: int) -> None:
        os.close(backing)
        with contextlib.suppress(OSError):
            self.path(slab_id).unlink(missing_ok=True)

    def view(self, frame: Frame) -> memoryview | None:
        return None

    def load(self, frame: Frame, into: memoryview) -> None:
        fd: int = frame.slab.backing
        done = 0
        try:
            while done < len(into):
                got = os.preadv(fd, [into[done:]], frame.offset + done)
                if got == 0:
                    raise SourceLost(f"tier {self.name}: {self.path(frame.slab.id)} ends inside a page")
                done += got
        except OSError as error:
            raise SourceLost(f"tier {self.name}: cannot read {self.path(frame.slab.id)}: {error.strerror}") from error
        if xxhash.xxh3_64_intdigest(into) != frame.checksum:
            raise WrongBytes(
                f"tier {self.name}: the page at byte {frame.offset} of {self.path(frame.slab.id)} is not what was "
                f"written (checksum): it is dropped; if this repeats, check the disk"
            )

    def store(self, frame: Frame, data: memoryview) -> None:
        fd: int = frame.slab.backing
        frame.checksum = xxhash.xxh3_64_intdigest(data)
        done = 0
        while done < len(data):
            put = os.pwritev(fd, [data[done:]], frame.offset + done)
            if put == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            done += put

    def _open(self, path: Path, flags: int) -> int:
        flags |= os.O_RDWR | os.O_CLOEXEC
        try:
            return os.open(path, flags | self.direct, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
        log.warning("tier %s: %s does not take O_DIRECT; reads and writes go through the page cache", self.name, path)
        self.direct = 0
        return os.open(path, flags & ~os.O_EXCL, 0o600)

    def _sync_directory(self) -> None:
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def copy(source: Frame, source_medium: Medium, target: Frame, target_medium: Medium) -> None:
    """Bring the bytes of `source` to `target`; one of the two must be memory of this process.

    Raises SourceLost or OSError; then `target` holds anything.
    """
    memory = target_medium.view(target)
    if memory is not None:
        source_medium.load(source, memory)
        return
    memory = source_medium.view(source)
    assert memory is not None, "no medium of this copy is memory of this process"
    target_medium.store(target, memory)


@contextlib.contextmanager
def prefer_node(node: int) -> Iterator[None]:
    """Have memory that this thread touches first come from a NUMA node; -1: from wherever the kernel likes."""
    if node < 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    words = (ctypes.c_ulong * (node // 64 + 1))()
    words[node // 64] = 1 << (node % 64)
    bits = ctypes.c_ulong(64 * len(words) + 1)  # the kernel leaves the last bit out
    if libc.syscall(_SET_MEMPOLICY, _MPOL_PREFERRED, ctypes.byref(words), bits):
        log.warning("host slabs cannot be placed on NUMA node %d: %s", node, os.strerror(ctypes.get_errno()))
    try:
        yield
    finally:
        libc.syscall(_SET_MEMPOLICY, _MPOL_DEFAULT, None, ctypes.c_ulong(0))


def _memmove(into: memoryview, data: memoryview) -> None:
    """As `into[:] = data`, but other threads run meanwhile."""
    size = len(data)
    target = (ctypes.c_char * size).from_buffer(into)
    origin = (ctypes.c_char * size).from_buffer(data)
    ctypes.memmove(target, origin, size)
