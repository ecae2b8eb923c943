"""Tables of unit addresses: what an entry is, how precision travels in it, and memory seen through an address.

An entry is the int64 address of a unit: of this GPU's memory, of a peer's through a mapping, or of pinned host memory.
Units start at multiples of 4 KiB, so the low bits of an address are free; they hold the *tag*, which says in which
precision the unit is stored. A parallel table would cost every tile a second load and could disagree with the first.
A tag of 0 is the namespace's own floating-point dtype, so plain addresses are valid entries.

Not here: which page a token is in (`kvtier.schedule`), who may read it (the daemon's leases).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import msgspec
import torch

from kvtier.errors import InvalidRequest
from kvtier.layout import ALIGNMENT, AttentionLayout, DType, Layout

TAGS: dict[str, int] = {"float8_e4m3fn": 1, "int8": 2, "int4": 3}
"""Tag of a stored precision; every other dtype is the namespace's own and has tag 0."""

TAG_BITS = 7
"""Mask of the bits of an entry that hold the tag; the rest of the low 12 bits must be zero."""

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
}


def tag_of(dtype: DType) -> int:
    """The tag of units stored as `dtype`."""
    return TAGS.get(dtype, 0)


def entries(addresses: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Table entries for units at `addresses` (int64, any shape) stored as `dtype`.

    Raises InvalidRequest where an address is not a multiple of 4 KiB, which no unit of a frame can be.
    """
    if addresses.dtype != torch.int64:
        raise InvalidRequest(f"addresses are {addresses.dtype}: a table holds int64")
    if bool((addresses & (ALIGNMENT - 1)).any()):
        raise InvalidRequest(f"an address is not a multiple of {ALIGNMENT}: is it the address of a unit?")
    return addresses | tag_of(dtype)


def unit_addresses(page: int, order: int, layout: Layout) -> list[int]:
    """Addresses of the 2**order consecutive units of the page that starts at address `page`."""
    return [page + unit * layout.unit_stride for unit in range(1 << order)]


def table_of(
    rows: Iterable[Sequence[int]], *, width: int | None = None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """An int64 table `[sequence, width]` of the given entries, unused ones 0.

    `width` defaults to the longest row. Raises InvalidRequest for a row that does not fit.
    """
    rows = [list(row) for row in rows]
    longest = max((len(row) for row in rows), default=0)
    width = longest if width is None else width
    if longest > width:
        raise InvalidRequest(f"a sequence has {longest} units, the table {width} columns")
    padded = [row + [0] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int64, device=device).reshape(len(rows), width)


def read_bytes(address: int, nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """A copy of `nbytes` bytes at `address`, as uint8 on `device`. Reference and tests only: it waits for the copy.

    With a CUDA device the address may be of any memory that the driver knows; otherwise it is this process's memory.
    """
    out = torch.empty(nbytes, dtype=torch.uint8, device=device)
    if out.device.type == "cpu" and not torch.cuda.is_available():
        ctypes.memmove(out.data_ptr(), address, nbytes)
        return out
    torch.cuda.synchronize()
    _driver_copy(out.data_ptr(), address, nbytes)
    return out


def write_bytes(address: int, data: torch.Tensor) -> None:
    """Put the bytes of `data` at `address`. The counterpart of `read_bytes`, with the same reach."""
    flat = data.contiguous().view(torch.uint8).reshape(-1)
    if flat.device.type == "cpu" and not torch.cuda.is_available():
        ctypes.memmove(address, flat.data_ptr(), flat.numel())
        return
    torch.cuda.synchronize()
    _driver_copy(address, flat.data_ptr(), flat.numel())


def _driver_copy(target: int, source: int, nbytes: int) -> None:
    # The driver tells device, peer and host addresses apart by itself; the framework would need to be told.
    copy = ctypes.CDLL("libcuda.so.1").cuMemcpy
    code = copy(ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(nbytes))
    if code:
        raise InvalidRequest(f"cuMemcpy of {nbytes} bytes from {source:#x} to {target:#x} failed with error {code}")


def check_entries(table: torch.Tensor, lengths: torch.Tensor, layouts: Sequence[Layout]) -> None:
    """Raise InvalidRequest where a used entry of `table` is no entry, or is of a precision not in `layouts`.

    Reads the table on the host, so it waits for the device; kernels call it only when asked to check.
    """
    tags = {tag_of(layout.dtype) for layout in layouts}
    unit = layouts[0].unit_tokens
    for row, (addresses, length) in enumerate(zip(table.tolist(), lengths.tolist(), strict=True)):
        used = addresses[: -(-length // unit)]
        for column, entry in enumerate(used):
            if entry & ~TAG_BITS <= 0 or entry & (ALIGNMENT - 1) & ~TAG_BITS:
                raise InvalidRequest(f"entry {entry:#x} of sequence {row}, unit {column} is no address of a unit")
            if len(tags) > 1 and entry & TAG_BITS not in tags:
                names = ", ".join(layout.dtype for layout in layouts)
                raise InvalidRequest(
                    f"unit {column} of sequence {row} has tag {entry & TAG_BITS}, the launch reads {names}: "
                    "add its precision to `precisions`"
                )


def layouts_of(layout: AttentionLayout, precisions: Sequence[DType] | None) -> tuple[AttentionLayout, ...]:
    """One layout a precision; just `layout` when none are named. Raises InvalidRequest for two with one tag."""
    if not precisions:
        return (layout,)
    if len({tag_of(p) for p in precisions}) < len(precisions):
        raise InvalidRequest(f"precisions {', '.join(precisions)} share a tag: a table cannot tell them apart")
    return tuple(msgspec.structs.replace(layout, dtype=precision) for precision in precisions)
