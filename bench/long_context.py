"""Decode over a context whose pages exceed the HBM tier: most of them stay in pinned host memory.

    python bench/long_context.py [--tokens 1048576] [--layers 4] [--hbm 4GiB] [--quick]

The geometry of a layer is Llama-3-70B's: 64 query heads, 8 kv heads of 128, bfloat16, 4 KiB of KV a token and layer. The
context's pages are real ones: reserved from kvtierd, some in HBM and the rest in host memory, published, and borrowed where
they lie. For each layer a token's attention over the whole context is timed three ways:

    in place    one launch over the table: units in HBM and in host memory stand side by side
    streamed    the host's share of the next layer is copied to HBM while this layer is attended to; what is in HBM and what
                was streamed give a state each, and the states are merged by their log-sum-exps
    all in HBM  the same layer with all of its units in HBM: what there would be if it fitted

The limit is the host's link: a copy of 1 GiB from pinned memory in the same run. Answers are compared with plain PyTorch in
float64 over all of the context, for the first layer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from core import daemon, say

from kvtier.layout import AttentionLayout
from kvtier.sizes import format_size, parse_size
from kvtier_client import Client, NamespaceClient
from kvtier_client.pages import Lease
from kvtier_kernels.copy import copy_pieces
from kvtier_kernels.decode import decode
from kvtier_kernels.merge import merge_states
from kvtier_kernels.reference import attend

HEADS, KV_HEADS, DIM, UNIT = 64, 8, 128, 64
GIB = 1 << 30


def store(space: NamespaceClient, keys: list[bytes], tier: str, start: int, stop: int) -> None:
    """Pages `start` to `stop` of random KV, in `tier`, published."""
    noise = torch.randn(1 << 22, device="cuda").bfloat16()
    turn = start
    while start < stop:
        with space.reserve(keys[: min(stop, start + 128)], start=start, tier=tier, timeout=60) as reservation:
            for page in reservation:
                flat = page.torch().view(-1)
                for at in range(0, len(flat), len(noise)):
                    piece = flat[at : at + len(noise)]
                    # every page another part of the noise, so that a page in the wrong place would be seen
                    piece.copy_(noise.roll(4099 * turn)[: len(piece)])
                turn += 1
            reservation.commit(after=torch.cuda.current_stream())
        start += len(reservation.status)


class Context:
    """A borrowed context: its table, and which of its units lie in host memory."""

    def __init__(self, lease: Lease, layout: AttentionLayout, tokens: int) -> None:
        self.layout = layout
        self.tokens = tokens
        self.table = lease.table()
        there = [page.tier == "hbm" for page in lease for _ in range(page.units)]
        in_hbm = torch.tensor(there, device="cuda")
        # Which of two parts of a context comes first does not matter to attention without a window.
        self.near = self.table[in_hbm][None].contiguous()
        self.far = self.table[~in_hbm]
        self.piece = layout.unit_bytes // layout.layers
        one = AttentionLayout(1, KV_HEADS, DIM, layout.dtype, UNIT)
        self.one = one
        stage = len(self.far) * one.unit_stride
        self.stages = [torch.empty(stage + 4096, dtype=torch.uint8, device="cuda") for _ in range(2)]
        bases = [stage.data_ptr() + -stage.data_ptr() % 4096 for stage in self.stages]
        steps = torch.arange(len(self.far), device="cuda") * one.unit_stride
        self.staged = [base + steps for base in bases]
        self.whole = torch.tensor([tokens], dtype=torch.int32, device="cuda")
        self.lengths = [
            torch.tensor([count * UNIT], dtype=torch.int32, device="cuda")
            for count in (self.near.shape[1], len(self.far))
        ]
        self.kept: torch.Tensor | None = None
        self.copying = torch.cuda.Stream()
        self.copied = [torch.cuda.Event() for _ in range(2)]
        self.free = [torch.cuda.Event() for _ in range(2)]

    def in_place(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        return decode(q, self.table[None], self.whole, self.layout, layer)[0]

    def stream(self, layer: int) -> None:
        """Start bringing the host's share of a layer to its half of the stage."""
        half = layer % 2
        self.copying.wait_event(self.free[half])
        with torch.cuda.stream(self.copying):
            copy_pieces(self.far + layer * self.piece, self.staged[half], self.piece, programs=16)
            self.copied[half].record()

    def streamed(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        half = layer % 2
        states = []
        if self.near.shape[1]:
            states.append(decode(q, self.near, self.lengths[0], self.layout, layer))
        torch.cuda.current_stream().wait_event(self.copied[half])
        states.append(decode(q, self.staged[half][None], self.lengths[1], self.one, 0))
        self.free[half].record()
        out, _ = merge_states(
            torch.stack([out.float() for out, _ in states]), torch.stack([lse for _, lse in states]), dtype=q.dtype
        )
        return out


def a_token(context: Context, layers: int, way: str, queries: list[torch.Tensor]) -> list[torch.Tensor]:
    """One token's attention through all layers."""
    if way == "in place":
        return [context.in_place(queries[layer], layer) for layer in range(layers)]
    for event in context.free:
        event.record()
    context.stream(0)
    outs = []
    for layer in range(layers):
        if layer + 1 < layers:
            context.stream(layer + 1)
        outs.append(context.streamed(queries[layer], layer))
    return outs


def timed(act: Callable[[], object], times: int) -> float:
    """Seconds, median."""
    act()
    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        started = time.perf_counter()
        act()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def link() -> float:
    """GB/s of a plain copy from pinned memory."""
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    near = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    return GIB / timed(lambda: near.copy_(host, non_blocking=True), 5) / 1e9


def exact(lease: Lease, q: torch.Tensor, layer: int) -> torch.Tensor:
    """The same attention in float64, page by page, by the plain reference."""
    outs, lses = [], []
    group: list[torch.Tensor] = []
    pages = list(lease)
    for at, page in enumerate(pages):
        group.append(page.torch()[:, layer].cuda())  # [unit, K or V, head, token, dim]
        if len(group) == 256 or at == len(pages) - 1:
            units = torch.cat(group).double()
            k, v = (units[:, kv].transpose(1, 2).flatten(0, 1) for kv in (0, 1))
            where = torch.tensor([len(k) - 1], device="cuda")
            out, lse = attend(q.float(), k, v, where, scale=DIM**-0.5)
            outs.append(out.float())
            lses.append(lse.float())
            group = []
    return merge_states(torch.stack(outs), torch.stack(lses))[0]


def bench(client: Client, tokens: int, layers: int, share: int) -> int:
    layout = AttentionLayout(layers, KV_HEADS, DIM, "bfloat16", UNIT)
    space = client.namespace(layout, model="llama-3-70b-layers", revision="random", cap_tokens=256)
    keys = space.keys([5] * tokens)
    pages = len(keys)
    near = min(pages, max(1, share // (layout.unit_stride * 4)))
    say(f"storing {tokens:,} tokens: {pages} pages, the last {near} in HBM")
    started = time.perf_counter()
    store(space, keys, "host", 0, pages - near)
    store(space, keys, "hbm", pages - near, pages)
    say(f"stored in {time.perf_counter() - started:.1f} s")
    with space.borrow(keys, timeout=60) as lease:
        assert len(lease) == pages, f"{len(lease)} of {pages} pages"
        context = Context(lease, layout, lease.tokens)
        far = len(context.far) * context.piece
        generator = torch.Generator("cuda").manual_seed(0)
        queries = [torch.randn(1, HEADS, DIM, device="cuda", generator=generator).bfloat16() for _ in range(layers)]
        limit = link()
        print(
            f"{lease.tokens:,} tokens, {layers} layers: {format_size(layers * (far + context.near.numel() * context.piece))} "
            f"of KV; of each layer's, {format_size(far)} in host memory; link {limit:.1f} GB/s",
            flush=True,
        )
        print(f"{'':14} {'ms a layer':>12} {'GB/s from host':>16} {'share of link':>14} {'error':>10}")
        wanted = exact(lease, queries[0], 0)
        worst = 0.0
        for way in ("in place", "streamed"):
            got = a_token(context, layers, way, queries)[0].float()
            error = float((got - wanted).norm() / wanted.norm())
            worst = max(worst, error)
            each = timed(lambda way=way: a_token(context, layers, way, queries), 5) / layers  # type: ignore[misc]
            rate = far / each / 1e9
            print(f"{way:14} {each * 1e3:12.2f} {rate:16.1f} {rate / limit:14.2f} {error:10.1e}", flush=True)
        context.stream(0)
        context.copying.synchronize()
        local = _one_layer_in_hbm(context)
        each = timed(lambda: decode(queries[0], local, context.whole, context.one, 0), 9)
        rate = context.whole.item() * 4096 / each / 1e9
        print(f"{'all in HBM':14} {each * 1e3:12.2f} {'-':>16} {'-':>14}   ({rate:,.0f} GB/s of KV)", flush=True)
    return 0 if worst < 1e-2 else 1


def _one_layer_in_hbm(context: Context) -> torch.Tensor:
    """The first layer's units, all of them in HBM: those streamed, and copies of the others."""
    count = context.near.shape[1]
    memory = torch.empty(count * context.one.unit_stride + 4096, dtype=torch.uint8, device="cuda")
    context.kept = memory
    base = memory.data_ptr() + -memory.data_ptr() % 4096
    mine = base + torch.arange(count, device="cuda") * context.one.unit_stride
    if count:
        copy_pieces(context.near[0].contiguous(), mine, context.piece)
    return torch.cat((context.staged[0], mine))[None].contiguous()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=0, help="of context (default 1048576)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hbm", default="4GiB", help="of the HBM tier, which the pages exceed")
    parser.add_argument("--quick", action="store_true", help="131,072 tokens")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a GPU: only there does memory have two distances", file=sys.stderr)
        return 2
    tokens = given.tokens or (131072 if given.quick else 1 << 20)
    hbm = parse_size("512MiB" if given.quick else given.hbm)
    host = tokens * given.layers * 4096 + (2 << 30)
    first = ("tiers.hbm.medium=cuda", "tiers.hbm.device=0", f"tiers.hbm.capacity={hbm}", "tiers.hbm.slab=128MiB")
    settings = ("tiers.host.slab=512MiB", "tiers.host.write_queue=1GiB")
    with (
        tempfile.TemporaryDirectory(prefix="kvb-") as directory,
        daemon(Path(directory), *settings, host=str(host), first=first) as running,
        Client(running.endpoint, name="long", device=0) as client,
    ):
        return bench(client, tokens, given.layers, hbm * 3 // 4)


if __name__ == "__main__":
    sys.exit(main())
