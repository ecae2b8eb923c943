"""What only a GPU can show of the kernels: its own conversions, large contexts, graphs, and memories that are not its.

The shapes drawn for the interpreter run here too: `pytest tests/kernels` uses the GPU where there is one.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import torch
import triton
from paged import Arena, close, latent_paged, paged, poisoned, tolerance

from kvtier.layout import AttentionLayout, LatentLayout
from kvtier_kernels import reference
from kvtier_kernels.addressing import read_bytes
from kvtier_kernels.append import append
from kvtier_kernels.copy import copy_pieces
from kvtier_kernels.decode import decode
from kvtier_kernels.mla import mla
from kvtier_kernels.prefill import prefill
from kvtier_kernels.quantise import convert

PRECISIONS = ("bfloat16", "float16", "float8_e4m3fn", "int8", "int4")
CUDA = torch.device("cuda")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("unit", [16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("group", "tokens"), [(8, 1), (1, 1), (32, 2)])
def test_decode_in_every_precision(precision: Any, unit: int, dtype: torch.dtype, group: int, tokens: int) -> None:
    layout = AttentionLayout(layers=2, kv_heads=2, head_dim=128, dtype=precision, unit_tokens=unit)
    cache = paged(layout, [1000, 0, 1, 517])
    q = torch.randn(4, tokens, 2 * group, 128, device=CUDA).to(dtype)
    out, lse = poisoned(q.shape, dtype), poisoned(q.shape[:3], torch.float32)
    decode(q, cache.table, cache.lengths, layout, 1, out=out, lse=lse)
    want, want_lse = reference.decode(q, cache.table, cache.lengths, cache.layouts, 1, scale=128**-0.5)
    close(out, want, tolerance(torch.bfloat16 if precision == "int4" else dtype))
    close(lse, want_lse, 2e-3)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("unit", [16, 64])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_prefill_in_every_precision(precision: Any, unit: int, dim: int) -> None:
    layout = AttentionLayout(layers=2, kv_heads=2, head_dim=dim, dtype=precision, unit_tokens=unit)
    cache = paged(layout, [1000, 300, 1])
    counts = [200, 300, 1]
    q = torch.randn(sum(counts), 8, dim, device=CUDA).bfloat16()
    cu = torch.tensor([0, 200, 500, 501], dtype=torch.int32, device=CUDA)
    out, lse = poisoned(q.shape, q.dtype), poisoned(q.shape[:2], torch.float32)
    prefill(q, cu, cache.table, cache.lengths, layout, 1, most_queries=300, out=out, lse=lse)
    want, want_lse = reference.prefill(q, cu, cache.table, cache.lengths, cache.layouts, 1, scale=dim**-0.5)
    close(out, want, tolerance(q.dtype))
    close(lse, want_lse, 2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("unit", [16, 64])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 6, 8, 64])
def test_prefill_without_options(dtype: torch.dtype, unit: int, dim: int, group: int) -> None:
    """What `prefill_hopper` takes on Hopper: contexts shorter and longer than its ring, edges in and between tiles."""
    layout = AttentionLayout(
        layers=2, kv_heads=2, head_dim=dim, dtype=str(dtype).removeprefix("torch."), unit_tokens=unit
    )
    cache = paged(layout, [1000, 300, 1, 128, 0, 2049, 64])
    counts = [200, 300, 1, 128, 0, 1, 33]
    q = torch.randn(sum(counts), 2 * group + 1, dim, device=CUDA).to(dtype)[:, 1:]
    cu = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device=CUDA)
    out, lse = poisoned(q.shape, q.dtype), poisoned(q.shape[:2], torch.float32)
    prefill(q, cu, cache.table, cache.lengths, layout, 1, most_queries=300, out=out, lse=lse)
    want, want_lse = reference.prefill(q, cu, cache.table, cache.lengths, cache.layouts, 1, scale=dim**-0.5)
    close(out, want, tolerance(q.dtype))
    close(lse, want_lse, 2e-3)


def test_a_kernel_is_compiled_once_wherever_a_batch_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a worker decodes the first sequences and prefills the others, of which there are other numbers each time."""
    layout = AttentionLayout(layers=1, kv_heads=2, head_dim=128, unit_tokens=16)
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **about: compiled.append(about["repr"]))

    def run(sequences: int, singles: int, width: int) -> None:
        cache = paged(layout, [16 * width] * sequences)
        rest = sequences - singles
        rows = singles + 20 * rest
        q = torch.randn(rows, 16, 128, device=CUDA).bfloat16()
        numbers = torch.arange(rest + 1, device=CUDA, dtype=torch.int32) * 20
        cu = torch.cat((torch.zeros(singles % 4, device=CUDA, dtype=torch.int32), numbers))[singles % 4 :]
        decode(q[:singles], cache.table[:singles], cache.lengths[:singles], layout, 0)
        prefill(q[singles:], cu, cache.table[singles:], cache.lengths[singles:], layout, 0, most_queries=20)
        new = torch.randn(20 * rest, 2, 128, device=CUDA).bfloat16()
        append(new, new, cu, cache.table[singles:], cache.lengths[singles:], layout, 0, most_new=20)

    run(7, 3, 9)
    compiled.clear()
    for sequences, singles, width in ((8, 1, 16), (9, 2, 17), (12, 4, 32), (16, 13, 8), (11, 5, 13)):
        run(sequences, singles, width)
    assert not compiled


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("group", "tokens"), [(8, 1), (40, 1), (8, 8)])
def test_decode_of_wide_heads_and_many_rows(precision: Any, group: int, tokens: int) -> None:
    layout = AttentionLayout(layers=1, kv_heads=1, head_dim=256, dtype=precision, unit_tokens=64)
    cache = paged(layout, [700, 0, 65])
    q = torch.randn(3, tokens, group, 256, device=CUDA).bfloat16()
    out, _ = decode(q, cache.table, cache.lengths, layout, 0)
    want, _ = reference.decode(q, cache.table, cache.lengths, cache.layouts, 0, scale=256**-0.5)
    close(out, want, tolerance(q.dtype))


def test_int4_over_a_long_context_that_weighs_alike() -> None:
    """Where outputs are small sums of large terms, the excess of 8 in each code must not show."""
    layout = AttentionLayout(layers=1, kv_heads=1, head_dim=128, dtype="int4", unit_tokens=64)
    cache = paged(layout, [32768])
    q = torch.randn(1, 1, 8, 128, device=CUDA).bfloat16() * 0.01
    out, _ = decode(q, cache.table, cache.lengths, layout, 0, programs=2)
    want, _ = reference.decode(q, cache.table, cache.lengths, cache.layouts, 0, scale=128**-0.5)
    close(out, want, tolerance(q.dtype))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_decode_of_every_head_dim(dim: int) -> None:
    layout = AttentionLayout(layers=1, kv_heads=8, head_dim=dim, unit_tokens=64)
    cache = paged(layout, [2000, 3])
    q = torch.randn(2, 64, dim, device=CUDA).bfloat16()
    out, _ = decode(q, cache.table, cache.lengths, layout, 0)
    want, _ = reference.decode(q[:, None], cache.table, cache.lengths, cache.layouts, 0, scale=dim**-0.5)
    close(out, want[:, 0], tolerance(q.dtype))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("unit", [16, 64])
def test_mla(heads: int, unit: int) -> None:
    layout = LatentLayout(layers=2, unit_tokens=unit)
    table, lengths, _arena = latent_paged(layout, [3000, 0, 17])
    q = torch.randn(3, heads, 576, device=CUDA).bfloat16()
    ql, qr = q[..., :512], q[..., 512:]
    out, lse = mla(ql, qr, table, lengths, layout, 1, scale=0.07)
    want, want_lse = reference.mla(ql[:, None], qr[:, None], table, lengths, layout, 1, scale=0.07)
    close(out, want[:, 0], tolerance(q.dtype))
    close(lse, want_lse[:, 0], 2e-3)


def test_a_context_past_four_gigabytes() -> None:
    layout = AttentionLayout(layers=1, kv_heads=8, head_dim=128, unit_tokens=64)
    count = (1 << 20) // 64 + 3
    assert count * layout.unit_stride > 1 << 32
    memory = torch.empty(count * layout.unit_stride + 4096, dtype=torch.uint8, device=CUDA)
    start = -memory.data_ptr() % 4096
    kv = memory[start : start + count * layout.unit_stride].view(torch.bfloat16).view(count, 2, 8, 64, 128)
    for part in kv.split(1024):
        part.copy_(torch.randn(part.shape, device=CUDA))
    order = torch.randperm(count, device=CUDA)
    table = (kv.data_ptr() + order * layout.unit_stride)[None].contiguous()
    length = count * 64 - 5
    q = torch.randn(1, 8, 128, device=CUDA).bfloat16() * 4
    out, _ = decode(q, table, torch.tensor([length], dtype=torch.int32, device=CUDA), layout, 0)
    for head in range(8):
        k = kv[:, 0, head][order].reshape(-1, 128)[:length].double()
        weights = torch.softmax(k @ q[0, head].double() * 128**-0.5, 0)
        want = weights @ kv[:, 1, head][order].reshape(-1, 128)[:length].double()
        close(out[0, head], want, 1e-2)


def test_a_captured_graph_serves_other_lengths_and_tables() -> None:
    layout = AttentionLayout(layers=1, kv_heads=2, head_dim=128)
    cache, other = paged(layout, [500, 30, 999]), paged(layout, [3, 999, 64], seed=1)
    q = torch.randn(3, 8, 128, device=CUDA).bfloat16()
    table, lengths = cache.table.clone(), cache.lengths.clone()
    out, lse = torch.empty_like(q), torch.empty(3, 8, device=CUDA)
    decode(q, table, lengths, layout, 0, out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(q, table, lengths, layout, 0, out=out, lse=lse)
    for now in (other, cache):
        table.zero_()
        table[:, : now.table.shape[1]] = now.table
        lengths.copy_(now.lengths)
        out.fill_(float("nan"))
        graph.replay()
        want, _ = reference.decode(q[:, None], now.table, now.lengths, now.layouts, 0, scale=128**-0.5)
        close(out, want[:, 0], tolerance(q.dtype))


@pytest.mark.parametrize("precision", ["bfloat16", "int8", "int4"])
def test_pages_in_pinned_host_memory_beside_pages_in_hbm(precision: Any) -> None:
    layout = AttentionLayout(layers=2, kv_heads=2, head_dim=128, dtype=precision)
    near = paged(layout, [400, 90])
    far = paged(layout, [400, 90], arena_device=torch.device("cpu"))
    assert far.arenas[0].memory.is_pinned()
    table = near.table.clone()
    table[:, ::3] = far.table[:, ::3]
    q = torch.randn(2, 8, 128, device=CUDA).bfloat16()
    for mixed in (far.table, table):
        out, _ = decode(q, mixed, near.lengths, layout, 1)
        want, _ = reference.decode(q[:, None], near.table, near.lengths, near.layouts, 1, scale=128**-0.5)
        close(out, want[:, 0], tolerance(q.dtype))


EXPORTER = """
import ctypes, sys, torch
torch.zeros(1, device="cuda")
cuda, size = ctypes.CDLL("libcuda.so.1"), int(sys.argv[1])
data = sys.stdin.buffer.read(size)
at, handle = ctypes.c_uint64(), (ctypes.c_char * 64)()
assert cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(size)) == 0
assert cuda.cuMemcpyHtoD_v2(at, data, ctypes.c_size_t(size)) == 0
assert cuda.cuIpcGetMemHandle(handle, at) == 0
print(bytes(handle).hex(), flush=True)
sys.stdin.buffer.read()
"""


class Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


def test_units_of_another_process_through_a_second_mapping() -> None:
    layout = AttentionLayout(layers=1, kv_heads=2, head_dim=128)
    cache = paged(layout, [400, 90])
    arena = cache.arenas[0]
    size = arena.stride * arena.count
    data = arena.memory[arena.start : arena.start + size].cpu().numpy().tobytes()
    child = subprocess.Popen([sys.executable, "-c", EXPORTER, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin and child.stdout
    try:
        child.stdin.write(data)
        child.stdin.flush()
        raw = bytes.fromhex(child.stdout.readline().decode())
        at, handle = ctypes.c_uint64(), Handle.from_buffer_copy(raw)
        driver = ctypes.CDLL("libcuda.so.1")
        assert driver.cuIpcOpenMemHandle_v2(ctypes.byref(at), handle, ctypes.c_uint(1)) == 0
        base = arena.memory.data_ptr() + arena.start
        table = torch.where(cache.table >= base, cache.table - base + at.value, cache.table)
        assert not torch.equal(table, cache.table)
        q = torch.randn(2, 8, 128, device=CUDA).bfloat16()
        want, _ = decode(q, cache.table, cache.lengths, layout, 0)
        arena.memory.fill_(0xFF)
        out, _ = decode(q, table, cache.lengths, layout, 0)
        assert torch.equal(out, want)
        torch.cuda.synchronize()
        assert driver.cuIpcCloseMemHandle(at) == 0
    finally:
        child.stdin.close()
        child.wait(30)


@pytest.mark.parametrize("to", ["float8_e4m3fn", "int8", "int4"])
def test_conversion_from_hbm_to_pinned_host_memory_and_back(to: Any) -> None:
    layout = AttentionLayout(layers=3, kv_heads=2, head_dim=128, unit_tokens=64)
    narrow = msgspec.structs.replace(layout, dtype=to)
    cache = paged(layout, [640])
    far = Arena(narrow.unit_stride, 10, torch.device("cpu"))
    middle = torch.tensor([far.take()[0] for _ in range(10)], dtype=torch.int64, device=CUDA)
    convert(cache.table[0, :10].contiguous(), layout, middle, narrow)
    for source, target in zip(cache.table[0, :10].tolist(), middle.tolist(), strict=True):
        raw = read_bytes(source, layout.unit_bytes).cpu()
        kv = torch.stack([torch.stack(reference.unpack(raw, layout, n)) for n in range(3)], 1).float()
        want = reference.pack(kv[0], kv[1], narrow)
        assert torch.equal(read_bytes(target, narrow.unit_bytes).cpu(), want[: narrow.unit_bytes])


def test_pieces_between_host_and_device() -> None:
    host = torch.randint(0, 256, (100, 16384), dtype=torch.uint8).pin_memory()
    device = torch.zeros(100, 16384, dtype=torch.uint8, device=CUDA)
    rows = torch.randperm(100)
    at = rows.to(CUDA) * 16384
    copy_pieces(host.data_ptr() + at, device.data_ptr() + torch.arange(100, device=CUDA) * 16384, 16384, programs=16)
    assert torch.equal(device.cpu(), host[rows])
    host.zero_()
    copy_pieces(device.data_ptr() + torch.arange(100, device=CUDA) * 16384, host.data_ptr() + at, 16384, programs=16)
    torch.cuda.synchronize()
    assert torch.equal(host[rows], device.cpu())
