"""Two real GPUs: pages written on one are read bit-exact on the other after every kind of move, also when a process is
killed in the middle of one, and in place over the link."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from kvtier_client import Client
from tests.gpu.conftest import with_hbm
from tests.gpu.pages import chain, gput, gread, open_space
from tests.system.conftest import Daemon, MakeDaemon, Worker, eventually

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

PAGES = 24


@pytest.fixture
def pair(make: MakeDaemon) -> Iterator[Daemon]:
    daemon = with_hbm(make)
    daemon.settings["tiers.hbm.device"] = "all"
    yield daemon.start()


def on(daemon: Daemon, gpu: int, *, alone: bool = False) -> Worker:
    """A worker on that GPU; `alone`, it sees no other, and calls it cuda:0."""
    worker = daemon.worker(bare=True)
    if alone:
        worker.do(f"import os; os.environ['CUDA_VISIBLE_DEVICES'] = '{gpu}'")
    ordinal = 0 if alone else gpu
    worker.do(
        f"import torch; torch.cuda.set_device({ordinal}); from kvtier_client import Client; from tests.gpu.pages import *; "
        f"client = Client(client.directory, device={ordinal}); space = open_space(client)"
    )
    return worker


@pytest.mark.parametrize("alone", [False, True])
def test_pages_cross_between_gpus(pair: Daemon, alone: bool) -> None:
    writer, reader = on(pair, 0, alone=alone), on(pair, 1, alone=alone)
    writer.do(f"keys = chain(space, 1, {PAGES}); gput(space, keys)")
    reader.do(f"keys = chain(space, 1, {PAGES})")
    assert set(reader.do("result = space.locate(keys)")) == {"hbm:0"}
    assert reader.do("result = gread(space, keys, tier='any')") == PAGES, "in place, over the link"
    moved = pair.client().stats()["moves"]
    assert not any(move["to"] == "hbm:1" for move in moved)
    assert reader.do("result = gread(space, keys)") == PAGES, "replicated"
    assert any(move["from"] == "hbm:0" and move["to"] == "hbm:1" for move in pair.client().stats()["moves"])
    assert writer.do("result = space.migrate(keys, 'hbm:1', move=True)") == PAGES
    assert set(writer.do("result = space.locate(keys)")) == {"hbm:1"}
    assert writer.do("result = gread(space, keys, tier='any')") == PAGES
    assert reader.do("result = space.migrate(keys, 'hbm:0', move=True)") == PAGES
    assert writer.do("result = gread(space, keys)") == PAGES


def test_without_peer_access_pages_go_through_host_memory(make: MakeDaemon) -> None:
    daemon = with_hbm(make)
    daemon.settings |= {"tiers.hbm.device": "all", "tiers.hbm.peers": "false"}
    daemon.start()
    writer, reader = on(daemon, 0), on(daemon, 1)
    writer.do(f"keys = chain(space, 1, {PAGES}); gput(space, keys)")
    assert reader.do(f"keys = chain(space, 1, {PAGES}); result = gread(space, keys)") == PAGES
    assert not any(move["from"] == "hbm:0" and move["to"] == "hbm:1" for move in daemon.client().stats()["moves"])


@pytest.mark.parametrize("victim", ["writer", "reader", "daemon"])
def test_killed_in_the_middle_of_a_migration(pair: Daemon, victim: str) -> None:
    client = Client(pair.endpoint, device=0)
    pair.clients.append(client)
    space = open_space(client)
    keys = chain(space, 2, PAGES)
    gput(space, keys)
    eventually(lambda: client.stats()["tiers"][3]["pages"] >= PAGES, "saved")
    for _ in range(3):
        worker = on(pair, 0 if victim == "writer" else 1)
        worker.do(f"keys = chain(space, 2, {PAGES})")
        worker.tell(
            "while True:\n    space.migrate(keys, 'hbm:1', move=True); space.migrate(keys, 'hbm:0', move=True)"
            if victim == "writer"
            else "while True:\n    gread(space, keys); space.migrate(keys, 'hbm:0', move=True)"
        )
        time.sleep(0.1)
        if victim == "daemon":
            pair.kill()
            pair.start()
            eventually(lambda: _serves(space, keys), "pages back from the disk")
        worker.kill()
        assert gread(space, keys) == PAGES


def _serves(space: object, keys: list[bytes]) -> bool:
    try:
        return space.lookup(keys) == len(keys)  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001
        return False


def test_one_gpu_is_resized_and_drained_under_load_from_both(pair: Daemon) -> None:
    client = Client(pair.endpoint, device=0)
    pair.clients.append(client)
    space = open_space(client)
    keys = chain(space, 3, PAGES)
    gput(space, keys)
    lease = space.borrow(keys, tier="cuda")
    workers = [on(pair, gpu) for gpu in (0, 1)]
    for number, worker in enumerate(workers):
        worker.tell(
            f"for turn in range(40): keys = chain(space, 3000 + 100 * {number} + turn, {PAGES}); gput(space, keys); gread(space, keys)"
        )
    for size in ("32MiB", "256MiB", "16MiB", "128MiB"):
        client.resize("hbm:0", size, timeout=3)
    client.drain("hbm:1", timeout=5)
    for worker in workers:
        worker.heard(within=60)
    assert [page.tier for page in lease] == ["hbm:0"] * PAGES
    lease.release()
    client.drain("hbm:0", timeout=20)
    assert gread(space, keys) == PAGES
