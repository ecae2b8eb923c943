"""The vLLM connector's worker on a GPU: in order with the engine's stream, whatever the copies' own streams do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvtier_client.vllm.messages import Load, Save
from tests.system.conftest import Daemon, MakeDaemon
from tests.vllm.shapes import by_block
from tests.vllm.test_worker import BLOCKS, MakeSide, Side, run


@pytest.fixture
def side(make: MakeDaemon) -> Iterator[MakeSide]:
    daemon: Daemon = make(host="256MiB", slab="16MiB").start()
    made: list[Side] = []

    def factory(**options: object) -> Side:
        made.append(Side(daemon.endpoint, device="cuda", **options))
        return made[-1]

    yield factory
    for one in made:
        one.close()


@pytest.mark.parametrize("shapes", [("HND", "fp8"), ("all layers in a block",), ("MLA",)])
def test_what_one_saves_another_loads_into_other_blocks(side: MakeSide, shapes: tuple[str, ...]) -> None:
    one, other = side(shapes=shapes), side(shapes=shapes)
    for tensors in other.tensors:
        for tensor in tensors.values():
            tensor.zero_()
    source, target = list(range(48)), list(range(10, 58))
    groups = range(len(shapes))
    saves = tuple(run(1, 0, source, group) for group in groups)
    assert max(map(len, saves[0].blocks)) == 2, "pages of several blocks are meant to be among them"
    one.step(saves=[Save("a", "", saves)])
    one.saved(sum(len(pages.hashes) for pages in saves))
    other.step(loads=[Load("b", "", tuple(run(1, 0, target, group) for group in groups))])
    assert other.results("b") == (set(), set())
    for mine, theirs in zip(one.tensors, other.tensors, strict=True):
        for name, tensor in mine.items():
            assert torch.equal(by_block(tensor, BLOCKS)[source], by_block(theirs[name], BLOCKS)[target])
            assert not theirs[name].view(torch.uint8)[:10].any()


def test_a_save_follows_the_kernels_of_its_step_and_a_load_those_before_it(side: MakeSide) -> None:
    """A late kernel writes the blocks that are saved, and another one those that are loaded into: neither is overtaken."""
    one, other = side(), side()
    for turn in range(1, 40):
        torch.cuda._sleep(20_000_000)
        for tensor in one.tensors[0].values():
            tensor.fill_(turn)
        one.step(saves=[Save("a", "", (run(turn, 0, [1, 2, 3]),))])
        one.saved(3)
        torch.cuda._sleep(20_000_000)
        for tensor in other.tensors[0].values():
            tensor.fill_(-1)
        other.step(loads=[Load("b", "", (run(turn, 0, [7, 8, 9]),))])
        assert other.results("b") == (set(), set())
        for tensor in other.tensors[0].values():
            assert bool((tensor[7:10] == turn).all()) and bool((tensor[10:] == -1).all())


def test_a_block_is_not_written_while_a_save_reads_it(side: MakeSide) -> None:
    """The next step writes the blocks at once; the pages have the bytes of before."""
    one, other = side(), side()
    for turn in range(1, 40):
        for tensor in one.tensors[0].values():
            tensor.fill_(turn)
        torch.cuda._sleep(20_000_000)
        one.step(saves=[Save("a", "", (run(turn, 0, [1, 2, 3]),))])
        one.step(written=[2])
        for tensor in one.tensors[0].values():
            tensor.fill_(-1)
        one.saved(3)
        other.step(loads=[Load("b", "", (run(turn, 0, [7, 8, 9]),))])
        missing, _ = other.results("b")
        for tensor in other.tensors[0].values():
            for block in {7, 8, 9} - missing:
                assert bool((tensor[block] == turn).all()), f"turn {turn}, block {block}"
