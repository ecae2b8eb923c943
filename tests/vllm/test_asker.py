"""Lookups against a real kvtierd: every rank and group counts, a miss is cheap, and nobody waits for who is away."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.keys import Namespace
from kvtier.layout import EngineLayout
from kvtier_client import NamespaceClient
from kvtier_client.vllm.asker import Asker
from kvtier_client.vllm.asker import Request as Known
from kvtier_client.vllm.hashes import BlockHashes
from kvtier_client.vllm.link import Link
from kvtier_client.vllm.naming import adapter_digest, page_key, variant
from kvtier_client.vllm.stats import Tally
from tests.system.conftest import Daemon, MakeDaemon, eventually, make, place
from tests.vllm.stand_ins import Request, hashing

__all__ = ["make", "place"]
SPACES = [
    [
        Namespace(layout=EngineLayout(4096, "a", 16), model="m", tp_rank=rank, tp_size=2, extra={"group": str(group)})
        for rank in range(2)
    ]
    for group in range(2)
]


@pytest.fixture
def daemon(make: MakeDaemon) -> Daemon:
    return make(host="16MiB", ssd="16MiB").start()


@pytest.fixture
def asker(daemon: Daemon) -> Iterator[Asker]:
    link = Link(daemon.endpoint, "scheduler")
    made = Asker(link, SPACES, Tally())
    yield made
    made.close()
    link.close()


def known_of(tokens: int = 200, **more: Any) -> Known:
    """A request with the hashes of its pages noted."""
    request = Request("a", list(range(tokens)), **more).known()
    known = Known(request, BlockHashes(hashing(), 16), 2)
    for pages in known.page_hashes:
        pages += request.block_hashes
    return known


def ask(asker: Asker, known: Known, generation: str = "") -> list[int]:
    asker.ask(known, generation)
    assert known.answered.wait(10)
    return known.found


def keys_of(known: Known, space: NamespaceClient, pages: int = 12) -> list[bytes]:
    return [page_key(space.seed, digest, n) for n, digest in enumerate(known.page_hashes[0][:pages])]


def store(daemon: Daemon, known: Known, spec: Namespace, pages: int) -> NamespaceClient:
    space = NamespaceClient(daemon.client(), spec)
    with space.reserve(keys_of(known, space, pages)) as reservation:
        reservation.commit()
    return space


def test_what_one_rank_lacks_is_not_found(asker: Asker, daemon: Daemon) -> None:
    known = known_of()
    assert ask(asker, known) == [0, 0]
    for spec, pages in zip((one for ranks in SPACES for one in ranks), (12, 5, 9, 12), strict=True):
        store(daemon, known, spec, pages)
    assert ask(asker, known) == [5, 9]


def test_a_miss_is_one_question_a_rank_and_group_and_moves_nothing(asker: Asker, daemon: Daemon) -> None:
    ask(asker, known_of())
    client = daemon.client()
    before = client.stats()["counters"]
    for n in range(100):
        ask(asker, known_of(cache_salt=str(n)))
    after = client.stats()["counters"]
    assert after["lookups"] - before["lookups"] == 400
    asked = next(one for one in client.sessions()["sessions"] if one["name"] == "scheduler")["requests"]
    assert asked == 404


def test_what_is_found_on_a_slow_tier_is_on_its_way_at_once(asker: Asker, daemon: Daemon) -> None:
    known = known_of()
    spaces = [store(daemon, known, spec, 12) for ranks in SPACES for spec in ranks]

    def down(space: NamespaceClient) -> bool:
        return space.migrate(keys_of(known, space), "ssd", move=True) == 12

    for space in spaces:
        eventually(functools.partial(down, space), "it is on SSD")
        assert set(space.locate(keys_of(known, space))) == {"ssd"}
    assert ask(asker, known) == [12, 12]
    eventually(lambda: all(set(one.locate(keys_of(known, one))) == {"host"} for one in spaces), "and it comes up")


def test_an_adapter_is_asked_for_by_its_contents(asker: Asker, daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    adapter = SimpleNamespace(lora_int_id=1, lora_name="one", lora_path=str(tmp_path), load_inplace=False)
    known = known_of(lora_request=adapter)
    assert ask(asker, known) == [0, 0] and known.lora == adapter_digest(tmp_path)
    for spec in (one for ranks in SPACES for one in ranks):
        store(daemon, known, variant(spec, known.lora or "", ""), 3)
    assert ask(asker, known) == [3, 3]
    assert ask(asker, known, "after a reset") == [0, 0]
    (tmp_path / "adapter_model.safetensors").write_bytes(b"others!")
    again = SimpleNamespace(lora_int_id=2, lora_name="one", lora_path=str(tmp_path), load_inplace=False)
    assert ask(asker, known_of(lora_request=again)) == [0, 0], "the same name and path, other weights"
    assert ask(asker, known) == [3, 3], "those that are loaded are what they were when they came"
    adapter.load_inplace = True
    assert ask(asker, known) == [0, 0]


def test_an_adapter_that_cannot_be_read_is_not_kept(asker: Asker) -> None:
    adapter = SimpleNamespace(lora_int_id=1, lora_name="one", lora_path="org/on-the-hub", load_inplace=False)
    known = known_of(lora_request=adapter)
    assert ask(asker, known) == [0, 0] and known.lora is None


def test_a_daemon_that_went_is_a_miss_at_once_and_is_found_when_it_is_back(asker: Asker, daemon: Daemon) -> None:
    known = known_of()
    ask(asker, known)
    daemon.kill()
    started = time.perf_counter()
    for _ in range(50):
        assert ask(asker, known) == [0, 0]
    assert time.perf_counter() - started < 2 and asker.silent
    daemon.start()
    eventually(lambda: ask(asker, known) is not None and not asker.silent, "it answers again")


def test_a_daemon_that_hangs_is_given_up(asker: Asker, daemon: Daemon) -> None:
    known = known_of()
    ask(asker, known)
    assert daemon.process is not None
    os.kill(daemon.process.pid, signal.SIGSTOP)
    try:
        asker.ask(known, "")
        assert not known.answered.wait(0.5)
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
    assert known.answered.wait(10)
