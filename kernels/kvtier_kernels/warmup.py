"""`python -m kvtier_kernels.warmup`: compile ahead of the first request, and report what was compiled.

With `--target`, for GPUs that need not be here: every watched variant, with registers, shared memory and stack. Without
it, on this GPU: one launch of each kernel over units of the given shape, which fills Triton's cache (TRITON_CACHE_DIR)
for later processes; a first call in a process then loads machine code instead of compiling it.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence

import torch

from kvtier.layout import AttentionLayout, LatentLayout
from kvtier_kernels import tuning
from kvtier_kernels.addressing import TORCH_DTYPES
from kvtier_kernels.append import append, append_latent
from kvtier_kernels.compiling import TARGETS, compile_for
from kvtier_kernels.decode import decode
from kvtier_kernels.mla import mla
from kvtier_kernels.prefill import prefill
from kvtier_kernels.variants import variants


def report(targets: Sequence[str]) -> dict[str, dict[str, int]]:
    """Resources by "target: variant" of every variant for the given targets."""
    found = {}
    for target in targets:
        for variant in variants(TARGETS[target]):
            _, resources = compile_for(variant, target)
            found[f"{target}: {variant.name}"] = resources._asdict()
    return found


def warm(
    layout: AttentionLayout | LatentLayout, heads: int, query: torch.dtype, batches: Sequence[int]
) -> dict[str, float]:
    """Launch each kernel that serves `layout` once on the current GPU; seconds each took, compiling included.

    Decode is compiled for batches rounded up to 16, 64, 256 and so on (`plan.lanes`): name those that will be served.
    """
    device = torch.device("cuda")
    unit = torch.zeros(layout.unit_stride + 4096, dtype=torch.uint8, device=device)
    address = -(-unit.data_ptr() // 4096) * 4096
    seconds: dict[str, float] = {}

    def timed(name: str, launch: Callable[[], object]) -> None:
        start = time.perf_counter()
        launch()
        torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - start

    for batch in batches:
        table = torch.full((batch, 1), address, dtype=torch.int64, device=device)
        lengths = torch.ones(batch, dtype=torch.int32, device=device)
        if isinstance(layout, LatentLayout):
            q = torch.zeros(batch, heads, layout.latent + layout.rope, dtype=query, device=device)
            parts = (q[..., : layout.latent], q[..., layout.latent :], table, lengths, layout, 0)
            timed(f"mla, batch {batch}", functools.partial(mla, *parts, scale=1.0))
        else:
            q = torch.zeros(batch, heads, layout.head_dim, dtype=query, device=device)
            timed(f"decode, batch {batch}", functools.partial(decode, q, table, lengths, layout, 0))
    cu = torch.tensor([0, 1], dtype=torch.int32, device=device)
    one = torch.full((1, 1), address, dtype=torch.int64, device=device), cu[1:]
    if isinstance(layout, AttentionLayout):
        q = torch.zeros(1, heads, layout.head_dim, dtype=query, device=device)
        kv = torch.zeros(1, layout.kv_heads, layout.head_dim, dtype=query, device=device)
        timed("append", functools.partial(append, kv, kv, cu, *one, layout, 0, most_new=1))
        timed("prefill", functools.partial(prefill, q, cu, *one, layout, 0, most_queries=1))
    else:
        rows = torch.zeros(1, layout.latent + layout.rope, dtype=query, device=device)
        latent, rope = rows[:, : layout.latent], rows[:, layout.latent :]
        timed("append latent", functools.partial(append_latent, latent, rope, cu, *one, layout, 0, most_new=1))
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvtier_kernels.warmup", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="compile for this GPU; may repeat")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--unit-tokens", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", help="of the units")
    parser.add_argument("--query-dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--latent", action="store_true", help="latent (MLA) units of 512 + 64")
    parser.add_argument("--batch", type=int, action="append", help="a batch size that will be served; may repeat")
    options = parser.parse_args(arguments)
    if tuning.interpreting():
        print("TRITON_INTERPRET is set: nothing is compiled in the interpreter; unset it", file=sys.stderr)
        return 2
    if options.target:
        found = report(options.target)
        if options.json:
            print(json.dumps(found, indent=1, sort_keys=True))
            return 0
        print(f"{'variant':<72} registers  shared  stack")
        for name, needs in found.items():
            print(f"{name:<72} {needs['registers']:>9} {needs['shared']:>7} {needs['stack']:>6}")
        return 0
    if not torch.cuda.is_available():
        print("no CUDA device: name a --target to compile for one that is elsewhere", file=sys.stderr)
        return 2
    layout: AttentionLayout | LatentLayout
    if options.latent:
        layout = LatentLayout(layers=options.layers, dtype=options.dtype, unit_tokens=options.unit_tokens)
    else:
        layout = AttentionLayout(options.layers, options.kv_heads, options.head_dim, options.dtype, options.unit_tokens)
    seconds = warm(layout, options.heads, TORCH_DTYPES[options.query_dtype], options.batch or [16, 64, 256])
    for name, took in seconds.items():
        print(f"{name:<24} {took:8.2f} s")
    print(f"tuning: {tuning.record_path()}{'' if tuning.record_path().exists() else ' (none: defaults)'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
