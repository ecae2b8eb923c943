"""The worker's side over tensors as vLLM lays them, against a real kvtierd: bytes, order, and what is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from kvtier.keys import Namespace
from kvtier.layout import EngineLayout
from kvtier.schedule import Schedule
from kvtier_client.vllm import blocks as copies
from kvtier_client.vllm.blocks import block_map
from kvtier_client.vllm.link import Link
from kvtier_client.vllm.messages import Load, Pages, Save, Step
from kvtier_client.vllm.options import Options
from kvtier_client.vllm.stats import Tally
from kvtier_client.vllm.worker import Cache, Worker
from tests.system.conftest import Daemon, MakeDaemon, eventually, make, place
from tests.vllm.shapes import SHAPES, by_block, bytes_of, caches

__all__ = ["make", "place"]
BLOCKS = 64


class Side:
    """A worker of one group or two, its tensors, and the steps it is told."""

    def __init__(self, endpoint: str, shapes: Sequence[str] = ("HND",), wait: float = 5.0, device: str = "cpu") -> None:
        self.tensors = [caches(SHAPES[name], device, blocks=BLOCKS) for name in shapes]
        self.tally = Tally()
        self.link = Link(endpoint, "worker", 0 if device == "cuda" else None)
        made = {}
        for number, tensors in enumerate(self.tensors):
            blocks = block_map(tensors, list(tensors), BLOCKS)
            layout = EngineLayout(blocks.unit_bytes, blocks.arrangement, 16)
            made[number] = Cache(blocks, Namespace(layout=layout, model="m", extra={"group": str(number)}))
        self.worker = Worker(made, Options(wait=wait), self.link, self.tally, saves=True, loads=True)
        self.steps = 0

    def step(self, *, saves: Sequence[Save] = (), loads: Sequence[Load] = (), written: Sequence[int] = ()) -> None:
        self.steps += 1
        step = Step(self.steps, "", list(loads), list(saves), list(written))
        self.worker.begin(step)
        self.worker.start_loads(step)
        self.worker.start_saves(step)

    def results(self, *requests: str) -> tuple[set[int], set[str]]:
        """(blocks not filled, requests they are of) when the loads of `requests` are over."""
        finished: set[str] = set()
        missing: set[int] = set()
        failed: set[str] = set()

        def over() -> bool:
            one = self.worker.results()
            finished.update(one.finished)
            missing.update(one.missing)
            failed.update(one.failed)
            return finished == set(requests)

        eventually(over, "loads are over")
        return missing, failed

    def saved(self, pages: int) -> None:
        counts: dict[str, float] = {}

        def reached() -> bool:
            for name, count in self.tally.take().items():
                counts[name] = counts.get(name, 0) + count
            return counts.get("saved_pages", 0) + counts.get("known_pages", 0) + counts.get("dropped_pages", 0) >= pages

        eventually(reached, f"{pages} pages are saved or not: {counts}")

    def close(self) -> None:
        self.worker.close()
        self.link.close()


MakeSide = Callable[..., Side]


@pytest.fixture
def side(daemon: Daemon) -> Iterator[MakeSide]:
    made: list[Side] = []

    def factory(**options: Any) -> Side:
        made.append(Side(daemon.endpoint, **options))
        return made[-1]

    yield factory
    for one in made:
        one.close()


@pytest.fixture
def daemon(make: MakeDaemon) -> Daemon:
    return make(host="64MiB", slab="1MiB").start()


def run(seed: int, first: int, blocks: Sequence[int], group: int = 0) -> Pages:
    """Pages from number `first` on, of the sequence `seed`, over `blocks`: one block each, later ones more."""
    schedule, rest = Schedule(), list(blocks)
    pages: list[tuple[int, ...]] = []
    while rest:
        size = 1 << schedule.order(first + len(pages))
        pages.append(tuple(rest[:size]))
        del rest[:size]
    digests = [bytes([seed]) + n.to_bytes(31) for n in range(first + len(pages))]
    return Pages(group, first, digests[first - 1] if first else b"", tuple(digests[first:]), tuple(pages))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Byte for byte: random bytes may be no number."""
    return torch.equal(bytes_of(one), bytes_of(other))


def nothing_is_held(daemon: Daemon) -> bool:
    sessions = daemon.client().sessions()["sessions"]
    return not any(one["leases"] or one["reserved_pages"] for one in sessions)


def test_what_one_saves_another_loads_into_other_blocks(side: MakeSide, daemon: Daemon) -> None:
    one, other = side(), side()
    for tensor in other.tensors[0].values():
        tensor.zero_()
    one.step(saves=[Save("a", "", (run(1, 0, range(10, 20)),))])
    one.step(saves=[Save("a", "", (run(1, 10, [40, 42]),))])
    one.saved(12)
    other.step(loads=[Load("b", "", (run(1, 0, range(30, 42)),))])
    assert other.results("b") == (set(), set())
    for mine, theirs in zip(one.tensors[0].values(), other.tensors[0].values(), strict=True):
        assert torch.equal(by_block(mine, BLOCKS)[[*range(10, 20), 40, 42]], by_block(theirs, BLOCKS)[30:42])
        assert not theirs[:30].any() and not theirs[42:].any()
    assert nothing_is_held(daemon)


def test_pages_that_are_there_are_not_copied_again(side: MakeSide) -> None:
    one = side()
    one.step(saves=[Save("a", "", (run(1, 0, range(8)),))])
    one.saved(8)
    one.step(saves=[Save("b", "", (run(1, 0, range(20, 30)),))])
    counts: dict[str, float] = {}
    eventually(lambda: counts.update(one.tally.take()) or "saved_pages" in counts, "the second save")
    assert counts["saved_pages"] == 2 and counts["known_pages"] == 8 and counts["dropped_pages"] == 0


def test_blocks_whose_pages_are_gone_are_missing_and_no_other(side: MakeSide) -> None:
    one = side()
    one.step(saves=[Save("a", "", (run(1, 0, range(4)),))])
    one.saved(4)
    one.step(loads=[Load("b", "", (run(1, 0, range(30, 40)),)), Load("c", "", (run(2, 0, [50, 51]),))])
    assert one.results("b", "c") == ({*range(34, 40), 50, 51}, {"b", "c"})


def test_blocks_that_are_not_wanted_are_left_alone(side: MakeSide) -> None:
    one = side()
    one.step(saves=[Save("a", "", (run(1, 0, range(4)),))])
    one.saved(4)
    before = {name: tensor.clone() for name, tensor in one.tensors[0].items()}
    one.step(loads=[Load("b", "", (run(1, 0, [-1, -1, 30, 31]),))])
    assert one.results("b") == (set(), set())
    for name, tensor in one.tensors[0].items():
        before[name][30:32] = before[name][2:4]
        assert same(tensor, before[name])


def test_an_adapter_and_a_reset_have_pages_of_their_own(side: MakeSide) -> None:
    one = side()
    one.step(saves=[Save("a", "adapter", (run(1, 0, range(4)),))])
    one.saved(4)
    one.step(loads=[Load("b", "", (run(1, 0, [30]),)), Load("c", "another", (run(1, 0, [31]),))])
    assert one.results("b", "c")[0] == {30, 31}
    one.step(loads=[Load("d", "adapter", (run(1, 0, [32]),))])
    assert one.results("d") == (set(), set())


def test_groups_keep_to_themselves(side: MakeSide) -> None:
    one = side(shapes=("HND", "fp8"))
    one.step(saves=[Save("a", "", (run(1, 0, [1, 2]), run(1, 0, [3, 4], group=1)))])
    one.saved(4)
    before = [{name: tensor.clone() for name, tensor in group.items()} for group in one.tensors]
    one.step(loads=[Load("b", "", (run(1, 0, [11, 12]), run(1, 0, [13, 14], group=1)))])
    assert one.results("b") == (set(), set())
    for group, (source, target) in enumerate(((1, 11), (3, 13))):
        for name, tensor in one.tensors[group].items():
            before[group][name][target : target + 2] = before[group][name][source : source + 2]
            assert same(tensor, before[group][name])


def test_a_block_is_not_written_while_a_save_reads_it(side: MakeSide, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request is over or preempted, and the next step writes it: the step waits, and the page has the bytes of before."""
    one = side()
    copying, go_on = threading.Event(), threading.Event()
    copy = copies.copy

    def slow(*given: Any, **more: Any) -> None:
        copying.set()
        go_on.wait(20)
        copy(*given, **more)

    monkeypatch.setattr(copies, "copy", slow)
    before = {name: tensor.clone() for name, tensor in one.tensors[0].items()}
    one.step(saves=[Save("a", "", (run(1, 0, [5, 6]),))])
    assert copying.wait(20)
    one.step(written=[7, 8])  # other blocks: nothing to wait for
    threading.Timer(0.3, go_on.set).start()
    started = time.perf_counter()
    one.step(written=[6])
    assert time.perf_counter() - started > 0.2
    for tensor in one.tensors[0].values():
        tensor[5:7] = 0
    one.saved(2)
    one.step(loads=[Load("b", "", (run(1, 0, [30, 31]),))])
    assert one.results("b") == (set(), set())
    for name, tensor in one.tensors[0].items():
        assert same(tensor[30:32], before[name][5:7])


def test_of_two_saves_that_read_a_block_both_are_waited_for(side: MakeSide, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second has not begun and is taken back; the first is still copying."""
    one = side()
    copying, go_on = threading.Event(), threading.Event()
    copy = copies.copy

    def slow(*given: Any, **more: Any) -> None:
        copying.set()
        go_on.wait(20)
        copy(*given, **more)

    monkeypatch.setattr(copies, "copy", slow)
    before = {name: tensor[5].clone() for name, tensor in one.tensors[0].items()}
    one.step(saves=[Save("a", "", (run(1, 0, [5]),)), Save("b", "", (run(2, 0, [5]),))])
    assert copying.wait(20)
    threading.Timer(0.5, go_on.set).start()
    one.step(written=[5])
    for tensor in one.tensors[0].values():
        tensor[5] = 0
    one.saved(2)
    one.step(loads=[Load("c", "", (run(1, 0, [30]),)), Load("d", "", (run(2, 0, [31]),))])
    assert one.results("c", "d") == ({31}, {"d"})
    for name, tensor in one.tensors[0].items():
        assert same(tensor[30], before[name])


def test_a_daemon_that_does_not_answer_holds_no_step_up(side: MakeSide, daemon: Daemon) -> None:
    """Stopped, not dead: the save is taken back, and what it would have saved is never seen."""
    one = side()
    one.step(saves=[Save("a", "", (run(1, 0, [1]),))])
    one.saved(1)
    assert daemon.process is not None
    os.kill(daemon.process.pid, signal.SIGSTOP)
    try:
        one.step(saves=[Save("b", "", (run(2, 0, [5, 6]),))])
        started = time.perf_counter()
        one.step(written=[5, 6])
        assert time.perf_counter() - started < 1
        for tensor in one.tensors[0].values():
            tensor[5:7] = 0
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
    one.saved(2)
    one.step(loads=[Load("c", "", (run(2, 0, [30, 31]),))])
    assert one.results("c")[0] == {30, 31}
    eventually(lambda: nothing_is_held(daemon), "the reservation is given back")


def test_without_a_daemon_loads_fail_and_saves_are_dropped_until_it_is_back(side: MakeSide, daemon: Daemon) -> None:
    one = side()
    one.step(saves=[Save("a", "", (run(1, 0, [1]),))])
    one.saved(1)
    daemon.kill()
    one.step(saves=[Save("b", "", (run(2, 0, [5, 6]),))], loads=[Load("c", "", (run(1, 0, [30]),))])
    assert one.results("c") == ({30}, {"c"})
    one.saved(2)
    daemon.start()

    def works() -> bool:
        one.step(saves=[Save("d", "", (run(3, 0, [1]),))])
        one.saved(1)
        one.step(loads=[Load("e", "", (run(3, 0, [40]),))])
        return one.results("e") == (set(), set())

    eventually(works, "it is found again")


def test_a_worker_that_starts_without_a_daemon_finds_it_later(make: MakeDaemon) -> None:
    daemon = make(host="64MiB", slab="1MiB")
    one = Side(daemon.endpoint)
    try:
        one.step(loads=[Load("a", "", (run(1, 0, [30]),))])
        assert one.results("a")[0] == {30}
        daemon.start()

        def works() -> bool:
            one.step(saves=[Save("d", "", (run(3, 0, [1]),))])
            one.saved(1)
            one.step(loads=[Load("e", "", (run(3, 0, [40]),))])
            return one.results("e") == (set(), set())

        eventually(works, "it is found")
    finally:
        one.close()


def test_a_load_that_waits_for_its_pages_gives_up_in_time(make: MakeDaemon) -> None:
    """Pages that lie on SSD only, and no frame to bring them to."""
    daemon = make(host="1MiB", slab="256KiB", ssd="16MiB").start()
    one = Side(daemon.endpoint, wait=0.3)
    try:
        one.step(saves=[Save("a", "", (run(1, 0, range(12)),))])
        one.saved(12)
        client = daemon.client()
        eventually(lambda: client.stats()["tiers"][1]["pages"] == 12, "all are on SSD")
        space = one.link.space(one.worker._caches[0].space)
        keys = [bytes.fromhex(page["key"]) for page in client.inventory(space.seed)["pages"]]
        space.migrate(keys, "ssd", move=True)
        other = daemon.space(big=True)
        held = other.reserve(other.keys([1] * 16 * 64), timeout=1)
        started = time.perf_counter()
        one.step(loads=[Load("b", "", (run(1, 0, range(30, 42)),))])
        missing, failed = one.results("b")
        assert missing and failed == {"b"} and time.perf_counter() - started < 3
        held.abort()
        one.step(loads=[Load("c", "", (run(1, 0, range(30, 42)),))])
        assert one.results("c") == (set(), set())
    finally:
        one.close()


def test_a_worker_that_ends_leaves_nothing(side: MakeSide, daemon: Daemon) -> None:
    one = side()
    one.step(saves=[Save("a", "", (run(1, 0, range(8)),))])
    one.close()
    eventually(lambda: nothing_is_held(daemon), "nothing is held")
    assert len(daemon.client().sessions()["sessions"]) == len(daemon.clients)
