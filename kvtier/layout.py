"""What the bytes of a unit are: the KV of `unit_tokens` tokens, for all layers of one model shard.

A *unit* is the smallest page and the only thing a kernel ever sees; a page of order k is 2**k consecutive units in one
frame. All layers of a unit are contiguous, so one copy moves a page whole whatever the number of layers; heads stand
before tokens, so that one head's tile is contiguous for a kernel. The stride of a unit is padded to 4 KiB, so that any
frame can be read and written with O_DIRECT.

Not here: which tokens a page holds (`kvtier.schedule`), what names it (`kvtier.keys`), how kernels read it
(`kvtier_kernels`).
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from kvtier.errors import LayoutError

ALIGNMENT = 4096
"""Bytes. The largest logical block size of the disks in use, so the one alignment that O_DIRECT always accepts."""

FORMAT = 2
"""Raised whenever the same fields would mean other bytes; part of every fingerprint."""

DType = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "int4"]

_BITS: dict[str, int] = {"float32": 32, "float16": 16, "bfloat16": 16, "float8_e4m3fn": 8, "int8": 8, "int4": 4}
_PROBE_BYTES = 8
_HEAD_SCALE_BYTES = 4  # float32, one a head: too few to count
_GROUP_SCALE_BYTES = 2  # bfloat16, one a channel or token: float32 would be a third of an int4 unit of 16 tokens


class _Unit(msgspec.Struct, frozen=True):
    """What follows alike from every layout's `unit_bytes` and `unit_tokens`."""

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit that mean something."""
        raise NotImplementedError

    @property
    def unit_tokens(self) -> int:
        """Tokens that a unit holds."""
        raise NotImplementedError

    @property
    def unit_stride(self) -> int:
        """Bytes from one unit of a page to the next: `unit_bytes` padded to 4 KiB."""
        return -(-self.unit_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def token_bytes(self) -> float:
        """Bytes of memory a token takes, padding included."""
        return self.unit_stride / self.unit_tokens

    def fingerprint(self) -> bytes:
        """16 bytes, equal exactly where the bytes of a unit mean the same."""
        packed = msgspec.msgpack.encode((FORMAT, self))
        return hashlib.blake2b(packed, digest_size=16, person=b"kvtier-layout").digest()


class AttentionLayout(_Unit, frozen=True, forbid_unknown_fields=True, tag="attention"):
    """KV of multi-head, grouped-query or multi-query attention.

    A unit is `[layer, 2 (K, V), kv_head, unit_tokens, head_dim]` of `dtype`. The quantised types are followed by their
    scales; a stored value times its scale is the value. float8 and int8 keep one float32 a head, `[layer, 2, kv_head]`.
    int4 keeps K's per channel and V's per token (the grouping of KIVI, Liu et al. 2024, but symmetric), bfloat16
    `[layer, kv_head, head_dim + unit_tokens]`; byte i of a row holds dim i in its low half and dim i + head_dim / 2 in
    its high half, each as value + 8.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: DType = "bfloat16"
    unit_tokens: int = 16

    def __post_init__(self) -> None:
        _check(self, layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim)
        if self.dtype == "int4" and self.head_dim % 2:
            raise LayoutError(f"head_dim {self.head_dim} is odd: int4 packs two values of a head in a byte; use int8")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Of a unit, in elements."""
        return (self.layers, 2, self.kv_heads, self.unit_tokens, self.head_dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of one head of K or V in one layer."""
        return self.head_dim * _BITS[self.dtype] // 8

    @property
    def payload_bytes(self) -> int:
        """Bytes of a unit's values; its scales, if any, follow."""
        return self.layers * 2 * self.kv_heads * self.unit_tokens * self.row_bytes

    @property
    def scales_bytes(self) -> int:
        """Bytes of a unit's scales, 0 for a dtype that needs none."""
        heads = self.layers * self.kv_heads
        match self.dtype:
            case "float8_e4m3fn" | "int8":
                return heads * 2 * _HEAD_SCALE_BYTES
            case "int4":
                return heads * (self.head_dim + self.unit_tokens) * _GROUP_SCALE_BYTES
            case _:
                return 0

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit that mean something."""
        return self.payload_bytes + self.scales_bytes

    def offset(self, layer: int, kv: int, head: int, token: int) -> int:
        """Byte at which the row of (layer, K=0 or V=1, kv head, token of the unit) starts."""
        row = ((layer * 2 + kv) * self.kv_heads + head) * self.unit_tokens + token
        return row * self.row_bytes

    def scale_offset(self, layer: int, kv: int, head: int) -> int:
        """Byte at which the scales of (layer, K=0 or V=1, kv head) start: one, or for int4 one a channel or a token."""
        match self.dtype:
            case "float8_e4m3fn" | "int8":
                return self.payload_bytes + ((layer * 2 + kv) * self.kv_heads + head) * _HEAD_SCALE_BYTES
            case "int4":
                group = (layer * self.kv_heads + head) * (self.head_dim + self.unit_tokens) + kv * self.head_dim
                return self.payload_bytes + group * _GROUP_SCALE_BYTES
            case _:
                raise LayoutError(f"dtype {self.dtype} keeps no scales")

    def probes(self) -> list[int]:
        """Offsets that any misreading of this layout would get wrong: the ends of every axis."""
        last = (self.layers - 1, 1, self.kv_heads - 1, self.unit_tokens - 1)
        corners = [tuple(last[i] if i == axis else 0 for i in range(4)) for axis in range(4)]
        return sorted({self.offset(*corner) for corner in (*corners, last)})


class LatentLayout(_Unit, frozen=True, forbid_unknown_fields=True, tag="latent"):
    """KV of multi-head latent attention (DeepSeek-V2 and V3): one latent row and one rope row a token, no heads.

    A unit is `[layer, unit_tokens, latent + rope]` of `dtype`, the rope part after the latent part of the same token.
    """

    layers: int
    latent: int = 512
    rope: int = 64
    dtype: DType = "bfloat16"
    unit_tokens: int = 16

    def __post_init__(self) -> None:
        _check(self, layers=self.layers, latent=self.latent, rope=self.rope)
        if _BITS[self.dtype] < 16:
            raise LayoutError(f"dtype {self.dtype} is not offered for latent layouts; use bfloat16 or float16")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a unit, in elements."""
        return (self.layers, self.unit_tokens, self.latent + self.rope)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return (self.latent + self.rope) * _BITS[self.dtype] // 8

    @property
    def payload_bytes(self) -> int:
        return self.layers * self.unit_tokens * self.row_bytes

    @property
    def scales_bytes(self) -> int:
        return 0

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit that mean something."""
        return self.payload_bytes

    def offset(self, layer: int, token: int) -> int:
        """Byte at which the row of (layer, token of the unit) starts."""
        return (layer * self.unit_tokens + token) * self.row_bytes

    def probes(self) -> list[int]:
        """Offsets that any misreading of this layout would get wrong: the ends of every axis."""
        last = (self.layers - 1, self.unit_tokens - 1)
        return sorted({self.offset(last[0], 0), self.offset(0, last[1]), self.offset(*last), 0})


class EngineLayout(_Unit, frozen=True, forbid_unknown_fields=True, tag="engine"):
    """KV as an engine arranges its own blocks: bytes that kvtier keeps and only that engine reads.

    A unit is one block of `unit_tokens` tokens, `unit_bytes` of it. `arrangement` says what those bytes are (engine,
    order of the axes, dtype, shape): two that differ in it share nothing, whatever their sizes.
    """

    unit_bytes: int
    arrangement: str
    unit_tokens: int = 16

    def __post_init__(self) -> None:
        if self.unit_bytes < _PROBE_BYTES or self.unit_tokens < 1:
            raise LayoutError(
                f"a unit of {self.unit_bytes} bytes for {self.unit_tokens} tokens: at least {_PROBE_BYTES} and 1"
            )
        if not self.arrangement:
            raise LayoutError("arrangement is empty: name the engine, the order of the axes, the dtype and the shape")

    @property
    def dtype(self) -> Literal["uint8"]:
        """Bytes, whatever the engine keeps in them."""
        return "uint8"

    @property
    def shape(self) -> tuple[int]:
        """Of a unit, in bytes."""
        return (self.unit_bytes,)

    @property
    def row_bytes(self) -> int:
        """Bytes that are in one piece: all of the unit."""
        return self.unit_bytes

    @property
    def payload_bytes(self) -> int:
        return self.unit_bytes

    def probes(self) -> list[int]:
        """Offsets of the unit's first and last bytes."""
        return sorted({0, self.unit_bytes - _PROBE_BYTES})


Layout = AttentionLayout | LatentLayout | EngineLayout


def probe_value(nonce: bytes, number: int) -> bytes:
    """What is to stand at probe `number` of a layout."""
    return hashlib.blake2b(nonce + bytes([number]), digest_size=_PROBE_BYTES).digest()


def _check(layout: AttentionLayout | LatentLayout, **positive: int) -> None:
    for name, value in positive.items():
        if value < 1:
            raise LayoutError(f"{name} is {value}: it must be at least 1")
    if layout.unit_tokens not in (16, 64):
        raise LayoutError(f"unit_tokens is {layout.unit_tokens}: kernels are compiled for 16 and 64")
    if layout.dtype not in _BITS:
        raise LayoutError(f"dtype {layout.dtype!r} is not one of {', '.join(_BITS)}")
