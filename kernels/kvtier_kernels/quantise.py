"""Quantise and dequantise: units from one stored precision to another, for demotion and promotion.

One launch converts any number of units, all layers of each. Any of the precisions may stand on either side; a unit's
scales are fitted to its own values. Symmetric codes: float8 and int8 with a scale a head, int4 with KIVI's grouping
(Liu et al. 2024), a scale a channel for K and a token for V. `kvtier.layout` says where the bytes are.
"""

from __future__ import annotations

import msgspec
import torch
import triton
import triton.language as tl

from kvtier.errors import InvalidRequest, LayoutError
from kvtier.layout import AttentionLayout
from kvtier_kernels import checks, codec, tuning
from kvtier_kernels.widening import FLOAT


@triton.jit
def convert_tile(
    source, target, live, layer, layers, KV: tl.constexpr, head,
    HK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, U: tl.constexpr, KIND: tl.constexpr, STORED: tl.constexpr,
    BYTES: tl.constexpr, TO_KIND: tl.constexpr, TO_STORED: tl.constexpr, TO_BYTES: tl.constexpr,
):  # fmt: skip
    token = tl.arange(0, U)
    every = token < U
    at, scales = codec.place(source, layer, layers, KV, head, HK, D, U, KIND, BYTES)
    low, high = codec.read_codes(at, token, live, D, H, KIND, STORED)
    a, b = codec.read_scales(scales, KV, token, live, D, H, KIND)
    low *= a
    high *= b
    at, scales = codec.place(target, layer, layers, KV, head, HK, D, U, TO_KIND, TO_BYTES)
    a, b = codec.fit_scales(low, high, KV, TO_KIND)
    codec.write_codes(at, token, every, low, high, a, b, D, H, TO_KIND, TO_STORED)
    codec.write_scales(scales, KV, token, every, a, b, D, H, TO_KIND)


@triton.jit(do_not_specialize=["layers"], do_not_specialize_on_alignment=["SOURCES", "TARGETS", "TOKENS"])
def convert_kernel(
    SOURCES, TARGETS, TOKENS, layers,
    HK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, U: tl.constexpr, KIND: tl.constexpr, STORED: tl.constexpr,
    BYTES: tl.constexpr, TO_KIND: tl.constexpr, TO_STORED: tl.constexpr, TO_BYTES: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1) // HK
    head = tl.program_id(1) % HK
    source = tl.load(SOURCES + unit)
    target = tl.load(TARGETS + unit)
    live = tl.arange(0, U) < U
    if TOKENS is not None:
        live = tl.arange(0, U) < tl.load(TOKENS + unit)
    # K and V differ in what their int4 scales go along, which is decided when compiling.
    if tl.program_id(2) == 0:
        convert_tile(
            source, target, live, layer, layers, 0, head, HK, D, H, U, KIND, STORED, BYTES, TO_KIND, TO_STORED, TO_BYTES
        )
    else:
        convert_tile(
            source, target, live, layer, layers, 1, head, HK, D, H, U, KIND, STORED, BYTES, TO_KIND, TO_STORED, TO_BYTES
        )


def convert(
    sources: torch.Tensor,
    source: AttentionLayout,
    targets: torch.Tensor,
    target: AttentionLayout,
    *,
    tokens: torch.Tensor | None = None,
) -> None:
    """Write units at `targets` with the values of those at `sources`, in the precision of layout `target`.

    sources, targets: int64 `[units]`, addresses or table entries, on the device that launches. The layouts differ in
    dtype alone. tokens: int32 `[units]`, how many of a unit's tokens are written; the others become 0 whatever they
    held, and do not touch the scales. Default: all. Padding of a unit is left as it is. Sources and targets may lie
    in any memory the device can address, and must not overlap.

    Raises InvalidRequest or LayoutError before the launch.
    """
    form = shape(source, target)
    for name, units in (("sources", sources), ("targets", targets)):
        if units.dtype != torch.int64 or units.shape != (len(sources),) or not units.is_contiguous():
            raise InvalidRequest(
                f"{name} are {units.dtype} {tuple(units.shape)}: want contiguous int64 [{len(sources)}]"
            )
    if tokens is not None and (tokens.dtype != torch.int32 or tokens.shape != sources.shape):
        raise InvalidRequest(f"tokens are {tokens.dtype} {tuple(tokens.shape)}: want int32 [{len(sources)}]")
    checks.same_device(sources, targets=targets, tokens=tokens)
    cells = source.layers * source.kv_heads
    if cells > 65535:
        raise LayoutError(f"{source.layers} layers of {source.kv_heads} kv heads: at most 65,535 heads a unit")
    if len(sources):
        warps = 4 if source.unit_tokens * source.head_dim <= 8192 else 8
        convert_kernel[(len(sources), cells, 2)](sources, targets, tokens, source.layers, **form, num_warps=warps)


def quantise(
    sources: torch.Tensor,
    layout: AttentionLayout,
    targets: torch.Tensor,
    dtype: str,
    *,
    tokens: torch.Tensor | None = None,
) -> AttentionLayout:
    """`convert` units of the float `layout` to `dtype` (float8_e4m3fn, int8 or int4); returns the targets' layout."""
    narrow = msgspec.structs.replace(layout, dtype=dtype)
    if layout.scales_bytes or not narrow.scales_bytes:
        raise LayoutError(f"quantise goes from floats to float8_e4m3fn, int8 or int4, not {layout.dtype} to {dtype}")
    convert(sources, layout, targets, narrow, tokens=tokens)
    return narrow


def dequantise(
    sources: torch.Tensor,
    layout: AttentionLayout,
    targets: torch.Tensor,
    dtype: str,
    *,
    tokens: torch.Tensor | None = None,
) -> AttentionLayout:
    """`convert` units of a quantised `layout` to the float `dtype`; returns the targets' layout."""
    wide = msgspec.structs.replace(layout, dtype=dtype)
    if wide.scales_bytes or not layout.scales_bytes:
        raise LayoutError(f"dequantise goes from float8_e4m3fn, int8 or int4 to floats, not {layout.dtype} to {dtype}")
    convert(sources, layout, targets, wide, tokens=tokens)
    return wide


def shape(source: AttentionLayout, target: AttentionLayout) -> dict[str, object]:
    """The constants that a variant of the kernel is compiled for."""
    checks.layouts((source,), 0)
    same = [(x.layers, x.kv_heads, x.head_dim, x.unit_tokens) for x in (source, target)]
    if same[0] != same[1]:
        raise LayoutError(f"units of (layers, kv heads, head dim, tokens) {same[0]} do not convert to {same[1]}")
    read, written = codec_of(source), codec_of(target)
    return {
        "HK": source.kv_heads,
        "D": source.head_dim,
        "H": triton.next_power_of_2(source.head_dim // 2),
        "U": source.unit_tokens,
        "KIND": read.kind,
        "STORED": read.element,
        "BYTES": element_bytes(source),
        "TO_KIND": written.kind,
        "TO_STORED": written.element,
        "TO_BYTES": element_bytes(target),
    }


def codec_of(layout: AttentionLayout) -> tuning.Stored:
    """How the codec reads and writes a dtype: float8 as bytes, on every device."""
    return tuning.stored(layout.dtype, 0)._replace(fast=False)


def element_bytes(layout: AttentionLayout) -> int:
    return 4 if layout.dtype == "float32" else 2 if codec_of(layout).kind == FLOAT.value else 1
