"""KV caches as vLLM lays them on a GPU, through a real kvtierd and back: bit-exact in every arrangement, by the copy engines
and by the kernel, into another process too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtier_client import Client, EngineLayout, NamespaceClient
from kvtier_client.vllm.blocks import BlockMap, block_map, copy
from tests.gpu.conftest import with_hbm
from tests.system.conftest import Daemon, MakeDaemon
from tests.vllm.shapes import SHAPES, Shape, by_block, caches

BLOCKS, LAYERS = 96, 16
FROM = [*range(40, 84), 3, 2, 1, 90]  # 48: the last pages have two units
TO = [*range(8), 95, 94, *range(20, 56), 60, 62]
LARGE = {"all layers in a block, 1 MiB": Shape("BLHNC", heads=8, content=256)}


@pytest.fixture
def host(make: MakeDaemon) -> Daemon:
    """Pinned host memory only, as where vLLM has all of the GPU's memory."""
    return make(host="512MiB", slab="16MiB").start()


def space_of(client: Client, blocks: BlockMap) -> NamespaceClient:
    return client.namespace(EngineLayout(blocks.unit_bytes, blocks.arrangement), model="copies", cap_tokens=64)


def units(pages: Any, stride: int) -> list[int]:
    return [page.device_address + stride * unit for page in pages for unit in range(page.units)]


def keys_of(space: NamespaceClient, blocks: int) -> list[bytes]:
    return space.keys([7] * (16 * blocks))


def store(space: NamespaceClient, blocks: BlockMap, numbers: list[int], stream: torch.cuda.Stream) -> None:
    with space.reserve(keys_of(space, len(numbers)), timeout=20) as reservation:
        where = units(reservation.pages, space.spec.layout.unit_stride)
        copy(blocks, numbers, where, load=False, stream=stream)
        assert not any(reservation.commit(after=stream))


def fetch(space: NamespaceClient, blocks: BlockMap, numbers: list[int], stream: torch.cuda.Stream) -> None:
    with space.borrow(keys_of(space, len(numbers)), timeout=20) as lease:
        where = units(lease.pages, space.spec.layout.unit_stride)
        assert len(where) == len(numbers)
        copy(blocks, numbers, where, load=True, stream=stream)
        stream.synchronize()


def round_trip(daemon: Daemon, shape: Shape) -> None:
    made = caches(shape, "cuda", layers=LAYERS, blocks=BLOCKS)
    blocks = block_map(made, list(made), BLOCKS)
    before = {layer: by_block(tensor, BLOCKS) for layer, tensor in made.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    store(space_of(daemon.client(device=0), blocks), blocks, FROM, stream)
    fetch(space_of(daemon.client(device=0), blocks), blocks, TO, stream)
    for layer, tensor in made.items():
        wanted = before[layer].clone()
        wanted[TO] = before[layer][FROM]
        assert torch.equal(by_block(tensor, BLOCKS), wanted), layer


@pytest.mark.parametrize("name", [*SHAPES, *LARGE])
def test_blocks_come_back_bit_for_bit_through_pinned_host_memory(host: Daemon, name: str) -> None:
    round_trip(host, (SHAPES | LARGE)[name])


@pytest.mark.parametrize("name", ["NHD", "all layers in a block", "a size that no vector load takes"])
def test_and_through_the_gpu_tier(make: MakeDaemon, name: str) -> None:
    round_trip(with_hbm(make).start(), SHAPES[name])


def test_another_process_reads_them(host: Daemon) -> None:
    made = caches(SHAPES["HND"], "cuda", layers=LAYERS, blocks=BLOCKS)
    blocks = block_map(made, list(made), BLOCKS)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    store(space_of(host.client(device=0), blocks), blocks, FROM, stream)
    told = [by_block(tensor, BLOCKS)[FROM].long().sum().item() for tensor in made.values()]
    other = host.worker(bare=True, device=0)
    other.do(
        "import torch; from tests.gpu.test_vllm_copies import *\n"
        "made = caches(SHAPES['HND'], 'cuda', layers=LAYERS, blocks=BLOCKS)\n"
        "for tensor in made.values(): tensor.zero_()\n"
        "blocks = block_map(made, list(made), BLOCKS); stream = torch.cuda.Stream(); torch.cuda.synchronize()\n"
        "fetch(space_of(client, blocks), blocks, TO, stream)"
    )
    assert other.do("result = [by_block(t, BLOCKS)[TO].long().sum().item() for t in made.values()]") == told
    assert other.do("result = [by_block(t, BLOCKS).long().sum().item() for t in made.values()]") == told


def test_a_save_reads_what_the_kernels_before_it_have_written(host: Daemon) -> None:
    """A late kernel fills the blocks; the copy waits for it on the GPU, and the commit for the copy."""
    made = caches(SHAPES["HND"], "cuda", layers=LAYERS, blocks=BLOCKS)
    blocks = block_map(made, list(made), BLOCKS)
    compute, copies = torch.cuda.current_stream(), torch.cuda.Stream()
    writer, reader = (space_of(host.client(device=0), blocks) for _ in range(2))
    for turn in range(50):
        torch.cuda._sleep(20_000_000)
        for tensor in made.values():
            tensor.fill_(turn)
        copies.wait_event(compute.record_event())
        store(writer, blocks, FROM, copies)
        fetch(reader, blocks, TO, copies)
        assert all(bool((tensor[TO] == turn).all()) for tensor in made.values()), turn
        writer.evict()
