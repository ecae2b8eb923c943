"""Timing launches on the GPU: as a captured graph, with a cold L2, the median of many.

What `tune` chooses by and what `bench/kernels.py` reports.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def seconds(launch: Callable[[], object], *, repeat: int = 15, graph: bool = True) -> float:
    """Median GPU time of `launch`, which must wait for nothing. Each run follows a write of 256 MB, more than any L2."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            launch()
        torch.cuda.synchronize()
        run: Callable[[], object] = launch
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured, stream=stream):
                launch()
            run = captured.replay
        flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        times = []
        for _ in range(repeat):
            flush.zero_()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            stop.record()
            times.append((start, stop))
        torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in times) / 1e3
