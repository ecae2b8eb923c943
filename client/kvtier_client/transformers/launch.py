"""A batch over pages with the kernels: keys and values are read where they lie, by address, and copied nowhere.

Parts of one token go through `decode`, longer ones through `prefill`. A pass of decoding tokens alone can be captured in a
CUDA graph (`graphs`): then the same tensors are filled again before each replay. Not here: the plain way (`gather`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from kvtier.layout import AttentionLayout
from kvtier_client.transformers.attention import Options, Part
from kvtier_kernels.append import append
from kvtier_kernels.decode import decode
from kvtier_kernels.prefill import prefill


class LaunchBatch:
    """See `attention.Batch`. Rows of single tokens come first, `singles` of them.

    table: `[part, unit]` addresses; lengths: tokens of each part's sequence up to its last row. offsets: where each
    part's rows begin; written: where those that are to be written begin, of `new_rows` if not all are. `rows`: of the
    pass, those that belong to parts, if not all do.
    """

    def __init__(
        self,
        layout: AttentionLayout,
        table: torch.Tensor,
        lengths: torch.Tensor,
        offsets: torch.Tensor,
        written: torch.Tensor,
        *,
        singles: int,
        most: int,
        new_rows: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> None:
        self.layout = layout
        self.table = table
        self.lengths = lengths
        self.offsets = offsets
        self.written = written
        self.singles = singles
        self.most = most
        self.new_rows = new_rows
        self.rows = rows

    @classmethod
    def of(cls, layout: AttentionLayout, parts: Sequence[Part], device: torch.device) -> LaunchBatch:
        """For any parts. Waits for nothing; what it takes to the device goes in one copy."""
        parts = sorted(parts, key=lambda part: part.count > 1)
        singles = sum(part.count == 1 for part in parts)
        unit = layout.unit_tokens
        ends = [part.start + part.count for part in parts]
        width = max((-(-end // unit) for end in ends), default=1)
        table = numpy.zeros((len(parts), width), numpy.int64)
        for row, (part, end) in enumerate(zip(parts, ends, strict=True)):
            units = -(-end // unit)
            table[row, :units] = part.chain.addresses()[:units]
        skips = [min(part.count, max(0, part.chain.computed - part.start)) for part in parts]
        rows = [row for part in parts for row in range(part.row, part.row + part.count)]
        new = [
            at for part, skip in zip(parts, skips, strict=True) for at in range(part.row + skip, part.row + part.count)
        ]
        single = numpy.arange(singles + 1)
        rest = numpy.array([part.count for part in parts[singles:]], numpy.int64)
        counts = [part.count - skip for part, skip in zip(parts, skips, strict=True)]
        lists: list[Any] = [
            ends,
            numpy.concatenate(([0], numpy.cumsum(rest))),
            numpy.concatenate(([0], numpy.cumsum(counts))) if parts else single[:1],
            rows,
            new,
        ]
        flat = numpy.concatenate([numpy.asarray(one, numpy.int32) for one in lists])
        on_device = _sent(flat, device).split([len(one) for one in lists])
        dense = rows == list(range(len(rows)))
        return cls(
            layout,
            _sent(table, device),
            on_device[0],
            on_device[1],
            on_device[2],
            singles=singles,
            most=max((part.count for part in parts), default=0),
            new_rows=None if dense and new == rows else on_device[4].long(),
            rows=None if dense else on_device[3].long(),
        )

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        if self.new_rows is not None:
            k, v = k[self.new_rows], v[self.new_rows]
        append(k, v, self.written, self.table, self.lengths, self.layout, layer, most_new=max(self.most, 1))

    def attend(self, layer: int, q: torch.Tensor, options: Options) -> torch.Tensor:
        packed = q if self.rows is None else q[self.rows]
        out = torch.empty(packed.shape, dtype=q.dtype, device=q.device)
        wanted: dict[str, Any] = {
            "scale": options.scale,
            "window": options.window,
            "softcap": options.softcap,
            "sinks": None if options.sinks is None else options.sinks.float().contiguous(),
        }
        one = self.singles
        if one:
            decode(packed[:one], self.table[:one], self.lengths[:one], self.layout, layer, out=out[:one], **wanted)
        if one < len(self.lengths):
            prefill(
                packed[one:],
                self.offsets,
                self.table[one:],
                self.lengths[one:],
                self.layout,
                layer,
                most_queries=self.most,
                out=out[one:],
                **wanted,
            )
        if self.rows is None:
            return out
        whole = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        whole[self.rows] = out
        return whole


def _sent(array: numpy.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """On the device, with a copy that the host does not wait for."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
