"""Passes in which every sequence is fed one token, on a GPU: the worker's most frequent ones, so made cheap for the host.

Tables stay on the device, a row for each sequence, and a row is sent again only when the sequence has got pages. Per pass
one small copy goes to the device: tokens, positions, lengths, and which row belongs to whom. With `graphs`, a pass is
captured once for each size of batch (rounded up; rows that are too many have length 0 and write nowhere) and replayed:
then a model's hundreds of launches cost one. A model that cannot be captured runs without, and is said so once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvtier.layout import AttentionLayout
from kvtier_client.transformers.attention import PagedCache
from kvtier_client.transformers.launch import LaunchBatch
from kvtier_client.transformers.paging import Page
from kvtier_client.transformers.sequence import Sequence as Sample

_LOG = logging.getLogger(__name__)
_WARM = 2
"""Passes before one is captured, in which kernels are compiled and libraries allocate what they keep."""


def sizes(most: int) -> list[int]:
    """Sizes of batch that are captured: powers of two up to 16, then steps of an eighth of the next, about."""
    found = [size for size in (1, 2, 4, 8) if size < most]
    size = 16
    while size < most:
        found.append(size)
        size += max(16, size // 4 // 16 * 16)
    return [*found, most]


class Decoder:
    """`forward(input_ids, position_ids, cache)` gives logits `[1, rows, vocabulary]` on the device."""

    def __init__(
        self,
        forward: Callable[..., torch.Tensor],
        layout: AttentionLayout,
        device: torch.device,
        *,
        rows: int,
        longest: int,
        graphs: bool,
    ) -> None:
        self.graphs = graphs
        self._forward = forward
        self._layout = layout
        self._cache = PagedCache(layout)
        self._sizes = sizes(rows)
        width = -(-longest // layout.unit_tokens)
        self._all = torch.zeros(rows + 1, width, dtype=torch.int64, device=device)  # the last row is nobody's
        self._nobody = rows
        self._free = list(range(rows))
        self._stamps: dict[int, tuple[int, int]] = {}
        self._given = torch.zeros(4 * rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._static = torch.zeros(4 * rows, dtype=torch.int64, device=device)
        self._table = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self._offsets = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._sent: Any = None
        self._logits: torch.Tensor | None = None
        self._captured: dict[int, Any] = {}
        self._pool: Any = None

    def __call__(self, samples: Sequence[Sample]) -> torch.Tensor:
        """Logits `[samples, vocabulary]` after each one's last token, whose KV goes to its pages. They stand until the
        next call, before which what this one was asked must be done on the device."""
        size = next(size for size in self._sizes if size >= len(samples)) if self.graphs else len(samples)
        given = [[0] * size, [0] * size, [0] * size, [self._nobody] * size]
        for row, sample in enumerate(samples):
            self._seat(sample)
            at = sample.computed
            given[0][row], given[1][row], given[2][row], given[3][row] = sample.tokens[at], at, at + 1, sample.slot
        if self._sent is not None:
            self._sent.synchronize()
        self._given[: 4 * size] = torch.tensor(given).flatten()
        self._static[: 4 * size].copy_(self._given[: 4 * size], non_blocking=True)
        if self._given.is_pinned():
            self._sent = torch.cuda.current_stream().record_event()
        logits = self._replay(size) if self.graphs else self._run(size)
        return logits[: len(samples)]

    def forget(self, sample: Sample) -> None:
        """It is not going to be fed, for now."""
        if sample.slot >= 0:
            self._free.append(sample.slot)
            self._stamps.pop(sample.slot)
            sample.slot = -1

    def _seat(self, sample: Sample) -> None:
        """Its row of the table, as long as it is."""
        if sample.slot < 0:
            sample.slot = self._free.pop()
            self._stamps[sample.slot] = (0, 0)
        stamp = (len(sample.pages), Page.moves)
        if self._stamps[sample.slot] != stamp:
            row = torch.from_numpy(sample.addresses())
            self._all[sample.slot, : len(row)] = row.to(self._all.device)
            self._stamps[sample.slot] = stamp

    def _run(self, size: int) -> torch.Tensor:
        given = self._static[: 4 * size].view(4, size)
        self._lengths[:size].copy_(given[2])
        torch.index_select(self._all, 0, given[3], out=self._table[:size])
        batch = LaunchBatch(
            self._layout,
            self._table[:size],
            self._lengths[:size],
            self._offsets[:1],
            self._offsets[: size + 1],
            singles=size,
            most=1,
        )
        return self._forward(given[0][None], given[1][None], self._cache.over(batch))[0]

    def _replay(self, size: int) -> torch.Tensor:
        if size not in self._captured:
            try:
                self._capture(size)
            except RuntimeError as error:
                _LOG.warning("this model's passes cannot be captured in CUDA graphs, and run without: %s", error)
                self.graphs = False
                self._captured.clear()
                return self._run(size)
        self._captured[size].replay()
        assert self._logits is not None
        return self._logits[:size]

    def _capture(self, size: int) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM):  # writes the same rows to the same places each time
                logits = self._run(size)
        torch.cuda.current_stream().wait_stream(stream)
        if self._logits is None:
            self._logits = torch.empty(self._sizes[-1], logits.shape[-1], dtype=logits.dtype, device=logits.device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process map memory and wait for events meanwhile, which a stricter mode would forbid.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._logits[:size].copy_(self._run(size))
        self._captured[size] = graph
