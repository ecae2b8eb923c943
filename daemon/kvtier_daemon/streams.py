"""A CUDA stream for copies, by driver calls that return at once and are made without letting go of the interpreter lock.

Bindings that let go of it around every call make the thread of a GPU queue for it again each time, up to a whole switch
interval while the state thread is busy: for calls of a microsecond, the link would wait on Python. None of these calls
waits for the GPU, as long as no more than `MOST` copies are under way on a stream (the driver's own queue is longer).
Not here: what is copied and when (`kvtier_daemon.cuda`), memory and devices (`kvtier.device`).
"""

from __future__ import annotations

import ctypes
import functools

from kvtier.errors import KvtierError

MOST = 256
"""Copies that may be under way on a stream."""
_NON_BLOCKING = 1
_NO_TIMING = 2
_NOT_READY = 600


class CopyFailed(KvtierError):
    """The driver refused a copy, or one that was under way failed. `status` is the driver's number."""

    code = "copy_failed"

    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call} gave CUDA error {status} ({_name(status)})")
        self.status = status


class Stream:
    """Copies of one direction, in order, in the context that is current in the thread that makes it and uses it."""

    def __init__(self) -> None:
        self._driver = _driver()
        handle = ctypes.c_void_p()
        self._check("cuStreamCreate", self._driver.cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING))
        self._handle = handle
        self._events: list[ctypes.c_void_p] = []

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Start a copy between addresses of any GPU or of pinned host memory. Raises CopyFailed."""
        self._check("cuMemcpyAsync", self._driver.cuMemcpyAsync(target, source, nbytes, self._handle))

    def mark(self) -> ctypes.c_void_p:
        """An event that has passed when all copies so far are done. Raises CopyFailed."""
        if self._events:
            event = self._events.pop()
        else:
            event = ctypes.c_void_p()
            self._check("cuEventCreate", self._driver.cuEventCreate(ctypes.byref(event), _NO_TIMING))
        self._check("cuEventRecord", self._driver.cuEventRecord(event, self._handle))
        return event

    def passed(self, event: ctypes.c_void_p) -> bool:
        """Whether an event of this stream has passed; one that has is not to be asked again. Raises CopyFailed."""
        status = self._driver.cuEventQuery(event)
        if status == _NOT_READY:
            return False
        self._check("cuEventQuery", status)
        self._events.append(event)
        return True

    @staticmethod
    def _check(call: str, status: int) -> None:
        if status:
            raise CopyFailed(call, status)


@functools.cache
def _driver() -> ctypes.PyDLL:
    """The driver's library; what PyDLL calls keeps the interpreter lock."""
    library = ctypes.PyDLL("libcuda.so.1")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    signatures: dict[str, list[object]] = {
        "cuStreamCreate": [pointer, ctypes.c_uint],
        "cuMemcpyAsync": [ctypes.c_uint64, ctypes.c_uint64, size, pointer],
        "cuEventCreate": [pointer, ctypes.c_uint],
        "cuEventRecord": [pointer, pointer],
        "cuEventQuery": [pointer],
        "cuGetErrorName": [ctypes.c_int, pointer],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int
    return library


def _name(status: int) -> str:
    text = ctypes.c_char_p()
    try:
        _driver().cuGetErrorName(status, ctypes.byref(text))
    except OSError:
        pass
    return (text.value or b"unknown").decode()
