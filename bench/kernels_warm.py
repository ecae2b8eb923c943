"""Compile candidate choices in parallel, so that tuning then only measures: `python bench/kernels_warm.py WORKERS`."""

# ruff: noqa: BLE001 - lambdas are timed in the loop that makes them; a peer that fails is a dash
from __future__ import annotations

import multiprocessing
import sys

from kvtier.layout import AttentionLayout, LatentLayout
from kvtier_kernels import tune, tuning

JOBS = [("decode", dtype, 64) for dtype in ("float8_e4m3fn", "int4")]
JOBS += [("prefill", "bfloat16", 64), ("mla", "few", 16), ("mla", "many", 128)]


def compile_one(job: tuple[str, str, int, dict[str, int], int]) -> None:
    kernel, dtype, heads, candidate, batch = job
    layout: AttentionLayout | LatentLayout = LatentLayout(layers=1, unit_tokens=64)
    if kernel != "mla":
        layout = AttentionLayout(1, 8, 128, dtype, 64)  # type: ignore[arg-type]
    shape = (1, 64) if kernel == "prefill" else (batch, 64)
    with tuning.using(kernel, **candidate):
        try:
            tune.problem(kernel, layout, heads, shape)()
        except Exception as error:
            print(kernel, candidate, type(error).__name__)


def main() -> None:
    jobs = []
    for kernel, dtype, heads in JOBS:
        batches = {"decode": (1, 64), "prefill": (1,), "mla": (8, 64)}[kernel]
        jobs += [(kernel, dtype, heads, c, b) for c in tune.candidates(kernel, dtype) for b in batches]
    with multiprocessing.get_context("spawn").Pool(int(sys.argv[1]) if len(sys.argv) > 1 else 8) as pool:
        pool.map(compile_one, jobs, chunksize=1)


if __name__ == "__main__":
    main()
