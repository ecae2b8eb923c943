"""The CUDA driver's library, called without letting go of the interpreter lock: for calls that return at once.

Bindings that let go of it around every call make a thread queue for it again each time, up to a whole switch interval
while another is busy; for calls of a microsecond, that is what they would cost. And some things have no right binding.
Not here: everything that cupy does well (`kvtier.device`).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from kvtier.errors import KvtierError


class DriverError(KvtierError):
    """The driver refused a call, or reports that an earlier one failed. `status` is its number for why."""

    code = "cuda_driver"

    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call} gave CUDA error {status} ({_name(status)})")
        self.status = status


def call(name: str, *arguments: Any) -> None:
    """Raises DriverError, or OSError where there is no driver."""
    status = getattr(library(), name)(*arguments)
    if status:
        raise DriverError(name, status)


@functools.cache
def library() -> Any:
    """Raises OSError where there is none."""
    found = ctypes.PyDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    signatures: dict[str, list[Any]] = {
        "cuInit": [number],
        "cuDeviceGet": [pointer, ctypes.c_int],
        "cuDeviceGetUuid_v2": [pointer, ctypes.c_int],
        "cuCtxGetCurrent": [pointer],
        "cuCtxSetCurrent": [pointer],
        "cuStreamCreate": [pointer, number],
        "cuMemcpyAsync": [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, pointer],
        "cuMemsetD8Async": [ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, pointer],
        "cuEventCreate": [pointer, number],
        "cuEventRecord": [pointer, pointer],
        "cuEventQuery": [pointer],
        "cuGetErrorName": [ctypes.c_int, pointer],
    }
    for name, arguments in signatures.items():
        function = getattr(found, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int
    return found


def device_uuid(ordinal: int) -> bytes:
    """16 bytes. (cupy gives those before the first that is zero.) Raises DriverError, OSError."""
    call("cuInit", 0)
    device = ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(device), ordinal)
    identity = ctypes.create_string_buffer(16)
    call("cuDeviceGetUuid_v2", identity, device)
    return identity.raw


def _name(status: int) -> str:
    text = ctypes.c_char_p()
    library().cuGetErrorName(status, ctypes.byref(text))
    return (text.value or b"unknown").decode()
