"""A CUDA stream for copies, by driver calls that return at once (`kvtier.driver`).

None of these calls waits for the GPU, as long as no more than `MOST` copies are under way on a stream: the driver's own
queue is longer. Not here: what is copied and when (`kvtier_daemon.cuda`).
"""

from __future__ import annotations

import ctypes

from kvtier import driver
from kvtier.driver import DriverError

MOST = 256
"""Copies that may be under way on a stream."""
_NON_BLOCKING = 1
_NO_TIMING = 2
_NOT_READY = 600


class Stream:
    """Copies of one direction (or slabs to be zeroed), in order, in the context that is current where it is made and used."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        driver.call("cuStreamCreate", ctypes.byref(self._handle), _NON_BLOCKING)
        self._library = driver.library()
        self._events: list[ctypes.c_void_p] = []

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Start a copy between addresses of any GPU or of pinned host memory. Raises DriverError."""
        status = self._library.cuMemcpyAsync(target, source, nbytes, self._handle)
        if status:
            raise DriverError("cuMemcpyAsync", status)

    def zero(self, target: int, nbytes: int) -> None:
        """Start to write zeros. Raises DriverError."""
        status = self._library.cuMemsetD8Async(target, 0, nbytes, self._handle)
        if status:
            raise DriverError("cuMemsetD8Async", status)

    def mark(self) -> ctypes.c_void_p:
        """An event that has passed when all copies so far are done. Raises DriverError."""
        if self._events:
            event = self._events.pop()
        else:
            event = ctypes.c_void_p()
            driver.call("cuEventCreate", ctypes.byref(event), _NO_TIMING)
        driver.call("cuEventRecord", event, self._handle)
        return event

    def passed(self, event: ctypes.c_void_p) -> bool:
        """Whether an event of this stream has passed; one that has is not to be asked again. Raises DriverError."""
        status = self._library.cuEventQuery(event)
        if status == _NOT_READY:
            return False
        if status:
            raise DriverError("cuEventQuery", status)
        self._events.append(event)
        return True
