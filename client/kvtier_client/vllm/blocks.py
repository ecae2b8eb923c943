"""Where an engine's blocks lie, and copies between them and units of kvtier's pages.

A block has bytes in many places: every layer has its own tensor, or a slice of one for all, and within it K and V or heads
may lie apart. Each such run of bytes is a *piece*, at base + block * stride; a unit is the pieces of one block, one after
another. So copies move bytes and know nothing of heads, dtypes or attention, and the same code serves NHD, HND, blocks that
hold all layers, fp8 and MLA.

On a GPU, pieces that are large or adjoin at both ends go to the copy engines, which leave the multiprocessors to the model;
small ones go through one launch of the gather/scatter kernel, since they are what single copies are slow at. On the CPU it
is memmove.

Not here: when a copy may run (`worker`), and what a unit is called (`naming`). Needs torch, and no vLLM.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier import device
from kvtier.errors import LayoutError

Addresses = NDArray[np.int64]

COPY_ENGINE_BYTES = 256 << 10
"""Runs from this size on are given to the copy engines: below it their cost a copy shows."""
_LAUNCHING = threading.Lock()
"""Triton compiles at the first launch, and does not expect two threads to do so."""
PROGRAMS = 16
"""Programs of the copy kernel: enough for the link's speed, and few of a GPU's multiprocessors."""


class Piece(NamedTuple):
    """Bytes of every block: those of block b are the `nbytes` at base + b * stride."""

    base: int
    stride: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The blocks of one KV cache group on one device. Made by `block_map`; `tensors` keep the memory alive.

    `arrangement` says what the bytes of a unit are, and is equal where they mean the same.
    """

    pieces: tuple[Piece, ...]
    blocks: int
    device: torch.device
    arrangement: str
    tensors: tuple[torch.Tensor, ...]

    @property
    def unit_bytes(self) -> int:
        """Of one block, in all its pieces."""
        return sum(piece.nbytes for piece in self.pieces)


def block_map(caches: Mapping[str, Any], layers: Sequence[str], blocks: int) -> BlockMap:
    """The map of `layers`, of which `caches` has a tensor, or several, each. `blocks` is how many blocks there are.

    The axis of blocks is the first whose size is `blocks` times a whole number (a kernel may cut blocks into smaller ones);
    all others lie within a block. Layers that share memory count once.
    Raises LayoutError for a tensor without such an axis, or whose blocks overlap.
    """
    pieces: list[Piece] = []
    tensors: list[torch.Tensor] = []
    described: list[str] = []
    for layer in layers:
        entry = caches[layer]
        for tensor in [entry] if isinstance(entry, torch.Tensor) else entry:
            own, form = _pieces(layer, tensor, blocks)
            if not set(own) <= set(pieces):
                pieces += own
                tensors.append(tensor)
                described.append(form)
    if not pieces:
        raise LayoutError(f"no tensors for the {len(layers)} layers of a KV cache group")
    if len({tensor.device for tensor in tensors}) > 1:
        raise LayoutError(f"a group's tensors lie on {sorted({str(tensor.device) for tensor in tensors})}")
    return BlockMap(_joined(pieces), blocks, tensors[0].device, _folded(described), tuple(tensors))


def transfers(
    blocks: BlockMap, numbers: Sequence[int], units: Sequence[int] | Addresses
) -> list[tuple[Addresses, Addresses, int]]:
    """(addresses in blocks, addresses in units, bytes) of every run of blocks `numbers` that goes with `units`, the
    addresses of as many units; one entry for each size. Raises LayoutError for a block that there is not."""
    chosen = np.asarray(numbers, np.int64)
    where = np.asarray(units, np.int64)
    if chosen.shape != where.shape:
        raise LayoutError(f"{len(chosen)} blocks and {len(where)} units: as many of each")
    if len(chosen) and not 0 <= chosen.min() <= chosen.max() < blocks.blocks:
        raise LayoutError(f"blocks {chosen.min()} to {chosen.max()}: there are {blocks.blocks}")
    found: dict[int, tuple[list[Addresses], list[Addresses]]] = {}
    offset = 0
    for base, stride, nbytes in blocks.pieces:
        theirs, ours = found.setdefault(nbytes, ([], []))
        theirs.append(base + chosen * stride)
        ours.append(where + offset)
        offset += nbytes
    return [(np.concatenate(theirs), np.concatenate(ours), nbytes) for nbytes, (theirs, ours) in found.items()]


def adjoining(sources: Addresses, targets: Addresses, nbytes: int) -> tuple[Addresses, Addresses, Addresses]:
    """The same copies with those joined that go on where the one before ends, at both ends: sources, targets, bytes."""
    if not len(sources):
        return sources, targets, sources
    apart = (np.diff(sources) != nbytes) | (np.diff(targets) != nbytes)
    starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
    sizes = np.diff(np.concatenate((starts, [len(sources)]))) * nbytes
    return sources[starts], targets[starts], sizes


def copy(
    blocks: BlockMap, numbers: Sequence[int], units: Sequence[int] | Addresses, *, load: bool, stream: Any = None
) -> None:
    """Copy blocks `numbers` into units (their addresses), or with `load` units into blocks.

    On a GPU it is queued on `stream` (a torch stream; the current one if None), and addresses are those that its kernels
    can use; the caller keeps both ends as they are until the stream has passed it. On the CPU it is done on return.
    """
    gpu = blocks.device.type == "cuda"
    for theirs, ours, nbytes in transfers(blocks, numbers, units):
        sources, targets = (ours, theirs) if load else (theirs, ours)
        if gpu:
            _on_gpu(sources, targets, nbytes, blocks.device, stream)
        else:
            for source, target, size in zip(
                *(each.tolist() for each in adjoining(sources, targets, nbytes)), strict=True
            ):
                ctypes.memmove(target, source, size)


def _on_gpu(sources: Addresses, targets: Addresses, nbytes: int, where: torch.device, stream: Any) -> None:
    stream = torch.cuda.current_stream(where) if stream is None else stream
    joined = adjoining(sources, targets, nbytes)
    if not len(sources):
        return
    unaligned = nbytes % 16 or bool(((sources | targets) % 16).any())
    if unaligned or joined[2].mean() >= COPY_ENGINE_BYTES:
        cuda = device.runtime()
        device.use(where.index or 0)
        for source, target, size in zip(*(each.tolist() for each in joined), strict=True):
            cuda.memcpyAsync(target, source, size, cuda.memcpyDefault, stream.cuda_stream)
        return
    from kvtier_kernels.copy import copy_pieces

    with _LAUNCHING, torch.cuda.stream(stream):
        both = torch.from_numpy(np.stack((sources, targets))).pin_memory().to(where, non_blocking=True)
        copy_pieces(both[0], both[1], nbytes, programs=PROGRAMS)


def _pieces(layer: str, tensor: torch.Tensor, blocks: int) -> tuple[list[Piece], str]:
    """The pieces of one tensor, and what their bytes are."""
    at = next((n for n, size in enumerate(tensor.shape) if size and size % blocks == 0), -1)
    if at < 0:
        raise LayoutError(f"{layer}: a KV cache of shape {tuple(tensor.shape)} has no axis of {blocks} blocks")
    width = tensor.element_size()
    ratio = tensor.shape[at] // blocks
    stride = tensor.stride(at) * width * ratio
    inner = [(ratio, tensor.stride(at) * width)]
    inner += [(size, tensor.stride(n) * width) for n, size in enumerate(tensor.shape) if n != at]
    inner = [(size, step) for size, step in inner if size > 1]
    run, outer = width, sorted(inner, key=lambda axis: axis[1])
    while outer and outer[0][1] == run:
        run *= outer.pop(0)[0]
    offsets = [0]
    for size, step in (axis for axis in inner if axis in outer):
        if step < run:
            raise LayoutError(f"{layer}: strides {tensor.stride()} of shape {tuple(tensor.shape)} make bytes overlap")
        offsets = [offset + k * step for offset in offsets for k in range(size)]
    if stride < run and blocks > 1:
        raise LayoutError(f"{layer}: blocks of {run} bytes stand {stride} apart")
    order = [size for size, _ in sorted(inner, key=lambda axis: -axis[1])]
    logical = [size for n, size in enumerate(tensor.shape) if n != at]
    ranks = sorted(range(len(inner)), key=lambda n: -inner[n][1])
    form = f"{str(tensor.dtype).removeprefix('torch.')} {logical} stored {order} by {ranks} in {len(offsets)}"
    return [Piece(tensor.data_ptr() + offset, stride, run) for offset in offsets], form


def _joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """With those that adjoin in every block made one, as in a cache whose blocks hold all layers."""
    joined = [pieces[0]]
    for piece in pieces[1:]:
        last = joined[-1]
        if piece.stride == last.stride and piece.base == last.base + last.nbytes:
            joined[-1] = Piece(last.base, last.stride, last.nbytes + piece.nbytes)
        else:
            joined.append(piece)
    return tuple(joined)


def _folded(described: Sequence[str]) -> str:
    """One text of all layers' forms, with runs of equal ones counted."""
    runs: list[tuple[str, int]] = []
    for form in described:
        if runs and runs[-1][0] == form:
            runs[-1] = (form, runs[-1][1] + 1)
        else:
            runs.append((form, 1))
    return "; ".join(f"{count} x ({form})" for form, count in runs)
