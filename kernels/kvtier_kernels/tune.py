"""`python -m kvtier_kernels.tune`: measure candidate choices on this GPU and record the best for later processes.

One choice serves every length, so a candidate is judged by the worst of several shapes, as a ratio to the best that any
candidate reached there. Candidates that do not compile or do not fit are skipped.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from triton.errors import TritonError

from kvtier.layout import AttentionLayout, LatentLayout
from kvtier_kernels import tuning
from kvtier_kernels.decode import decode
from kvtier_kernels.measure import seconds
from kvtier_kernels.mla import mla
from kvtier_kernels.prefill import prefill

Candidate = dict[str, int]
DECODE_SHAPES = (((1, 131072), (8, 32768)), ((64, 4096), (256, 1024)))  # few sequences, and many
PREFILL_SHAPES = ((8192, 32768),)
MLA_SHAPES = ((8, 32768), (64, 2048))


class Trial(NamedTuple):
    """A candidate, and its seconds for each shape."""

    candidate: Candidate
    times: tuple[float, ...]


def candidates(kernel: str, dtype: str) -> list[Candidate]:
    """What is tried."""

    def grid(**axes: Iterable[int]) -> list[Candidate]:
        return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]

    if kernel == "decode":
        if dtype in ("bfloat16", "float16"):
            found = grid(block=[32], warps=[1, 2], stages=[3], per_sm=[4])
            found += grid(block=[64], warps=[2, 4], stages=[3], per_sm=[2, 3])
            return found + grid(block=[128], warps=[2, 4], stages=[3], per_sm=[1])
        found = grid(block=[64], warps=[2], stages=[3], per_sm=[4]) + grid(
            block=[32], warps=[2], stages=[3], per_sm=[8]
        )
        return found + grid(block=[64, 32], warps=[1], stages=[3], per_sm=[8])
    if kernel == "prefill":
        found = grid(block=[64], warps=[8], stages=[3, 4], rows=[128], gluon=[0])
        found += grid(block=[64], warps=[4], stages=[2, 3], rows=[64], gluon=[0])
        if dtype in ("bfloat16", "float16"):
            found += grid(block=[128], warps=[4], stages=[2, 3], rows=[128], gluon=[1])
            found += grid(block=[64], warps=[4], stages=[4, 6], rows=[128], gluon=[1])
        return found
    few = grid(block=[64], warps=[4, 8], stages=[3], per_sm=[1], rows=[16])
    few += grid(block=[32], warps=[4], stages=[3], per_sm=[2], rows=[16])
    many = grid(block=[64], warps=[8], stages=[2], per_sm=[1], rows=[64], gluon=[0, 1])
    many += grid(block=[32], warps=[8], stages=[3], per_sm=[1], rows=[64], gluon=[0])
    return few if dtype == "few" else many


def units(layout: AttentionLayout | LatentLayout, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for `tokens` tokens, random but finite, and the addresses of its units in a shuffled order."""
    count = -(-tokens // layout.unit_tokens)
    memory = torch.empty(count * layout.unit_stride + 4096, dtype=torch.uint8, device="cuda")
    start = -memory.data_ptr() % 4096
    rows = memory[start : start + count * layout.unit_stride].view(count, layout.unit_stride)
    payload = rows[:, : layout.payload_bytes]
    if layout.scales_bytes:
        payload.random_(0, 0x77)  # no NaN among float8 codes
        scales = rows[:, layout.payload_bytes : layout.unit_bytes].contiguous()
        kind = torch.bfloat16 if layout.dtype == "int4" else torch.float32
        rows[:, layout.payload_bytes : layout.unit_bytes] = torch.full_like(scales.view(kind), 0.02).view(torch.uint8)
    else:
        for part in rows.split(max(1, (256 << 20) // layout.unit_stride)):
            noise = torch.randn(len(part), layout.payload_bytes // 2, device="cuda").bfloat16()
            part[:, : layout.payload_bytes] = noise.view(torch.uint8)
    order = torch.randperm(count, device="cuda")
    return memory, rows.data_ptr() + order * layout.unit_stride


def problem(
    kernel: str, layout: AttentionLayout | LatentLayout, heads: int, shape: tuple[int, int]
) -> Callable[[], object]:
    """A launch of `kernel` for one shape: (batch, length), or for prefill (queries, length) of one sequence."""
    batch, length = (1, shape[1]) if kernel == "prefill" else shape
    memory, addresses = units(layout, batch * length)
    table = addresses.view(batch, -1).contiguous()
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    if isinstance(layout, LatentLayout):
        q = torch.randn(batch, heads, layout.latent + layout.rope, device="cuda").bfloat16()
        ql, qr = q[..., : layout.latent].contiguous(), q[..., layout.latent :].contiguous()
        return lambda _keep=memory: mla(ql, qr, table, lengths, layout, 0, scale=0.07)
    if kernel == "prefill":
        q = torch.randn(shape[0], heads, layout.head_dim, device="cuda").bfloat16()
        cu = torch.tensor([0, shape[0]], dtype=torch.int32, device="cuda")
        return lambda _keep=memory: prefill(q, cu, table, lengths, layout, 0, most_queries=shape[0])
    q = torch.randn(batch, heads, layout.head_dim, device="cuda").bfloat16()
    return lambda _keep=memory: decode(q, table, lengths, layout, 0)


def trials(kernel: str, launches: Sequence[Callable[[], object]], tried: Sequence[Candidate]) -> list[Trial]:
    """Each candidate on each launch; those that fail to compile or to fit are left out, and said so on stderr."""
    found = []
    for candidate in tried:
        try:
            with tuning.using(kernel, **candidate):
                found.append(Trial(candidate, tuple(seconds(launch, repeat=9) for launch in launches)))
            print("  ", candidate, *(f"{t * 1e6:9.1f}" for t in found[-1].times), flush=True)
        except (RuntimeError, TritonError) as error:
            print(f"{kernel} {candidate}: {type(error).__name__}: {str(error)[:120]}", file=sys.stderr)
    return found


def best(found: Sequence[Trial]) -> Trial:
    """The trial whose worst ratio to the best time of a shape is least."""
    floor = [min(times) for times in zip(*(trial.times for trial in found), strict=True)]
    return min(found, key=lambda trial: max(t / f for t, f in zip(trial.times, floor, strict=True)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvtier_kernels.tune", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kernel", action="append", choices=["decode", "prefill", "mla"])
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--unit-tokens", type=int, default=64)
    parser.add_argument("--dtype", action="append", help="of the units; may repeat")
    parser.add_argument("--dry", action="store_true", help="measure, and record nothing")
    options = parser.parse_args(arguments)
    for kernel in options.kernel or ["decode", "prefill", "mla"]:
        for dtype in options.dtype or ["bfloat16"]:
            _tune(kernel, dtype, options)
    print(f"recorded in {tuning.record_path()}" if not options.dry else "nothing recorded")
    return 0


def _tune(kernel: str, dtype: str, options: argparse.Namespace) -> None:
    if kernel == "mla":
        latents = LatentLayout(layers=1, unit_tokens=options.unit_tokens)
        kind = "few" if options.heads <= 16 else "many"
        _choose(kernel, kind, latents, options, tuning.mla_key(latents, options.heads), MLA_SHAPES)
        return
    layout = AttentionLayout(1, options.kv_heads, options.head_dim, dtype, options.unit_tokens)
    group = options.heads // options.kv_heads
    if kernel == "prefill":
        _choose(kernel, dtype, layout, options, tuning.key(layout, group), PREFILL_SHAPES)
        return
    for shapes in DECODE_SHAPES:
        _choose(kernel, dtype, layout, options, tuning.decode_key(layout, group, shapes[0][0]), shapes)


def _choose(
    kernel: str,
    kind: str,
    layout: AttentionLayout | LatentLayout,
    options: argparse.Namespace,
    key: str,
    shapes: Sequence[tuple[int, int]],
) -> None:
    """Try all candidates on `shapes`, and record the best under `key`."""
    launches = [problem(kernel, layout, options.heads, shape) for shape in shapes]
    found = trials(kernel, launches, candidates(kernel, kind))
    chosen = best(found)
    print(f"{kernel} {key} {options.heads} heads: microseconds at {shapes}")
    for trial in found:
        mark = "*" if trial is chosen else " "
        print(f" {mark} {trial.candidate} " + " ".join(f"{t * 1e6:9.1f}" for t in trial.times))
    if not options.dry:
        tuning.record(kernel, key, tuning.Choice(**({"block": 64, "warps": 4, "stages": 3} | chosen.candidate)))


if __name__ == "__main__":
    sys.exit(main())
