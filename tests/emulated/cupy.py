"""Stands in for cupy on machines without a GPU: "device memory" is memfds, copies are memmoves, events pass at once.

With this on the path before the real one, daemon and workers run their GPU code whole, IPC handles across processes
included. `KVTIER_EMULATED_GPUS` says how many GPUs there are, CUDA_VISIBLE_DEVICES which of them a process sees.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from types import SimpleNamespace
from typing import Any

_UUID = struct.Struct(">QQ")
_HANDLE = struct.Struct("<iiQ")


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def _visible() -> list[int]:
    count = int(os.environ.get("KVTIER_EMULATED_GPUS", "1"))
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(range(count)) if listed is None else [int(one) for one in listed.split(",") if one]


class _Memory:
    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes
        self.map = mmap.mmap(fd, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


_allocated: dict[int, _Memory] = {}
_imported: dict[int, _Memory] = {}
_registered: dict[int, int] = {}


def _malloc(nbytes: int) -> int:
    fd = os.memfd_create("emulated-gpu")
    os.ftruncate(fd, nbytes)
    memory = _Memory(fd, nbytes)
    _allocated[memory.address] = memory
    return memory.address


def _free(address: int) -> None:
    os.close(_allocated.pop(address).fd)


def _get_handle(address: int) -> bytes:
    memory = _allocated[address]
    return _HANDLE.pack(os.getpid(), memory.fd, memory.nbytes).ljust(64, b"\0")


def _open_handle(handle: bytes, flags: int) -> int:
    pid, fd, nbytes = _HANDLE.unpack_from(handle)
    if pid == os.getpid():
        raise CUDARuntimeError(201, "an IPC handle of this very process")
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    memory = _Memory(own, nbytes)
    os.close(own)
    _imported[memory.address] = memory
    return memory.address


def _close_handle(address: int) -> None:
    if _imported.pop(address, None) is None:
        raise CUDARuntimeError(1, "not an imported address")


def _properties(ordinal: int) -> dict[str, Any]:
    gpu = _visible()[ordinal]
    return {
        "name": b"emulated",
        "totalGlobalMem": 1 << 34,
        "pciDomainID": 0,
        "pciBusID": gpu,
        "pciDeviceID": 0,
    }


def _register(address: int, nbytes: int, flags: int) -> None:
    if address in _registered:
        raise CUDARuntimeError(712, "already registered")
    _registered[address] = nbytes


def _unregister(address: int) -> None:
    if _registered.pop(address, None) is None:
        raise CUDARuntimeError(713, "not registered")


def _memcpy(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
    ctypes.memmove(target, source, nbytes)


class _Driver:
    """In place of the driver's library. What it would write through a pointer is written into what `byref` was given."""

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = _visible()[ordinal]
        return 0

    def cuDeviceGetUuid_v2(self, identity: Any, device: ctypes.c_int) -> int:
        identity.raw = _UUID.pack(0xE0, device.value)
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = 1
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        assert context.value
        return 0

    def cuStreamCreate(self, stream: Any, flags: int) -> int:
        stream._obj.value = 1
        return 0

    def cuMemcpyAsync(self, target: int, source: int, nbytes: int, stream: Any) -> int:
        assert stream.value
        ctypes.memmove(target, source, nbytes)
        return 0

    def cuMemsetD8Async(self, target: int, value: int, nbytes: int, stream: Any) -> int:
        assert stream.value
        ctypes.memset(target, value, nbytes)
        return 0

    def cuEventCreate(self, event: Any, flags: int) -> int:
        event._obj.value = 1
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:
        return 0

    def cuEventQuery(self, event: Any) -> int:
        return 0


runtime = SimpleNamespace(
    CUDARuntimeError=CUDARuntimeError,
    getDeviceCount=lambda: len(_visible()),
    getDeviceProperties=_properties,
    setDevice=lambda ordinal: None,
    malloc=_malloc,
    free=_free,
    memset=lambda address, value, nbytes: ctypes.memset(address, value, nbytes),
    deviceSynchronize=lambda: None,
    ipcGetMemHandle=_get_handle,
    ipcOpenMemHandle=_open_handle,
    ipcCloseMemHandle=_close_handle,
    hostRegister=_register,
    hostUnregister=_unregister,
    deviceCanAccessPeer=lambda one, other: os.environ.get("KVTIER_EMULATED_PEERS", "1") == "1",
    deviceEnablePeerAccess=lambda other: None,
    memcpyAsync=_memcpy,
    memcpyDefault=4,
)
cuda = SimpleNamespace(runtime=runtime)
sys.modules["kvtier.driver"].library = _Driver  # type: ignore[attr-defined]
