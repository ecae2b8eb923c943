"""CUDA as daemon and workers both need it: devices by UUID, IPC handles, pinned host memory.

The only place that knows cupy, which is loaded at the first call: hosts without a GPU need neither. Devices are matched
by UUID, since ordinals differ between processes under CUDA_VISIBLE_DEVICES. Memory is taken with plain cudaMalloc: what
a caching allocator hands out cannot be exported as it is.
Not here: slabs and copies (`kvtier_daemon.cuda`), tensors over them (`kvtier_client.pages`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from kvtier import driver
from kvtier.errors import KvtierError

REGISTER_CHUNK = 64 << 30
"""Bytes pinned by one call: a single registration of 512 GiB and more fails."""
_PORTABLE, _MAPPED, _READ_ONLY = 0x01, 0x02, 0x08
_LAZY_PEER_ACCESS = 1
_ALREADY_ENABLED = 704


class CudaUnavailable(KvtierError):
    """CUDA cannot be used here; the message says what is missing."""

    code = "cuda"


class Device(NamedTuple):
    """A GPU that this process can see. `node` is the NUMA node it hangs on, -1 if the machine has one or says none."""

    ordinal: int
    uuid: str
    name: str
    total: int
    node: int


@functools.cache
def runtime() -> Any:
    """cupy's bindings of the CUDA runtime. Raises CudaUnavailable."""
    try:
        return importlib.import_module("cupy").cuda.runtime
    except ImportError as error:
        raise CudaUnavailable(
            f"cupy is not installed ({error}): install kvtier[cuda12] or kvtier[cuda13], by the driver's CUDA version"
        ) from error


def devices() -> list[Device]:
    """The GPUs of this process, by ordinal. Raises CudaUnavailable, saying whether cupy, driver or device is at fault."""
    cuda = runtime()
    try:
        count = cuda.getDeviceCount()
        identities = [f"GPU-{uuid.UUID(bytes=driver.device_uuid(ordinal))}" for ordinal in range(count)]
    except (cuda.CUDARuntimeError, driver.DriverError, OSError) as error:
        raise CudaUnavailable(f"no GPU can be used: {error}; check the driver with nvidia-smi") from error
    found = []
    for ordinal, identity in enumerate(identities):
        properties = cuda.getDeviceProperties(ordinal)
        bus = f"{properties['pciDomainID']:04x}:{properties['pciBusID']:02x}:{properties['pciDeviceID']:02x}.0"
        name = properties["name"]
        found.append(
            Device(
                ordinal,
                identity,
                name.decode() if isinstance(name, bytes) else str(name),
                properties["totalGlobalMem"],
                _numa_node(bus),
            )
        )
    return found


def by_uuid(identity: str) -> Device:
    """Raises CudaUnavailable if this process cannot see that GPU."""
    for device in devices():
        if device.uuid == identity:
            return device
    raise CudaUnavailable(f"GPU {identity} is not visible to this process: see CUDA_VISIBLE_DEVICES")


def use(ordinal: int) -> None:
    """Make the device current in this thread (and make its context, if it is the first time)."""
    runtime().setDevice(ordinal)


def start(ordinal: int) -> None:
    """Make the device's context. Raises CudaUnavailable where there is no memory left even for that, or it is broken."""
    cuda = runtime()
    try:
        use(ordinal)
        cuda.deviceSynchronize()
    except cuda.CUDARuntimeError as error:
        raise CudaUnavailable(
            f"GPU {ordinal} cannot be used ({error}); see nvidia-smi for what holds its memory"
        ) from error


def allocate(nbytes: int) -> int:
    """`nbytes` of the current device's memory, with whatever was in it. Raises CudaUnavailable."""
    cuda = runtime()
    try:
        return int(cuda.malloc(nbytes))
    except cuda.CUDARuntimeError as error:
        raise CudaUnavailable(f"{nbytes} bytes of GPU memory are not to be had ({error})") from error


def export(address: int) -> bytes:
    """The IPC handle of an allocation."""
    return bytes(runtime().ipcGetMemHandle(address))


def import_(handle: bytes) -> int:
    """Address of another process's allocation, in the current device's context. Not for handles of this process."""
    cuda = runtime()
    try:
        return int(cuda.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS))
    except cuda.CUDARuntimeError as error:
        raise CudaUnavailable(
            f"the GPU memory of kvtierd cannot be mapped ({error}): in containers, daemon and worker need the same GPU "
            f"and a shared IPC and PID namespace"
        ) from error


def unimport(address: int) -> None:
    with contextlib.suppress(Exception):  # the device or the exporter may be gone
        runtime().ipcCloseMemHandle(address)


def pin(address: int, nbytes: int, *, read_only: bool = False, chunk: int = REGISTER_CHUNK) -> None:
    """Register host memory, so that copies run at full speed and kernels can read it where it lies.

    Raises CudaUnavailable, with nothing registered. Undo with `unpin` before the memory is unmapped, or the context of
    this process is lost.
    """
    cuda = runtime()
    done: list[int] = []
    try:
        for start in range(0, nbytes, chunk):
            flags = _PORTABLE | _MAPPED | (_READ_ONLY if read_only else 0)
            cuda.hostRegister(address + start, min(chunk, nbytes - start), flags)
            done.append(address + start)
    except cuda.CUDARuntimeError as error:
        for registered in reversed(done):
            cuda.hostUnregister(registered)
        raise CudaUnavailable(
            f"{nbytes} bytes of host memory cannot be pinned ({error}): raise the memlock limit, or lower the tier's slab"
        ) from error


def unpin(address: int, nbytes: int, *, chunk: int = REGISTER_CHUNK) -> None:
    cuda = runtime()
    for start in range(0, nbytes, chunk):
        with contextlib.suppress(cuda.CUDARuntimeError):
            cuda.hostUnregister(address + start)


def connect(first: int, second: int) -> bool:
    """Let device `first` read and write memory of `second` over the link between them; False if there is none."""
    cuda = runtime()
    if not cuda.deviceCanAccessPeer(first, second):
        return False
    try:
        use(first)
        cuda.deviceEnablePeerAccess(second)
    except cuda.CUDARuntimeError as error:
        return bool(error.status == _ALREADY_ENABLED)
    return True


def _numa_node(bus: str) -> int:
    try:
        nodes = [path for path in Path("/sys/devices/system/node").glob("node[0-9]*") if path.is_dir()]
        return int(Path(f"/sys/bus/pci/devices/{bus}/numa_node").read_text()) if len(nodes) > 1 else -1
    except (OSError, ValueError):
        return -1
