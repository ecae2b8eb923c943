"""What copies between vLLM's blocks on a GPU and kvtier's pages reach, beside one pinned copy in the same run.

    python bench/vllm_copies.py [--json FILE] [--directory DIR]

Blocks as vLLM lays them, of models that people run, at scattered places as its block tables have them. Save: blocks into
reserved pages of pinned host memory; load: the other way. The limit is one cudaMemcpyAsync of 1 GiB, per direction; the peer
of a row is one such call for each piece, what a connector without a kernel would do. Bytes are compared before they are
timed. Needs no vLLM; under a minute on an H200.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
from core import Row, daemon, run, say
from gpu import limits

from kvtier import device
from kvtier_client import Client, EngineLayout
from kvtier_client.vllm.blocks import BlockMap, block_map, copy, transfers
from tests.vllm.shapes import Shape, by_block, caches

MODELS = {
    "Llama-3-8B, NHD": (32, Shape("LBNHC", heads=8, content=256)),
    "Llama-3-8B, HND": (32, Shape("LBHNC", heads=8, content=256)),
    "Llama-3-8B, blocks of all layers": (32, Shape("BLHNC", heads=8, content=256)),
    "Llama-3-8B, fp8, HND": (32, Shape("LBHNC", dtype=torch.uint8, heads=8, content=256)),
    "Llama-3-70B TP8, HND": (80, Shape("LBHNC", heads=1, content=256)),
    "Llama-3-70B TP8, blocks of all layers": (80, Shape("BLHNC", heads=1, content=256)),
    "DeepSeek-V3, MLA": (61, Shape("LBHNC", heads=1, content=576)),
    "DeepSeek-V3, MLA, blocks of all layers": (61, Shape("BLHNC", heads=1, content=576)),
}
BYTES = 512 << 20
"""Copied a turn."""
TURNS = 5


def timed(copies: Callable[[], None], nbytes: int) -> float:
    """GB/s, the median of some turns, from the call to the last byte."""
    found = []
    for _ in range(TURNS + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        copies()
        torch.cuda.synchronize()
        found.append(nbytes / (time.perf_counter() - started) / 1e9)
    return statistics.median(found[1:])


def singly(blocks: BlockMap, numbers: list[int], units: list[int], *, load: bool, stream: torch.cuda.Stream) -> None:
    """One copy for each piece."""
    cuda = device.runtime()
    for theirs, ours, nbytes in transfers(blocks, numbers, units):
        for one, other in zip(theirs.tolist(), ours.tolist(), strict=True):
            source, target = (other, one) if load else (one, other)
            cuda.memcpyAsync(target, source, nbytes, cuda.memcpyDefault, stream.cuda_stream)


def rows(endpoint: str, limit: dict[str, float]) -> Iterator[Row]:
    for name, (layers, shape) in MODELS.items():
        say(name)
        yield from of_model(name, layers, shape, endpoint, limit)
        torch.cuda.empty_cache()


def of_model(name: str, layers: int, shape: Shape, endpoint: str, limit: dict[str, float]) -> Iterator[Row]:
    stream = torch.cuda.Stream()
    width = torch.empty(0, dtype=shape.dtype).element_size()
    count = BYTES // (layers * shape.heads * shape.tokens * shape.content * width)
    made = caches(shape, "cuda", layers=layers, blocks=2 * count)
    torch.cuda.synchronize()
    blocks = block_map(made, list(made), 2 * count)
    with Client(endpoint, device=0) as client:
        space = client.namespace(EngineLayout(blocks.unit_bytes, blocks.arrangement), model=name)
        with space.reserve(space.keys([1] * (16 * count)), timeout=60) as reservation:
            stride = space.spec.layout.unit_stride
            units = [page.device_address + stride * n for page in reservation for n in range(page.units)]
            numbers = random.Random(1).sample(range(2 * count), len(units))
            check(blocks, made, numbers, units, stream)
            for text, load, way in (("save", False, "down"), ("load", True, "up")):
                for how, does in (("", copy), (", piece by piece", singly)):
                    if does is copy or len(blocks.pieces) > 1:
                        work = functools.partial(does, blocks, numbers, units, load=load, stream=stream)
                        moved = timed(work, blocks.unit_bytes * len(units))
                        yield Row(f"{name}: {text}{how}", moved, limit[way], "GB/s (limit: pinned copy)", "", True)


def check(
    blocks: BlockMap, made: dict[str, torch.Tensor], numbers: list[int], units: list[int], stream: torch.cuda.Stream
) -> None:
    """There and back, bit for bit."""
    before = {layer: by_block(tensor, blocks.blocks) for layer, tensor in made.items()}
    copy(blocks, numbers, units, load=False, stream=stream)
    stream.synchronize()
    for tensor in made.values():
        tensor.view(torch.uint8).zero_()
    torch.cuda.synchronize()
    copy(blocks, numbers, units, load=True, stream=stream)
    torch.cuda.synchronize()
    for layer, tensor in made.items():
        after = by_block(tensor, blocks.blocks)
        assert torch.equal(after[numbers], before[layer][numbers]), layer
        after[numbers] = 0
        assert not after.any(), "other blocks were written"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--directory", help="where the daemon works (default: a temporary one)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=given.directory) as place:
        settings = ("tiers.host.slab=256MiB",)
        with daemon(Path(place), *settings, host="3GiB") as running:
            limit = limits()
            print(f"pinned copy of 1 GiB: up {limit['up']:.1f} GB/s, down {limit['down']:.1f} GB/s", flush=True)
            return run([lambda: list(rows(running.endpoint, limit))], given.json)


if __name__ == "__main__":
    sys.exit(main())
