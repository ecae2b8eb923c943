"""What a launch is refused for: everything a kernel would answer with wrong numbers or a fault.

All of it is decided from shapes, dtypes and layouts, without waiting for a device, but for `bounds`, which reads
lengths and tables on the host and runs when asked to, or when they are there already.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from kvtier.errors import InvalidRequest, LayoutError
from kvtier.layout import AttentionLayout, LatentLayout, Layout
from kvtier_kernels.addressing import check_entries

HEAD_DIMS = (64, 80, 96, 128, 256)
QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_GROUP = 128
"""Query heads a kv head. Above it a tile of one query token would not fit a prefill program."""


def layouts(all_layouts: Sequence[AttentionLayout], layer: int) -> None:
    """Layouts that kernels are written for, and a layer that they have."""
    layout = all_layouts[0]
    if layout.head_dim not in HEAD_DIMS:
        raise LayoutError(f"head_dim {layout.head_dim}: kernels are written for {', '.join(map(str, HEAD_DIMS))}")
    within(layer, layout)


def within(layer: int, layout: AttentionLayout | LatentLayout) -> None:
    if not 0 <= layer < layout.layers:
        raise InvalidRequest(f"layer {layer} of a layout with {layout.layers} layers")


def heads(count: int, kv_heads: int) -> None:
    if count % kv_heads or count == 0:
        raise InvalidRequest(f"{count} query heads over {kv_heads} kv heads: not a whole group each")
    if count // kv_heads > MOST_GROUP:
        raise InvalidRequest(f"{count // kv_heads} query heads a kv head: at most {MOST_GROUP}")


def rows(x: torch.Tensor, name: str) -> None:
    """Query-like: a floating dtype, contiguous along its last dim."""
    if x.dtype not in QUERY_DTYPES:
        raise InvalidRequest(f"{name} is {x.dtype}: want float16, bfloat16 or float32")
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise InvalidRequest(f"{name} has strides {x.stride()}: its last dim must be contiguous")


def table(entries: torch.Tensor, lengths: torch.Tensor, batch: int, unit_tokens: int) -> None:
    if entries.dtype != torch.int64 or entries.dim() != 2 or (entries.shape[1] > 1 and entries.stride(1) != 1):
        raise InvalidRequest(
            f"table is {entries.dtype} {tuple(entries.shape)}: want int64 [batch, width], rows contiguous"
        )
    if lengths.dtype != torch.int32 or lengths.dim() != 1 or not lengths.is_contiguous():
        raise InvalidRequest(f"lengths are {lengths.dtype} {tuple(lengths.shape)}: want contiguous int32 [batch]")
    if entries.shape[0] != batch or lengths.shape[0] != batch:
        raise InvalidRequest(f"{batch} sequences, {entries.shape[0]} table rows, {lengths.shape[0]} lengths")
    if entries.shape[1] * unit_tokens >= 1 << 31:
        raise InvalidRequest(f"a table of {entries.shape[1]} units is past 2**31 tokens a sequence")


def with_a_column(entries: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A table without columns has no memory to load from: in its place, one whose column no sequence is long enough for."""
    if entries.shape[1]:
        return entries, lengths
    return entries.new_zeros(len(entries), 1), torch.zeros_like(lengths)


def bounds(
    entries: torch.Tensor, lengths: torch.Tensor, all_layouts: Sequence[Layout], check: bool | None
) -> list[int] | None:
    """Lengths against the table's width, and used entries; the lengths, or None where they were not looked at."""
    if not (check if check is not None else lengths.device.type == "cpu"):
        return None
    host = [int(length) for length in lengths.tolist()]
    unit = all_layouts[0].unit_tokens
    for sequence, length in enumerate(host):
        if length < 0 or -(-length // unit) > entries.shape[1]:
            raise InvalidRequest(
                f"sequence {sequence} has length {length}, its {entries.shape[1]} units hold {entries.shape[1] * unit} tokens"
            )
    check_entries(entries, lengths, all_layouts)
    return host


def attention(
    q: torch.Tensor,
    entries: torch.Tensor,
    lengths: torch.Tensor,
    all_layouts: Sequence[AttentionLayout],
    layer: int,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    check: bool | None,
) -> None:
    """Everything decode refuses; q is `[batch, tokens, heads, head_dim]`."""
    layout = all_layouts[0]
    if q.dim() != 4:
        raise InvalidRequest(f"q has shape {tuple(q.shape)}: want [batch, heads, dim] or [batch, tokens, heads, dim]")
    queries(q, layout, all_layouts, layer, sinks, slopes, window, softcap, scale)
    table(entries, lengths, q.shape[0], layout.unit_tokens)
    same_device(q, table=entries, lengths=lengths, sinks=sinks, slopes=slopes)
    blocks = -(-q.shape[1] * (q.shape[2] // layout.kv_heads) // 64) * layout.kv_heads
    if q.shape[0] * max(entries.shape[1], 1) * blocks * -(-layout.unit_tokens // 16) >= 1 << 31:
        raise InvalidRequest(
            f"{q.shape[0]} sequences of {entries.shape[1]} units and {blocks} head blocks are past 2**31 tiles"
        )
    bounds(entries, lengths, all_layouts, check)


def queries(
    q: torch.Tensor,
    layout: AttentionLayout,
    all_layouts: Sequence[AttentionLayout],
    layer: int,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    window: int | None,
    softcap: float | None,
    scale: float | None,
) -> None:
    """What decode and prefill refuse alike."""
    layouts(all_layouts, layer)
    rows(q, "q")
    if q.shape[-1] != layout.head_dim:
        raise InvalidRequest(f"q has head dim {q.shape[-1]}, the layout {layout.head_dim}")
    if q.dtype != torch.float32 and layout.dtype == "float32":
        raise InvalidRequest(f"q is {q.dtype} over float32 units: want float32 queries")
    heads(q.shape[-2], layout.kv_heads)
    per_head(sinks, q.shape[-2], "sinks")
    per_head(slopes, q.shape[-2], "slopes")
    if slopes is not None and slopes.dtype != torch.float32:
        raise InvalidRequest(f"slopes are {slopes.dtype}: want float32")
    if window is not None and window < 1:
        raise InvalidRequest(f"window is {window}: it counts the keys a token sees, itself included; None for all")
    if scale is not None and not scale > 0:
        raise InvalidRequest(f"scale is {scale}: it must be above 0")
    if softcap is not None and not softcap > 0:
        raise InvalidRequest(f"softcap is {softcap}: it must be above 0; None for none")


def per_head(x: torch.Tensor | None, count: int, name: str) -> None:
    if x is not None and (x.shape != (count,) or not x.dtype.is_floating_point or not x.is_contiguous()):
        raise InvalidRequest(
            f"{name} are {x.dtype} {tuple(x.shape)}: want contiguous floats [{count}], one a query head"
        )


def same_device(x: torch.Tensor, **others: torch.Tensor | None) -> None:
    for name, other in others.items():
        if other is not None and other.device != x.device:
            raise InvalidRequest(f"{name} is on {other.device}, the rest on {x.device}")


def output(
    given: torch.Tensor | None, like: torch.Tensor, dtype: torch.dtype, name: str, contiguous: bool = False
) -> torch.Tensor:
    """A tensor to write, shaped as `like`: `given` once it is known to fit, or a new one."""
    if given is None:
        return torch.empty(like.shape, dtype=dtype, device=like.device)
    if given.shape != like.shape or given.dtype != dtype or given.device != like.device:
        raise InvalidRequest(
            f"{name} is {given.dtype} {tuple(given.shape)} on {given.device}: want {dtype} {tuple(like.shape)} on {like.device}"
        )
    if (given.dim() and given.shape[-1] > 1 and given.stride(-1) != 1) or (contiguous and not given.is_contiguous()):
        raise InvalidRequest(
            f"{name} has strides {given.stride()}: " + ("want contiguous" if contiguous else "rows must be")
        )
    return given


def ragged(
    cu: torch.Tensor, batch: int, total: int, most: int, lengths: torch.Tensor, host_lengths: list[int] | None
) -> None:
    """Row offsets of a ragged batch; the values themselves only where lengths were looked at too."""
    if cu.dtype != torch.int32 or cu.shape != (batch + 1,) or not cu.is_contiguous():
        raise InvalidRequest(f"cu_q is {cu.dtype} {tuple(cu.shape)}: want contiguous int32 [{batch + 1}]")
    if most < 0 or batch > 65535:
        raise InvalidRequest(f"most_queries {most}, {batch} sequences: want at least 0, and at most 65,535")
    if host_lengths is None:
        return
    offsets = [int(offset) for offset in cu.tolist()]
    counts = [b - a for a, b in itertools.pairwise(offsets)]
    if offsets[0] != 0 or offsets[-1] != total or min(counts, default=0) < 0:
        raise InvalidRequest(f"cu_q {offsets[:8]}... does not ascend from 0 to {total} rows")
    for sequence, (count, length) in enumerate(zip(counts, host_lengths, strict=True)):
        if count > most:
            raise InvalidRequest(f"sequence {sequence} has {count} rows, most_queries is {most}")
        if count > length:
            raise InvalidRequest(f"sequence {sequence} has {count} rows and a context, they included, of {length}")
