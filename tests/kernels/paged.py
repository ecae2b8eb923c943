"""Paged caches for kernel tests: units in an arena that is poisoned wherever no token was written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from kvtier.layout import ALIGNMENT, AttentionLayout, LatentLayout
from kvtier_kernels import reference
from kvtier_kernels.addressing import TORCH_DTYPES, entries

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POISON = 0xFF  # NaN in every float type, -1 in int8, 15 in int4


@dataclass
class Arena:
    """`count` unit frames at multiples of 4 KiB, all bytes POISON; frames are handed out in a scattered order."""

    stride: int
    count: int
    device: torch.device = DEVICE
    memory: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.memory = torch.full((self.stride * self.count + ALIGNMENT,), POISON, dtype=torch.uint8, device=self.device)
        if self.device.type == "cpu" and torch.cuda.is_available():
            self.memory = self.memory.pin_memory()
        self.start = -self.memory.data_ptr() % ALIGNMENT
        step = next(s for s in (7, 5, 3, 11, 13, 1) if self.count % s or s == 1)
        self.order = [i * step % self.count for i in range(self.count)]
        self.taken = 0

    def take(self) -> tuple[int, torch.Tensor]:
        """The address of a free frame, and its bytes."""
        at = self.start + self.order[self.taken] * self.stride
        self.taken += 1
        return self.memory.data_ptr() + at, self.memory[at : at + self.stride]


@dataclass
class Paged:
    """Sequences of random K and V, stored in units."""

    layouts: tuple[AttentionLayout, ...]
    table: torch.Tensor
    lengths: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    arenas: list[Arena]


def paged(
    layout: AttentionLayout,
    lengths: list[int],
    *,
    precisions: tuple[Any, ...] = (),
    spare: int = 1,
    seed: int = 0,
    spread: float = 1.0,
    arena_device: torch.device = DEVICE,
) -> Paged:
    """Units for sequences of `lengths` tokens; unit i of a sequence is stored in precision i modulo their count.

    Slots past a length stay poisoned (in quantised units the codes do; scales cover the written tokens). `spare`
    entries a row follow the used ones and point nowhere.
    """
    torch.manual_seed(seed)
    names = precisions or (layout.dtype,)
    layouts = tuple(msgspec.structs.replace(layout, dtype=name) for name in names)
    unit = layout.unit_tokens
    counts = [-(-length // unit) for length in lengths]
    arena = Arena(max(one.unit_stride for one in layouts), sum(counts) + 1, arena_device)
    width = max([*counts, 0]) + spare
    table = torch.full((len(lengths), max(width, 1)), 8, dtype=torch.int64)
    keys, values = [], []
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        shape = (layout.layers, layout.kv_heads, count * unit, layout.head_dim)
        k, v = torch.randn(shape) * spread, torch.randn(shape) * spread
        k[:, :, length:], v[:, :, length:] = 0, 0
        for u in range(count):
            one = layouts[u % len(layouts)]
            address, frame = arena.take()
            part = slice(u * unit, (u + 1) * unit)
            raw = reference.pack(k[:, :, part], v[:, :, part], one)
            poison_tail(raw, one, min(length - u * unit, unit))
            frame[: raw.numel()] = raw.to(frame.device)
            table[b, u] = int(entries(torch.tensor(address), one.dtype))
        keys.append(k)
        values.append(v)
    counted = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return Paged(layouts, table.to(DEVICE), counted, keys, values, [arena])


def poison_tail(raw: torch.Tensor, layout: AttentionLayout, tokens: int) -> None:
    """Poison the codes of slots `tokens` and later of a unit, and int4's scales of them."""
    payload = raw[: layout.payload_bytes].view(-1, layout.unit_tokens, layout.row_bytes)
    payload[:, tokens:] = POISON
    raw[layout.unit_bytes :] = POISON
    if layout.dtype == "int4":
        groups = raw[layout.payload_bytes : layout.unit_bytes].view(-1, (layout.head_dim + layout.unit_tokens) * 2)
        groups[:, (layout.head_dim + tokens) * 2 :] = POISON


def latent_paged(
    layout: LatentLayout, lengths: list[int], *, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, Arena]:
    """Table, lengths and arena of random latent units, unused slots NaN."""
    torch.manual_seed(seed)
    unit, counts = layout.unit_tokens, [-(-length // layout.unit_tokens) for length in lengths]
    arena = Arena(layout.unit_stride, sum(counts) + 1)
    table = torch.full((len(lengths), max(counts) + 1), 8, dtype=torch.int64)
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for u in range(count):
            address, frame = arena.take()
            rows = torch.randn(layout.shape, device=frame.device).to(TORCH_DTYPES[layout.dtype])
            rows[:, max(0, length - u * unit) :] = float("nan")
            frame[: layout.payload_bytes] = rows.view(torch.uint8).reshape(-1)
            table[b, u] = address
    return table.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE), arena


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """Every element was written, and the relative norm of the error is under `tolerance`."""
    got, want = got.double().cpu(), want.double().cpu()
    assert got.shape == want.shape
    assert not got.isnan().any(), f"{int(got.isnan().sum())} of {got.numel()} elements are NaN"
    assert torch.equal(got.isinf(), want.isinf())
    got, want = torch.where(got.isinf(), 0.0, got), torch.where(want.isinf(), 0.0, want)
    error = float((got - want).norm() / want.norm().clamp_min(1e-3))
    assert error < tolerance, f"relative error {error:.2e}, allowed {tolerance:.0e}"


def tolerance(dtype: torch.dtype) -> float:
    """Of an output in `dtype`, for float64 results: what its rounding, and one more of P, leave."""
    return {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


def poisoned(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
