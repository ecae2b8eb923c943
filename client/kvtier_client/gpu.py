"""A worker's side of GPU memory: slabs of kvtierd mapped by CUDA IPC, and tensors over them without a copy."""

from __future__ import annotations

import importlib
import threading
import weakref
from typing import TYPE_CHECKING, Any

from kvtier import device
from kvtier.device import Device
from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    import torch


class DeviceMapping:
    """One slab of GPU memory in this process, opened once. Unmapped only when no tensor over it is left."""

    def __init__(self, handle: bytes, nbytes: int, gpu: Device) -> None:
        """Opens it in the context of `gpu`, also where it lies on a peer. Raises CudaUnavailable."""
        device.use(gpu.ordinal)
        self.gpu = gpu
        self.nbytes = nbytes
        self.address = device.import_(handle)
        self._lock = threading.Lock()
        self._uses = 0
        self._unwanted = False
        self._mapped = True

    @property
    def view(self) -> memoryview:
        raise InvalidRequest("this page lies in GPU memory: use .torch(), or .address in a kernel")

    def tensor(self, offset: int, length: int) -> torch.Tensor:
        """`length` bytes from `offset` on, as uint8 on the GPU."""
        import torch

        cupy: Any = importlib.import_module("cupy")
        memory = cupy.cuda.UnownedMemory(self.address, self.nbytes, self.use(), self.gpu.ordinal)
        array = cupy.ndarray((length,), cupy.uint8, cupy.cuda.MemoryPointer(memory, offset))
        return torch.as_tensor(array, device=f"cuda:{self.gpu.ordinal}")

    def use(self) -> object:
        """What keeps it mapped for as long as it lives."""
        use = _Use()
        with self._lock:
            self._uses += 1
        weakref.finalize(use, self._used).atexit = False
        return use

    def close(self) -> bool:
        """Unmap; False, with the mapping still good, while a tensor over it is left: it goes with the last of them."""
        with self._lock:
            self._unwanted = True
            return self._unmap()

    def _used(self) -> None:
        """A use is over."""
        with self._lock:
            self._uses -= 1
            if self._unwanted:
                self._unmap()

    def _unmap(self) -> bool:
        if self._uses:
            return False
        if self._mapped:
            self._mapped = False
            device.unimport(self.address)
        return True


class _Use:
    """Lives as long as a tensor over a mapping."""

    __slots__ = ("__weakref__",)


def passed(after: Any) -> bool:
    """Whether what a stream was given before the event `after` is done."""
    return bool(after.query())


def event(after: Any) -> Any:
    """An event (anything with `query` and `synchronize`) of `after`, which is one, or a torch stream."""
    return after.record_event() if hasattr(after, "record_event") else after


def find(which: int | str | None) -> Device | None:
    """The GPU that `which` names: an ordinal of this process, "cuda:N", a UUID; None for none. Raises CudaUnavailable."""
    if which is None:
        return None
    text = str(which)
    number = text.removeprefix("cuda:").removeprefix("cuda") or "0"
    if number.isdigit():
        found = device.devices()
        if int(number) >= len(found):
            raise InvalidRequest(f"device {which}: this process sees {len(found)} GPUs")
        return found[int(number)]
    return device.by_uuid(text)
