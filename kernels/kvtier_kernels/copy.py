"""Copy: thousands of small pieces in one launch, between any memories that the GPU can address.

`copy_pieces` moves runs of bytes by address. `gather_units` and `scatter_units` move KV between an engine's own paged
cache and units, through whatever layout the engine has: per-layer tensors or one for all layers, K and V together or
apart, heads before or after tokens, blocks that hold units or units that hold blocks. Pieces of 4 to 64 KiB are what
single copies by DMA are slow at; larger contiguous ones are better left to the copy engines.

Over the host link a few programs reach its limit, and the rest of the GPU stays free: pass `programs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvtier.errors import InvalidRequest, LayoutError
from kvtier.layout import AttentionLayout, LatentLayout
from kvtier_kernels import checks, codec, tuning
from kvtier_kernels.addressing import TORCH_DTYPES
from kvtier_kernels.quantise import codec_of
from kvtier_kernels.tiles import ADDRESS_BITS
from kvtier_kernels.widening import FLOAT, INT8, widen


@triton.jit(do_not_specialize=["pieces"], do_not_specialize_on_alignment=["SOURCES", "TARGETS"])
def pieces_kernel(SOURCES, TARGETS, pieces, words, CHUNK: tl.constexpr):
    """Copy `pieces` runs of `words` 4-byte words; a step of the loop is one chunk of one piece."""
    lane = tl.arange(0, CHUNK)
    chunks = tl.cdiv(words, CHUNK)
    total = pieces.to(tl.int64) * chunks
    for step in range(tl.program_id(0).to(tl.int64), total, tl.num_programs(0)):
        piece = step // chunks
        at = (step % chunks) * CHUNK + lane
        source = tl.multiple_of((tl.load(SOURCES + piece) & ADDRESS_BITS).to(tl.pointer_type(tl.int32)), 16)
        target = tl.multiple_of((tl.load(TARGETS + piece) & ADDRESS_BITS).to(tl.pointer_type(tl.int32)), 16)
        tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)


@triton.jit(do_not_specialize=["units", "layers"], do_not_specialize_on_alignment=["UNITS", "SLOTS"])
def blocks_kernel(
    UNITS, SLOTS, PLANES, SCALES, units, layers, s_block, s_token, s_head,
    KV: tl.constexpr, HK: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, U: tl.constexpr, BLOCK: tl.constexpr,
    RUN: tl.constexpr, INTO: tl.constexpr, KIND: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """Move tiles, one (unit, layer, K or V, head) a step. Strides are in elements, of which a row has ROW."""
    token = tl.arange(0, U)
    i = tl.arange(0, WIDTH)
    cells = layers.to(tl.int64) * (KV * HK)
    for step in range(tl.program_id(0).to(tl.int64), units * cells, tl.num_programs(0)):
        unit = step // cells
        cell = step % cells
        base = tl.load(UNITS + unit) & ADDRESS_BITS
        slot = tl.load(SLOTS + unit * (U // RUN) + token // RUN)
        live = slot >= 0
        slot += token % RUN
        plane = tl.multiple_of(tl.load(PLANES + cell // HK).to(tl.pointer_type(ELEMENT)), 16)
        theirs = plane + (slot // BLOCK) * s_block + (slot % BLOCK) * s_token + (cell % HK) * s_head
        ours = tl.multiple_of(
            (base + cell * (U * ROW * (ELEMENT.primitive_bitwidth // 8))).to(tl.pointer_type(ELEMENT)), 16
        )
        mask = live[:, None] & (i < ROW)[None, :]
        their_rows = theirs[:, None] + i[None, :]
        our_rows = (ours + token * ROW)[:, None] + i[None, :]
        if KIND != FLOAT:
            kept = (base + layers.to(tl.int64) * (KV * HK * U * ROW) + cell * 4).to(tl.pointer_type(tl.float32))
            scale = tl.load(SCALES + cell)
        if INTO:
            tl.store(our_rows, tl.load(their_rows, mask=mask), mask=mask)
            if KIND != FLOAT:
                tl.store(kept, scale)
        elif KIND == FLOAT:
            tl.store(their_rows, tl.load(our_rows, mask=mask), mask=mask)
        else:
            # The engine has one scale a head for all its blocks: codes of a unit are re-coded from the unit's to it.
            top = codec.largest(KIND)
            y = codec.ratio(
                widen(tl.load(our_rows, mask=mask, other=0), KIND, tl.float32, False) * tl.load(kept), scale
            )
            y = tl.minimum(tl.maximum(y, -top), top)
            if KIND == INT8:
                tl.store(their_rows, codec.round_even(y).to(tl.int8), mask=mask)
            else:
                tl.store(their_rows, codec.float8_bits(y), mask=mask)


class EngineCache(NamedTuple):
    """An engine's paged cache: where its planes start, and its strides in bytes. Made by `engine_cache`.

    planes: int64 `[layers, 2]` (K, V), or `[layers]` for latents, on the device. `tensors` keeps the memory alive.
    """

    planes: torch.Tensor
    block: int
    token: int
    head: int
    block_tokens: int
    blocks: int
    kv_heads: int
    row_bytes: int
    dtype: torch.dtype
    tensors: tuple[torch.Tensor, ...]


def engine_cache(tensors: torch.Tensor | Sequence[Any], axes: str) -> EngineCache:
    """Describe an engine's cache by its tensors and the names of their axes, in order, separated by spaces.

    Axes are `block`, `token`, `dim`, and where there are such `layer`, `kv` (K then V) and `head`. With a `layer` axis
    `tensors` is one tensor, else one a layer; without `kv` but with `head`, a pair (K, V) in its place. Examples:
    "kv block token head dim" (vLLM, FlashAttention), "block kv head token dim" (FlashInfer, HND), "block layer kv
    token head dim" (all layers in one), "block token dim" (latents). A cache without blocks has `block` of one token.

    Raises InvalidRequest for tensors that differ in shape, strides, dtype or device, or whose last dim is not
    contiguous. 64-bit throughout: an offset may pass 2**31 elements.
    """
    names = axes.split()
    if sorted(set(names) - {"layer", "kv", "head"}) != ["block", "dim", "token"] or len(set(names)) != len(names):
        raise InvalidRequest(f"axes {axes!r}: want block, token, dim, and of layer, kv, head those that there are")
    flat: list[torch.Tensor] = []
    for one in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
        flat.extend([one] if isinstance(one, torch.Tensor) else one)
    apart = "head" in names and "kv" not in names
    first = flat[0]
    for x in flat:
        if (x.shape, x.stride(), x.dtype, x.device) != (first.shape, first.stride(), first.dtype, first.device):
            raise InvalidRequest(f"tensors differ: {tuple(x.shape)} {x.dtype}, {tuple(first.shape)} {first.dtype}")
    if first.dim() != len(names) or first.stride(names.index("dim")) != 1:
        raise InvalidRequest(f"a tensor of shape {tuple(first.shape)}, strides {first.stride()} has no axes {axes!r}")
    if "layer" in names and len(flat) != (2 if apart else 1):
        raise InvalidRequest(f"{len(flat)} tensors with a layer axis: want one, or K and V")
    size = dict(zip(names, first.shape, strict=True))
    stride = {name: first.stride(k) * first.element_size() for k, name in enumerate(names)}
    inner = [k * stride["kv"] for k in range(2)] if "kv" in names else [0]
    if size.get("kv", 2) != 2:
        raise InvalidRequest(f"the kv axis has size {size['kv']}: want K and V")
    if "layer" in names:
        planes = [[x.data_ptr() + n * stride["layer"] + k for x in flat for k in inner] for n in range(size["layer"])]
    elif apart:
        planes = [[k.data_ptr(), v.data_ptr()] for k, v in zip(flat[::2], flat[1::2], strict=True)]
    else:
        planes = [[x.data_ptr() + k for k in inner] for x in flat]
    if any(address % 16 for layer in planes for address in layer):
        raise InvalidRequest("a plane of the cache does not start at a multiple of 16 bytes")
    return EngineCache(
        torch.tensor(planes, dtype=torch.int64, device=first.device), stride["block"], stride["token"],
        stride.get("head", 0), size["token"], size["block"], size.get("head", 1), size["dim"] * first.element_size(),
        first.dtype, tuple(flat),
    )  # fmt: skip


def unit_slots(blocks: Sequence[int], units: int, unit_tokens: int, block_tokens: int) -> list[list[int]]:
    """Slots for `units` whole units of a sequence whose blocks in the engine's cache are `blocks`.

    A slot is block * block_tokens + offset, the place of a token. One a unit where a block holds whole units, one a
    block where a unit holds whole blocks. Raises InvalidRequest where neither holds, or blocks are too few.
    """
    run = _run(unit_tokens, block_tokens)
    if units * unit_tokens > len(blocks) * block_tokens:
        raise InvalidRequest(f"{len(blocks)} blocks of {block_tokens} tokens hold no {units} units of {unit_tokens}")
    firsts = [range(u * unit_tokens, (u + 1) * unit_tokens, run) for u in range(units)]
    return [[blocks[t // block_tokens] * block_tokens + t % block_tokens for t in first] for first in firsts]


def gather_units(
    cache: EngineCache,
    slots: torch.Tensor,
    units: torch.Tensor,
    layout: AttentionLayout | LatentLayout,
    *,
    scales: torch.Tensor | None = None,
    programs: int | None = None,
) -> None:
    """Fill `units` (int64 `[n]`, addresses or entries) from the engine's cache, all layers in one launch.

    slots: int64 `[n, runs]` as `unit_slots` makes them; where a slot is negative its tokens are left as they are.
    scales: float32 `[layers, 2, kv_heads]`, the engine's, which a float8 or int8 cache needs; they become each unit's.
    Raises InvalidRequest or LayoutError before the launch. Slots are not compared with the cache's blocks.
    """
    _move(cache, slots, units, layout, scales, programs, into=True)


def scatter_units(
    cache: EngineCache,
    slots: torch.Tensor,
    units: torch.Tensor,
    layout: AttentionLayout | LatentLayout,
    *,
    scales: torch.Tensor | None = None,
    programs: int | None = None,
) -> None:
    """Fill the engine's cache at `slots` from `units`: the way back from `gather_units`, with the same arguments.

    Codes of float8 and int8 units are re-coded to the engine's scales, which leaves them as they are where a unit's
    scale is the engine's.
    """
    _move(cache, slots, units, layout, scales, programs, into=False)


def copy_pieces(sources: torch.Tensor, targets: torch.Tensor, nbytes: int, *, programs: int | None = None) -> None:
    """Copy `nbytes` bytes from each of `sources` to the target in its place; both int64 addresses `[pieces]`.

    nbytes and addresses are multiples of 16. Pieces must not overlap. `programs`: how many share the work; by default
    enough for HBM, and 16 reach the limit of a host link. Raises InvalidRequest before the launch.
    """
    for name, x in (("sources", sources), ("targets", targets)):
        if x.dtype != torch.int64 or x.shape != (len(sources),) or not x.is_contiguous():
            raise InvalidRequest(f"{name} are {x.dtype} {tuple(x.shape)}: want contiguous int64 [{len(sources)}]")
    checks.same_device(sources, targets=targets)
    if nbytes < 16 or nbytes % 16:
        raise InvalidRequest(f"pieces of {nbytes} bytes: want a multiple of 16")
    if len(sources):
        chunk = min(CHUNK, triton.next_power_of_2(nbytes // 4))
        pieces_kernel[(programs or _programs(sources.device),)](
            sources, targets, len(sources), nbytes // 4, CHUNK=chunk, num_warps=max(1, min(8, chunk // 256))
        )


CHUNK = 4096
"""Words of a step of `copy_pieces`: 16 KiB, four 16-byte loads a thread in flight."""


def _move(
    cache: EngineCache,
    slots: torch.Tensor,
    units: torch.Tensor,
    layout: AttentionLayout | LatentLayout,
    scales: torch.Tensor | None,
    programs: int | None,
    *,
    into: bool,
) -> None:
    form = shape(layout, cache.block_tokens)
    kv, heads = form["KV"], form["HK"]
    if cache.dtype != TORCH_DTYPES[layout.dtype]:
        raise LayoutError(
            f"the cache holds {cache.dtype}, units {layout.dtype}: `quantise` converts between precisions"
        )
    if (cache.planes.numel(), cache.kv_heads, cache.row_bytes) != (layout.layers * kv, heads, layout.row_bytes):
        raise LayoutError(
            f"the cache has {cache.planes.numel()} planes of {cache.kv_heads} heads of {cache.row_bytes} bytes, units "
            f"{layout.layers * kv} of {heads} of {layout.row_bytes}"
        )
    runs = layout.unit_tokens // form["RUN"]
    if units.dtype != torch.int64 or units.dim() != 1 or not units.is_contiguous():
        raise InvalidRequest(f"units are {units.dtype} {tuple(units.shape)}: want contiguous int64 [n]")
    if slots.dtype != torch.int64 or slots.shape != (len(units), runs) or not slots.is_contiguous():
        raise InvalidRequest(
            f"slots are {slots.dtype} {tuple(slots.shape)}: want contiguous int64 [{len(units)}, {runs}]"
        )
    checks.same_device(units, slots=slots, planes=cache.planes, scales=scales)
    if (scales is not None) != (form["KIND"] != FLOAT.value):
        raise InvalidRequest(f"scales go with a float8 or int8 cache, and only there: this one holds {layout.dtype}")
    if scales is not None and (scales.dtype != torch.float32 or scales.shape != (layout.layers, 2, heads)):
        raise InvalidRequest(
            f"scales are {scales.dtype} {tuple(scales.shape)}: want float32 {(layout.layers, 2, heads)}"
        )
    size = form["ELEMENT"].primitive_bitwidth // 8
    if any(step % size for step in (cache.block, cache.token, cache.head)):
        raise InvalidRequest(f"strides {cache.block, cache.token, cache.head} bytes are not multiples of {size}")
    if len(units):
        blocks_kernel[(programs or _programs(units.device),)](
            units, slots, cache.planes, scales, len(units), layout.layers, cache.block // size, cache.token // size,
            cache.head // size, **form, INTO=into, num_warps=4,
        )  # fmt: skip


def shape(layout: AttentionLayout | LatentLayout, block_tokens: int) -> dict[str, Any]:
    """The constants that a variant of `blocks_kernel` is compiled for."""
    if layout.dtype == "int4":
        raise LayoutError("no engine keeps int4 as units do: convert after the copy")
    attention = isinstance(layout, AttentionLayout)
    kind = codec_of(layout) if attention else tuning.Stored(FLOAT.value, None, False)  # type: ignore[arg-type]
    # Without scales to mind, rows are just bytes: four at a time.
    element = tl.int32 if kind.kind == FLOAT.value else kind.element
    row = layout.row_bytes // (element.primitive_bitwidth // 8)
    return {
        "KV": 2 if attention else 1,
        "HK": layout.kv_heads if isinstance(layout, AttentionLayout) else 1,
        "ROW": row,
        "WIDTH": triton.next_power_of_2(row),
        "U": layout.unit_tokens,
        "BLOCK": block_tokens,
        "RUN": _run(layout.unit_tokens, block_tokens),
        "KIND": kind.kind,
        "ELEMENT": element,
    }


def _run(unit_tokens: int, block_tokens: int) -> int:
    run = min(unit_tokens, block_tokens)
    if unit_tokens % run or block_tokens % run:
        raise InvalidRequest(f"blocks of {block_tokens} tokens and units of {unit_tokens}: neither divides the other")
    return run


def _programs(device: torch.device) -> int:
    return 4 if tuning.interpreting() else 8 * tuning.multiprocessors(device)
