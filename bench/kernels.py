"""Speed of the kernels against the device's limits and, with --flashinfer, against FlashInfer, in one run.

    python bench/kernels.py [--flashinfer] [--torch] [--vllm] [--only decode precision prefill mla host copy peers]

--torch adds cuDNN and FlashAttention 2 on contiguous K and V and paged FlexAttention, --vllm its unified Triton kernel.

Needs a CUDA GPU with 100 GB. Launches are timed as captured graphs with a cold L2, median of 15
(`kvtier_kernels.measure`). What is timed is compared first: with plain PyTorch on a part, a peer with our output.
"""

# ruff: noqa: B023, BLE001 - lambdas are timed in the loop that makes them; a peer that fails is a dash
from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import kernels_peers as peers
import kernels_peers_torch as others
from kernels_peers import DIM, HEADS, KV_HEADS

from kvtier.layout import AttentionLayout, LatentLayout
from kvtier_kernels import tuning
from kvtier_kernels.copy import copy_pieces, engine_cache, gather_units, unit_slots
from kvtier_kernels.decode import decode
from kvtier_kernels.measure import seconds
from kvtier_kernels.mla import mla
from kvtier_kernels.prefill import prefill
from kvtier_kernels.tune import units

DECODE = {"1x128k": (1, 131072), "1x1M": (1, 1 << 20), "8x32k": (8, 32768), "64x4k": (64, 4096), "256x1k": (256, 1024)}
DECODE["16x1k"] = (16, 1024)
FLOAT_BYTES = KV_HEADS * DIM * 2 * 2


def layout_of(dtype: Any, unit: int) -> AttentionLayout:
    return AttentionLayout(1, KV_HEADS, DIM, dtype, unit)


def problem(layout: Any, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Units as rows of bytes, the order sequences use them in, table and lengths."""
    memory, addresses = units(layout, batch * length)
    start = -memory.data_ptr() % 4096
    count = len(addresses)
    rows = memory[start : start + count * layout.unit_stride].view(count, layout.unit_stride)
    order = (addresses - rows.data_ptr()) // layout.unit_stride
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    return rows, order, addresses.view(batch, -1).contiguous(), lengths


def agree(name: str, got: torch.Tensor, want: torch.Tensor, most: float = 1e-2) -> bool:
    error = float((got.double() - want.double()).norm() / want.double().norm())
    if not error < most:
        print(f"WRONG {name}: relative error {error:.1e}", flush=True)
    return error < most


def against(name: str, launch: Callable[[], Callable[[], torch.Tensor]], want: torch.Tensor) -> float | None:
    """Seconds of a peer, or None where it does not run or differs from us."""
    try:
        run = launch()
        return seconds(run) if agree(name, run(), want, 2e-2) else None
    except Exception as error:
        print(f"{name}: {type(error).__name__} {str(error)[:200]}", flush=True)
        return None


def over(peer: float | None, ours: float) -> str:
    return "    -" if peer is None else f"{peer / ours:5.2f}"


def limits() -> dict[str, float]:
    x, y = (torch.empty(4 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    host = torch.empty(1 << 30, dtype=torch.uint8).pin_memory()
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    found = {
        "copy": 2 * x.numel() / seconds(lambda: torch.neg(x.view(torch.int64), out=y.view(torch.int64))) / 1e9,
        "host to device": host.numel() / seconds(lambda: x[: 1 << 30].copy_(host, non_blocking=True)) / 1e9,
        "device to host": host.numel() / seconds(lambda: host.copy_(x[: 1 << 30], non_blocking=True)) / 1e9,
        "matmul": 2 * 8192**3 / seconds(lambda: a @ a) / 1e12,
    }
    print("limits: " + ", ".join(f"{k} {v:.1f}" for k, v in found.items()) + " (GB/s; matmul TFLOP/s)", flush=True)
    return found


def bench_decode(flashinfer: bool, limit: dict[str, float]) -> None:
    print(
        "decode, bf16, 64 heads over 8, dim 128: GB/s of KV | us | share of the copy limit | x FlashInfer (page 16, 64)"
    )
    for name, (batch, length) in DECODE.items():
        times, theirs = {}, {}
        for unit in (16, 64):
            layout = layout_of("bfloat16", unit)
            rows, order, table, lengths = problem(layout, batch, length)
            q = torch.randn(batch, HEADS, DIM, device="cuda").bfloat16()
            run = lambda q=q, table=table, lengths=lengths, layout=layout: decode(q, table, lengths, layout, 0)[0]
            cache = rows.view(torch.bfloat16).view(-1, 2, KV_HEADS, unit, DIM)
            if batch * length <= 1 << 18:
                k = cache[order[: length // unit], 0, 0].reshape(-1, DIM).double()
                v = cache[order[: length // unit], 1, 0].reshape(-1, DIM).double()
                agree(f"decode {name}", run()[0, 0], torch.softmax(k @ q[0, 0].double() * DIM**-0.5, 0) @ v)
            times[unit] = seconds(run)
            if flashinfer:
                peer = lambda q=q, cache=cache, order=order, unit=unit: peers.decode(
                    q, cache, order, batch, length, unit
                )
                theirs[unit] = against(f"flashinfer decode {name}", peer, run())
            del rows, cache
        nbytes, best = batch * length * FLOAT_BYTES, min((t for t in theirs.values() if t), default=None)
        print(
            f"  {name:>7}: " + "; ".join(
                f"unit {u} {nbytes / t / 1e9:6.0f} | {t * 1e6:7.1f} | {nbytes / t / 1e9 / limit['copy']:.2f} | {over(best, t)}"
                for u, t in times.items()
            ) + "; FlashInfer us " + ", ".join(f"{t * 1e6:.1f}" if t else "-" for t in theirs.values()), flush=True,
        )  # fmt: skip


def bench_precision(flashinfer: bool) -> None:
    print("decode by stored precision, unit 64: us and tokens/s over bf16")
    for name in ("8x32k", "64x4k"):
        batch, length = DECODE[name]
        q = torch.randn(batch, HEADS, DIM, device="cuda").bfloat16()
        base, line = 0.0, []
        for dtype in ("bfloat16", "float8_e4m3fn", "int8", "int4"):
            layout = layout_of(dtype, 64)
            _rows, order, table, lengths = problem(layout, batch, length)
            took = seconds(lambda: decode(q, table, lengths, layout, 0))
            base = base or took
            line.append(f"{dtype} {took * 1e6:.1f} ({base / took:.2f}x)")
        if flashinfer:
            count = batch * length // 64
            cache = torch.randn(count, 2, KV_HEADS, 64, DIM, device="cuda").to(torch.float8_e4m3fn)
            order = torch.randperm(count, device="cuda")
            try:
                took = seconds(peers.decode(q, cache, order, batch, length, 64))
                line.append(f"FlashInfer float8 {took * 1e6:.1f}")
            except Exception as error:
                line.append(f"FlashInfer float8 {type(error).__name__}")
        print(f"  {name:>7}: " + ", ".join(line), flush=True)


def bench_prefill(flashinfer: bool, limit: dict[str, float]) -> None:
    print(
        "prefill, 8k queries at the end of 32k, bf16: TFLOP/s | share of matmul | x FlashInfer fa3, fa2 of the same page"
    )
    queries, length = 8192, 32768
    flops = 4 * HEADS * DIM * (queries * (length - queries) + queries * (queries + 1) / 2)
    for unit in (64, 16):
        layout = layout_of("bfloat16", unit)
        rows, order, table, lengths = problem(layout, 1, length)
        q = torch.randn(queries, HEADS, DIM, device="cuda").bfloat16()
        cu = torch.tensor([0, queries], dtype=torch.int32, device="cuda")
        run = lambda: prefill(q, cu, table, lengths, layout, 0, most_queries=queries)[0]
        cache = rows.view(torch.bfloat16).view(-1, 2, KV_HEADS, unit, DIM)
        k, v = (cache[order, i, 0].reshape(-1, DIM).double() for i in (0, 1))
        agree("prefill", run()[-1, 0], torch.softmax(k @ q[-1, 0].double() * DIM**-0.5, 0) @ v)
        ours = seconds(run)
        line = f"  unit {unit}: {flops / ours / 1e12:.0f} | {flops / ours / 1e12 / limit['matmul']:.2f}"
        for backend in ("fa3", "fa2") if flashinfer else ():
            peer = lambda backend=backend: peers.prefill(q, cache, order, length, unit, backend)
            took = against(f"flashinfer prefill {backend}", peer, run())
            line += f" | {backend} {flops / took / 1e12:.0f}: {over(took, ours)}" if took else f" | {backend} -"
        print(line, flush=True)


def bench_peers(which: list[str]) -> None:
    """Decode and prefill over units of 64 against other peers than FlashInfer. Each is let go before the next starts."""
    print(f"decode, bf16, unit 64: GB/s of KV of ours, {', '.join(which)}; cudnn and flash read contiguous K and V")
    layout = layout_of("bfloat16", 64)
    for name in [*(n for n in DECODE if n != "1x1M"), "prefill"]:
        prefilling = name == "prefill"
        batch, length = (1, 32768) if prefilling else DECODE[name]
        rows, order, table, lengths = problem(layout, batch, length)
        q = torch.randn(8192 if prefilling else batch, HEADS, DIM, device="cuda").bfloat16()
        cu = torch.tensor([0, len(q)], dtype=torch.int32, device="cuda")
        cache = rows.view(torch.bfloat16).view(-1, 2, KV_HEADS, 64, DIM)
        keys, values = others.contiguous(cache, order, batch)
        if prefilling:
            work = 4e-12 * HEADS * DIM * (len(q) * (length - len(q)) + len(q) * (len(q) + 1) / 2)
            print("prefill, 8k queries at the end of 32k, bf16, unit 64: TFLOP/s; cudnn masks no chunk at the end")
            ours = lambda: prefill(q, cu, table, lengths, layout, 0, most_queries=len(q))[0]
        else:
            work = batch * length * FLOAT_BYTES / 1e9
            ours = lambda: decode(q, table, lengths, layout, 0)[0]
        launches: dict[str, Callable[[], Callable[[], torch.Tensor]]] = {
            "cudnn": lambda: others.sdpa_decode(q, keys, values, "cudnn"),
            "flash": lambda: (
                others.flash_prefill(q, keys, values) if prefilling else others.sdpa_decode(q, keys, values, "flash")
            ),
            "flex": lambda: others.flex(q, keys, values, 64),
            "vllm": lambda: others.vllm_unified(q, cache, order, batch),
        }
        if prefilling:
            del launches["cudnn"]
        want, line = ours(), f"ours {work / seconds(ours):7.0f}"
        for peer in which:
            took = against(f"{peer} {name}", launches[peer], want) if peer in launches else None
            line += f", {peer} {work / took:7.0f}" if took else f", {peer}       -"
        print(f"  {name:>7}: {line}", flush=True)


def bench_mla(flashinfer: bool) -> None:
    print("mla decode, 8x32k, 512 + 64, bf16, unit 64: GB/s of latents | us | x FlashInfer fa3")
    layout = LatentLayout(layers=1, unit_tokens=64)
    rows, order, table, lengths = problem(layout, 8, 32768)
    latents = rows.view(torch.bfloat16).view(-1, 64, 576)
    nbytes = 8 * 32768 * 576 * 2
    for heads in (16, 128):
        ql = torch.randn(8, heads, 512, device="cuda").bfloat16()
        qr = torch.randn(8, heads, 64, device="cuda").bfloat16()
        run = lambda: mla(ql, qr, table, lengths, layout, 0, scale=0.07)[0]
        k = latents[order[:512]].reshape(-1, 576).double()
        logits = k @ torch.cat((ql[0, 0], qr[0, 0])).double() * 0.07
        agree(f"mla {heads}", run()[0, 0], torch.softmax(logits, 0) @ k[:, :512])
        ours = seconds(run)
        peer = lambda: peers.mla(ql, qr, latents, order, 8, 32768, 0.07)
        took = against(f"flashinfer mla {heads}", peer, run()) if flashinfer else None
        print(f"  {heads:>3} heads: {nbytes / ours / 1e9:.0f} | {ours * 1e6:.1f} | {over(took, ours)}", flush=True)


def bench_host(limit: dict[str, float]) -> None:
    print("decode, 8x32k, unit 64, some pages in pinned host memory: GB/s of KV | host bytes/s over the link's limit")
    layout = layout_of("bfloat16", 64)
    _rows, _order, table, lengths = problem(layout, 8, 32768)
    far = torch.empty(table.numel() * layout.unit_stride + 4096, dtype=torch.uint8).pin_memory()
    far[: 1 << 20] = 0
    where = far.data_ptr() + 4096 - far.data_ptr() % 4096
    flat = where + torch.arange(table.numel(), device="cuda") * layout.unit_stride
    q = torch.randn(8, HEADS, DIM, device="cuda").bfloat16()
    nbytes = 8 * 32768 * FLOAT_BYTES
    for percent in (0, 5, 25, 100):
        chosen = torch.rand(table.numel(), device="cuda").argsort() < table.numel() * percent // 100
        mixed = torch.where(chosen.view(table.shape), flat.view(table.shape), table)
        took = seconds(lambda: decode(q, mixed, lengths, layout, 0), repeat=5)
        link = nbytes * percent / 100 / took / 1e9
        print(f"  {percent:>3}%: {nbytes / took / 1e9:7.1f} | {link / limit['host to device']:.2f}", flush=True)


def bench_copy(limit: dict[str, float]) -> None:
    print("copy of scattered pieces, 256 MiB a launch: GB/s (share of the limit), by programs")
    total = 256 << 20
    host = torch.randint(0, 256, (total,), dtype=torch.uint8).pin_memory()
    device, other = (torch.empty(total, dtype=torch.uint8, device="cuda") for _ in range(2))
    for size in (4096, 16384, 65536):
        line = []
        at = torch.randperm(total // size, device="cuda") * size
        to = torch.arange(total // size, device="cuda") * size
        for name, source, target, some in (
            ("host to device", host, device, (16, 64)), ("device to host", device, host, (16, 64)), ("copy", device, other, (0,))
        ):  # fmt: skip
            for programs in some:
                run = lambda: copy_pieces(
                    source.data_ptr() + at, target.data_ptr() + to, size, programs=programs or None
                )
                rate = total / seconds(run, repeat=5) / 1e9 * (2 if name == "copy" else 1)
                line.append(f"{name}/{programs or 'all'} {rate:.1f} ({rate / limit[name]:.2f})")
        print(f"  {size >> 10:>3} KiB: " + ", ".join(line), flush=True)
    layout = AttentionLayout(8, KV_HEADS, DIM, "bfloat16", 16)
    theirs = [torch.randn(2, 512, 16, KV_HEADS, DIM, device="cuda").bfloat16() for _ in range(8)]
    slots = torch.tensor(unit_slots(torch.randperm(512).tolist(), 512, 16, 16), dtype=torch.int64, device="cuda")
    _rows, _order, table, _ = problem(layout, 1, 512 * 16)
    cache = engine_cache(theirs, "kv block token head dim")
    took = seconds(lambda: gather_units(cache, slots, table[0], layout))
    nbytes = 512 * layout.unit_bytes
    print(
        f"  gather of 512 units from 8 layers, NHD: {2 * nbytes / took / 1e9:.0f} ({2 * nbytes / took / 1e9 / limit['copy']:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flashinfer", action="store_true", help="time FlashInfer too; it must be installed")
    parser.add_argument(
        "--torch", action="store_true", help="time what PyTorch offers: cuDNN, FlashAttention, FlexAttention"
    )
    parser.add_argument(
        "--vllm", action="store_true", help="time vLLM's unified Triton kernel, where it can be imported"
    )
    parser.add_argument("--only", nargs="+", default=["decode", "precision", "prefill", "mla", "host", "copy", "peers"])
    options = parser.parse_args()
    which = ["cudnn", "flash", "flex"] * options.torch
    if options.vllm and importlib.util.find_spec("vllm") is None:
        print("vllm: skipped, it is not installed")
    elif options.vllm:
        which.append("vllm")
    start = time.perf_counter()
    limit = limits()
    choices = [f"{n} {tuple(c)}" for n, c in (
        ("decode of few sequences", tuning.decode(layout_of("bfloat16", 64), 8, torch.device("cuda"))),
        ("of many", tuning.decode(layout_of("bfloat16", 64), 8, torch.device("cuda"), 64)),
        ("int4", tuning.decode(layout_of("int4", 64), 8, torch.device("cuda"))),
        ("prefill", tuning.prefill(layout_of("bfloat16", 64), 8, torch.device("cuda"), plain=True)),
    )]  # fmt: skip
    print("choices (block, warps, stages, per_sm, rows, sms): " + "; ".join(choices), flush=True)
    benches: dict[str, Callable[[], None]] = {
        "decode": lambda: bench_decode(options.flashinfer, limit),
        "precision": lambda: bench_precision(options.flashinfer),
        "prefill": lambda: bench_prefill(options.flashinfer, limit),
        "mla": lambda: bench_mla(options.flashinfer),
        "host": lambda: bench_host(limit),
        "copy": lambda: bench_copy(limit),
        "peers": lambda: bench_peers(which) if which else None,
    }
    for name in options.only:
        try:
            benches[name]()
        except (RuntimeError, ValueError) as error:
            print(f"{name} FAILED: {type(error).__name__} {str(error)[:300]}", flush=True)
    print(f"took {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
