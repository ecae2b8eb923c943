"""Memory that two processes share: memfds, which have no name and so cannot outlive their users.

A memfd that anyone may have mapped is never truncated: its readers would die by SIGBUS. It is sealed, so that none of
those it is handed to can do it either.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from pathlib import Path

from kvtier.errors import SlabError


def available_memory() -> int:
    """Bytes that this process could still take: of the machine, or of its memory cgroup where that is less."""
    with open("/proc/meminfo") as lines:
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    try:
        group = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].split("\n")[0].strip("/")
        base = Path("/sys/fs/cgroup") / group
        limit, used = (base / "memory.max").read_text().strip(), int((base / "memory.current").read_text())
        if limit != "max":
            free = min(free, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return free


def create_memfd(name: str, nbytes: int, *, sealed: bool = True) -> int:
    """A descriptor of `nbytes` of memory that is really there, mode 0600. Blocks while the kernel finds the pages. Without
    `sealed`, `seal` is left to the caller, and due before anyone else gets it.

    Raises SlabError, with nothing left behind, where memory or a limit does not allow it.
    """
    fd = -1
    try:
        if nbytes > (left := available_memory()):  # the kernel would not refuse, but kill someone
            raise SlabError(
                f"no memory for a slab of {nbytes} bytes: {left} are left; lower the tier's capacity or free memory"
            )
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        _fill(fd, nbytes)
        if sealed:
            seal(fd)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise SlabError(
            f"no memory for a slab of {nbytes} bytes ({error.strerror}): lower the tier's capacity or free memory"
        ) from error
    return fd


def _fill(fd: int, nbytes: int) -> None:
    """Have the kernel find the memory now, in huge pages where it is told that it may ("advise" in shmem_enabled of
    transparent_hugepage): fallocate would never take those."""
    with mmap.mmap(fd, nbytes) as mapping:
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        with memoryview(mapping) as view:  # by ctypes, since mmap.madvise keeps other threads out meanwhile
            failed = _LIBC.madvise(_address(view), nbytes, _MADV_POPULATE_WRITE)
    if failed:  # a kernel before 5.14, or no memory, which this tells apart
        os.posix_fallocate(fd, 0, nbytes)


_MADV_POPULATE_WRITE = 23
_F_SEAL_FUTURE_WRITE = 0x10
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def seal(fd: int, *, future_writes: bool = False) -> None:
    """Nobody can change its size from now on; with `future_writes`, nor write to it but through a mapping that there is."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    if future_writes:
        # A kernel before 5.1 has no such seal; the memfd's mode keeps other users from writing even so.
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)


def read_only(fd: int) -> int:
    """Another descriptor of the same memory, which cannot be mapped for writing."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


class Mapping:
    """One mapping of a memfd into this process. Safe to keep views of: it is unmapped only when none is left."""

    __slots__ = ("_mmap", "address", "nbytes")

    def __init__(self, fd: int, nbytes: int, *, writable: bool, populate: bool = False) -> None:
        """Maps `fd` shared; with `populate`, page tables are filled now instead of at first touch."""
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            self._mmap = mmap.mmap(fd, nbytes, flags, prot)
        except OSError as error:
            raise SlabError(f"cannot map a slab of {nbytes} bytes: {error.strerror}") from error
        self.nbytes = nbytes
        self.address = _address(self.view)
        with contextlib.suppress(OSError, AttributeError):
            self._mmap.madvise(mmap.MADV_DONTDUMP)
            self._mmap.madvise(mmap.MADV_HUGEPAGE)

    @property
    def view(self) -> memoryview:
        """All of it. Raises SlabError after `close`."""
        try:
            return memoryview(self._mmap)
        except ValueError:
            raise SlabError("this slab is unmapped: nothing of it is borrowed any more") from None

    def close(self) -> bool:
        """Unmap; False, with the mapping still good, while anyone holds a view of it."""
        try:
            self._mmap.close()
        except BufferError:
            return False
        return True


class _Buffer(ctypes.Structure):
    """CPython's Py_buffer, whose layout is part of the stable ABI since 3.11."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def _address(view: memoryview) -> int:
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return buffer.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
