"""Copies between an engine's blocks and units, in every arrangement that vLLM has, on the CPU; on a GPU the same is in
`tests/gpu/test_vllm_copies.py`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtier.errors import LayoutError
from kvtier_client.vllm.blocks import adjoining, block_map, copy
from tests.vllm.shapes import BLOCKS, SHAPES, by_block, caches

FROM, TO = [3, 4, 5, 20, 0], [7, 1, 2, 3, 23]


@pytest.mark.parametrize("name", SHAPES)
def test_blocks_come_back_byte_for_byte_wherever_their_bytes_lie(name: str) -> None:
    made = caches(SHAPES[name])
    blocks = block_map(made, list(made), BLOCKS)
    before = {layer: by_block(tensor, BLOCKS) for layer, tensor in made.items()}
    assert blocks.unit_bytes == sum(rows.shape[1] for rows in before.values())
    units = torch.zeros((len(FROM), blocks.unit_bytes + 4096), dtype=torch.uint8)
    addresses = [unit.data_ptr() for unit in units]
    copy(blocks, FROM, addresses, load=False)
    assert not units[:, blocks.unit_bytes :].any(), "nothing beyond a unit's bytes is written"
    copy(blocks, TO, addresses, load=True)
    for layer, tensor in made.items():
        after, wanted = by_block(tensor, BLOCKS), before[layer].clone()
        wanted[TO] = before[layer][FROM]
        assert torch.equal(after, wanted), layer


@pytest.mark.parametrize("name", ["NHD", "HND", "all layers in a block", "MLA"])
def test_a_unit_is_its_layers_one_after_another(name: str) -> None:
    made = caches(SHAPES[name])
    blocks = block_map(made, list(made), BLOCKS)
    unit = torch.zeros(blocks.unit_bytes, dtype=torch.uint8)
    copy(blocks, [9], [unit.data_ptr()], load=False)
    order = "BHNC" if "N" not in SHAPES[name].order[:3] else "BNHC"
    wanted = [tensor[9].permute(*["HNC".index(axis) for axis in order[1:]]).contiguous() for tensor in made.values()]
    assert torch.equal(unit, torch.cat([part.view(torch.uint8).flatten() for part in wanted]))


def test_what_the_bytes_mean_is_told_apart_and_where_they_lie_is_not() -> None:
    told = {name: block_map(made := caches(shape), list(made), BLOCKS).arrangement for name, shape in SHAPES.items()}
    same = {"HND": "all layers in a block", "NHD": "all layers in a block, NHD", "MLA": "MLA, all layers in a block"}
    for one, other in same.items():
        assert told[one] == told[other]
    assert told["NHD"] != told["HND"] != told["fp8"]
    assert (
        len(set(told.values())) == len(told) - len(same) - 2
    )  # padding and fp8 for all layers are not told apart either


def test_blocks_that_hold_all_layers_are_one_piece() -> None:
    made = caches(SHAPES["all layers in a block"])
    assert len(block_map(made, list(made), BLOCKS).pieces) == 1
    made = caches(SHAPES["HND"])
    assert len(block_map(made, list(made), BLOCKS).pieces) == len(made)


def test_layers_that_share_memory_are_copied_once() -> None:
    made = caches(SHAPES["HND"])
    once = block_map(made, list(made), BLOCKS)
    made["model.layers.4.attn"] = made["model.layers.0.attn"]
    assert block_map(made, list(made), BLOCKS) == once


def test_runs_that_adjoin_at_both_ends_are_one_copy() -> None:
    sources, targets = np.array([0, 10, 20, 40, 50]), np.array([100, 110, 130, 140, 150])
    joined = [each.tolist() for each in adjoining(sources, targets, 10)]
    assert joined == [[0, 20, 40], [100, 130, 140], [20, 10, 20]]
    nothing = np.array([], np.int64)
    assert [len(each) for each in adjoining(nothing, nothing, 10)] == [0, 0, 0]


def test_a_block_that_there_is_not_is_refused_before_a_byte_moves() -> None:
    made = caches(SHAPES["HND"])
    blocks = block_map(made, list(made), BLOCKS)
    for numbers in ([BLOCKS], [-1], [0, 1]):
        with pytest.raises(LayoutError):
            copy(blocks, numbers, [0], load=True)


def test_tensors_that_cannot_be_blocks_are_refused() -> None:
    with pytest.raises(LayoutError, match="no axis of 24 blocks"):
        block_map({"a": torch.zeros(7, 5)}, ["a"], BLOCKS)
    with pytest.raises(LayoutError, match="stand"):
        block_map({"a": torch.zeros(100).as_strided((BLOCKS, 8), (4, 1))}, ["a"], BLOCKS)
    with pytest.raises(LayoutError, match="no tensors"):
        block_map({}, [], BLOCKS)
