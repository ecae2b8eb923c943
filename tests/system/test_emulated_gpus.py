"""The GPU tier's whole code, daemon's and worker's, over an emulated CUDA: two GPUs, host memory and SSD, with real
processes. What only hardware shows (streams, speed, peers) is in tests/gpu."""

from __future__ import annotations

import ctypes
import random
import sys

import pytest

from kvtier import device
from kvtier.errors import DaemonLost, InvalidRequest, OutOfPages
from kvtier_client import Client, NamespaceClient
from kvtier_client.gpu import DeviceMapping
from tests.emulation import PATH, emulated
from tests.system.conftest import PYTHONPATH, Daemon, MakeDaemon, eventually
from tests.system.pages import chain, open_space

__all__ = ["emulated"]
PAGES = 24


def with_gpus(make: MakeDaemon, *, hbm: str = "32MiB", peers: bool = True, **others: object) -> Daemon:
    daemon = make(**{"host": "64MiB", "ssd": "64MiB", "slab": "1MiB", **others})
    daemon.environment = {"KVTIER_EMULATED_GPUS": "2", "PYTHONPATH": f"{PATH}:{PYTHONPATH}"}
    daemon.settings = {
        "tiers.hbm.medium": "cuda",
        "tiers.hbm.capacity": hbm,
        "tiers.hbm.slab": "2MiB",
        "tiers.hbm.peers": str(peers).lower(),
        **daemon.settings,
    }
    return daemon


@pytest.fixture
def gpus(make: MakeDaemon, emulated: None) -> Daemon:
    return with_gpus(make).start()


def on(daemon: Daemon, gpu: int) -> NamespaceClient:
    return open_space(daemon.client(device=gpu), big=True)


def gput(space: NamespaceClient, keys: list[bytes], tier: str | None = None, timeout: float = 20.0) -> None:
    start = space.lookup(keys)
    while start < len(keys):
        with space.reserve(keys, start=start, tier=tier, timeout=timeout) as reservation:
            for number, page in zip(reservation.numbers, reservation.pages, strict=True):
                length = page.handle.length
                ctypes.memmove(page.address, keys[number] * (length // 16), length)
            reservation.commit()
        start += len(reservation.status)


def gread(space: NamespaceClient, keys: list[bytes], tier: str = "cuda", timeout: float = 20.0) -> int:
    with space.borrow(keys, tier=tier, timeout=timeout) as lease:
        for key, page in zip(keys, lease.pages, strict=False):
            length = page.handle.length
            assert ctypes.string_at(page.address, length) == key * (length // 16), f"wrong bytes in {page.tier}"
        return len(lease)


def saved(client: Client, tier: int, pages: int) -> None:
    eventually(lambda: client.stats()["tiers"][tier]["pages"] >= pages, f"{pages} pages in tier {tier}")


def test_pages_keep_their_bytes_through_every_tier(gpus: Daemon) -> None:
    here, there = on(gpus, 0), on(gpus, 1)
    keys = chain(here, 1, PAGES)
    gput(here, keys)
    assert set(here.locate(keys)) == {"hbm:0"}
    saved(here.client, 3, PAGES)
    for tier in ("host", "ssd", "hbm:1", "ssd", "hbm:0", "host", "hbm:1"):
        assert here.migrate(keys, tier, move=True) == PAGES
        assert set(here.locate(keys)) == {tier}
        assert gread(there, keys, tier="any") == PAGES
        assert here.migrate(keys, tier, move=True) == PAGES
        assert gread(there, keys) == PAGES
        assert gread(here, keys) == PAGES


def test_a_page_on_a_peer_is_lent_in_place_and_replicated_when_asked_for(gpus: Daemon) -> None:
    here, there = on(gpus, 0), on(gpus, 1)
    keys = chain(here, 2, PAGES)
    gput(here, keys)
    with there.borrow(keys) as lease:
        assert {page.tier for page in lease} == {"hbm:0"}
    assert gread(there, keys) == PAGES
    moves = {(move["from"], move["to"]): move["pages"] for move in here.client.stats()["moves"]}
    assert moves["hbm:0", "hbm:1"] == PAGES
    saved(here.client, 3, PAGES)
    before = here.client.stats()["moves"]
    assert gread(there, keys) == PAGES
    assert here.client.stats()["moves"] == before, "a borrow of what is resident moves nothing"


def test_without_peer_access_host_memory_is_between(make: MakeDaemon, emulated: None) -> None:
    daemon = with_gpus(make, peers=False).start()
    here, there = on(daemon, 0), on(daemon, 1)
    keys = chain(here, 3, PAGES)
    gput(here, keys)
    with there.borrow(keys) as lease:
        assert {page.tier for page in lease} == {"host"}, "it cannot read the other GPU's memory"
    assert here.migrate(keys, "hbm:0", move=True) == PAGES
    assert gread(there, keys) == PAGES
    assert not any(move["from"] == "hbm:0" and move["to"] == "hbm:1" for move in here.client.stats()["moves"])


def test_devices_are_matched_by_uuid_not_ordinal(gpus: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = chain(on(gpus, 1), 4, 4)
    gput(on(gpus, 1), keys)
    uuid = device.devices()[1].uuid
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    space = on(gpus, 0)  # its first GPU is the daemon's second
    assert space.client.gpu is not None and space.client.gpu.uuid == uuid
    with space.borrow(keys, tier="cuda") as lease:
        assert {page.tier for page in lease} == {"hbm:1"}
    assert gread(space, keys, tier=f"cuda:{uuid}") == 4


def test_a_process_on_no_gpu_is_lent_host_memory_only(gpus: Daemon) -> None:
    keys = chain(on(gpus, 0), 5, PAGES)
    gput(on(gpus, 0), keys)
    plain = gpus.space(big=True)
    with plain.borrow(keys) as lease:
        assert len(lease) == PAGES and {page.tier for page in lease} == {"host"}
    with pytest.raises(InvalidRequest, match="cannot use tier"):
        plain.borrow(keys, tier="hbm:0")


def test_resizing_gives_memory_back_and_touches_no_leased_page(gpus: Daemon) -> None:
    space = on(gpus, 0)
    held = chain(space, 6, PAGES)
    gput(space, held)
    lease = space.borrow(held, tier="cuda")
    client = space.client
    for size in ("8MiB", "32MiB", "4MiB", "16MiB"):
        client.resize("hbm:0", size, timeout=5)
        gput(space, chain(space, 60 + len(size), 40), timeout=5)
        for key, page in zip(held, lease.pages, strict=True):
            assert ctypes.string_at(page.address, 16) == key
    lease.release()
    answer = client.resize("hbm:0", "2MiB", timeout=10)
    assert answer.allocated <= answer.capacity == 2 << 20
    client.resize("hbm:0", "32MiB")
    assert gread(space, held) == PAGES


def test_host_slabs_are_pinned_for_kernels_and_unpinned_before_they_go(gpus: Daemon) -> None:
    space = on(gpus, 0)
    keys = chain(space, 7, PAGES)
    gput(space, keys, tier="host")
    cuda = device.runtime()
    registered = cuda.hostRegister.__globals__["_registered"]
    attachment = space.client.current()
    with space.borrow(keys, tier="host") as lease:
        slabs = {page.handle.slab for page in lease}
        for slab in slabs:
            assert attachment.device_address(slab) == attachment.mapping(slab).address
    assert len(registered) == len(slabs)
    space.evict()
    space.client.resize("host", "1MiB", timeout=10)
    assert len(registered) < len(slabs)
    space.client.close()
    assert not registered


def test_a_soak_of_random_operations(make: MakeDaemon, emulated: None) -> None:
    daemon = with_gpus(make, hbm="8MiB", host="8MiB", ssd="16MiB").start()
    spaces = [on(daemon, gpu) for gpu in (0, 1)]
    draw = random.Random(7)
    for _ in range(500):
        space = draw.choice(spaces)
        keys = chain(space, draw.randrange(8), draw.randrange(1, 40))
        what = draw.random()
        try:
            if what < 0.35:
                gput(space, keys, draw.choice([None, "host"]), timeout=2)
            elif what < 0.85:
                gread(space, keys, draw.choice(["cuda", "host", "any"]), timeout=2)
            elif what < 0.93:
                space.migrate(keys, draw.choice(["hbm:0", "hbm:1", "host", "ssd"]), move=draw.random() < 0.5, timeout=2)
            elif what < 0.96:
                space.evict(keys[-1:])
            else:
                space.prefetch(keys, tier=draw.choice(["hbm:0", "host"]))
        except OutOfPages:
            pass
    client = spaces[0].client
    spaces[1].client.close()
    client.evict(everything=True)
    eventually(
        lambda: all(
            tier["used"] == tier["leased"] == tier["reserved_bytes"] == tier["filling_bytes"] == 0
            for tier in client.stats()["tiers"]
        ),
        "every frame free",
    )
    assert client.stats()["counters"]["lost"] == 0


def test_gpu_memory_of_a_lost_daemon_is_unmapped_with_the_last_tensor_over_it(gpus: Daemon) -> None:
    client = gpus.client(device=0)
    space = open_space(client)
    keys = chain(space, 4, 4)
    with space.reserve(keys) as reservation:
        reservation.commit()
    lease = space.borrow(keys, tier="cuda")
    mapping = lease.attachment.mapping(lease[0].handle.slab)
    assert isinstance(mapping, DeviceMapping)
    uses = [mapping.use(), mapping.use()]  # as tensors over it are
    gpus.kill()
    with pytest.raises(DaemonLost):
        space.lookup(keys)
    imported = sys.modules["cupy"]._imported
    assert not lease.attachment.slabs and list(imported) == [mapping.address]
    uses.pop()
    assert imported
    uses.pop()
    assert not imported, "a dead daemon's memory is held no longer than it is used"
