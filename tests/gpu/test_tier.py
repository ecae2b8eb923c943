"""The GPU tier with real processes: bit-exact in every tier after every kind of move, in order with streams, and safe
when any process is killed in the middle."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kvtier import device
from kvtier.errors import InvalidRequest, OutOfPages
from kvtier_client import Client
from tests.gpu.conftest import with_hbm
from tests.gpu.pages import chain, gfill, gput, gread, gwrong, open_space
from tests.system.conftest import Daemon, MakeDaemon, Worker, eventually

PAGES = 24  # 3 MiB


def on_gpu(daemon: Daemon, **options: Any) -> Worker:
    worker = daemon.worker(bare=True, device=0, **options)
    worker.do("from tests.gpu.pages import *; import torch; space = open_space(client)")
    return worker


def here(daemon: Daemon) -> Client:
    return daemon.client(device=0)


def saved(client: Client, tier: int, pages: int) -> None:
    eventually(lambda: client.stats()["tiers"][tier]["pages"] >= pages, f"{pages} pages in tier {tier}")


@triton.jit
def _sum_at(addresses, out, words: tl.constexpr):
    unit = tl.program_id(0)
    start = tl.load(addresses + unit).to(tl.pointer_type(tl.int32))
    total = tl.zeros([1024], tl.int32)
    for at in range(0, words, 1024):
        total += tl.load(start + at + tl.arange(0, 1024))
    tl.store(out + unit, tl.sum(total, 0))


def sums(addresses: torch.Tensor, nbytes: int) -> torch.Tensor:
    out = torch.zeros(len(addresses), dtype=torch.int32, device="cuda")
    _sum_at[(len(addresses),)](addresses, out, nbytes // 4)
    return out


def test_pages_of_one_process_are_read_by_another_in_every_tier_after_every_move(gpu: Daemon) -> None:
    writer, reader = on_gpu(gpu), on_gpu(gpu)
    writer.do(f"keys = chain(space, 1, {PAGES}); gput(space, keys)")
    reader.do(f"keys = chain(space, 1, {PAGES})")
    assert reader.do("result = gread(space, keys)") == PAGES
    assert set(reader.do("result = space.locate(keys)")) == {"hbm"}
    client = here(gpu)
    saved(client, 2, PAGES)  # written through to host and from there to SSD
    for tier in ("host", "ssd"):
        assert reader.do(f"result = space.migrate(keys, '{tier}', move=True)") == PAGES
        assert set(reader.do("result = space.locate(keys)")) == {tier}
        assert reader.do("result = gread(space, keys, tier='any')") == PAGES
        assert reader.do(f"result = space.migrate(keys, '{tier}', move=True)") == PAGES
        assert reader.do("result = gread(space, keys)") == PAGES
        assert set(reader.do("result = space.locate(keys)")) == {"hbm"}


def test_a_borrow_of_resident_pages_moves_nothing(gpu: Daemon) -> None:
    client = here(gpu)
    space = open_space(client)
    keys = chain(space, 2, PAGES)
    gput(space, keys)
    saved(client, 2, PAGES)
    before = client.stats()["moves"]
    with space.borrow(keys, tier="cuda") as lease:
        assert len(lease) == PAGES and not gwrong(lease, keys)
    assert client.stats()["moves"] == before


def test_one_launch_reads_hbm_and_pinned_host_memory_by_address(gpu: Daemon) -> None:
    client = here(gpu)
    space = open_space(client)
    keys = chain(space, 3, PAGES)
    gput(space, keys[:10])
    gput(space, keys, tier="host")
    with space.borrow(keys) as lease:
        assert [page.tier for page in lease] == ["hbm"] * 10 + ["host"] * (PAGES - 10)
        table = lease.table()
        assert table.dtype == torch.int64 and table.is_cuda
        wanted = torch.cat(
            [page.torch().view(torch.int32).flatten(1).cuda().sum(1, dtype=torch.int32) for page in lease]
        )
        assert torch.equal(sums(table, space.spec.layout.unit_stride), wanted)


def test_a_commit_waits_for_the_writers_stream(gpu: Daemon) -> None:
    """A kernel that writes late: what is published must be what it wrote, a thousand times."""
    writer, reader = here(gpu), here(gpu)
    mine, theirs = open_space(writer), open_space(reader)
    stream = torch.cuda.Stream()
    for turn in range(1000):
        keys = chain(mine, 1000 + turn, 1)
        with mine.reserve(keys) as reservation, torch.cuda.stream(stream):
            torch.cuda._sleep(100_000)
            reservation[0].torch().fill_(turn % 2000)
            reservation.commit(after=stream)
        with theirs.borrow(keys, tier="cuda") as lease:
            assert float(lease[0].torch()[0, -1, -1, -1, -1, -1]) == turn % 2000


def test_a_frame_is_not_reused_before_the_readers_stream_is_done(make: MakeDaemon) -> None:
    """The tier holds one page; its reader is slow; a writer that wants the frame has to wait for the reader's kernel."""
    daemon = with_hbm(make, hbm="8MiB", ssd=None).start()
    client = here(daemon)
    space = open_space(client)
    total = 64  # units of 128 KiB in 8 MiB: pages of one unit fill the tier
    first, second = chain(space, 5, 32), chain(space, 6, 32)
    gput(space, first)
    gput(space, second)
    lease = space.borrow(first, tier="cuda")
    other = space.borrow(second, tier="cuda")
    assert len(lease) + len(other) == total
    stream = torch.cuda.Stream()
    seen = torch.zeros_like(lease[0].torch())
    wanted = lease[0].torch().clone()  # also loads the kernel, which would otherwise wait for the stream
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(4_000_000_000)
        seen.copy_(lease[0].torch())
    lease.release(after=stream)
    with pytest.raises(OutOfPages):
        space.reserve(chain(space, 7, 1), timeout=0.05)
    stream.synchronize()
    with space.reserve(chain(space, 7, 1), timeout=5) as reservation:
        gfill(reservation[0], b"x" * 16)
        reservation.commit(after=torch.cuda.current_stream())
    assert torch.equal(seen.view(torch.int16), wanted.view(torch.int16))
    other.release()


def test_workers_match_devices_by_uuid(gpu: Daemon) -> None:
    client = here(gpu)
    space = open_space(client)
    keys = chain(space, 8, 4)
    gput(space, keys)
    own = device.devices()[0]
    with space.borrow(keys, tier=f"cuda:{own.uuid}") as lease:
        assert len(lease) == 4
    with pytest.raises(InvalidRequest, match="no tier"):
        space.borrow(keys, tier="cuda:GPU-00000000-0000-0000-0000-000000000000")
    plain = open_space(gpu.client())
    with pytest.raises(InvalidRequest, match="cannot use tier"):
        plain.borrow(keys, tier="hbm")
    with plain.borrow(keys) as lease:  # a process without a GPU gets the same pages in host memory
        assert len(lease) == 4 and {page.tier for page in lease} == {"host"}


def test_a_worker_with_expandable_segments_and_two_namespaces_on_a_slab(
    gpu: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = on_gpu(gpu)
    worker.do(
        "torch.cuda.memory._set_allocator_settings('expandable_segments:True'); torch.zeros(1 << 20, device='cuda')"
    )
    worker.do("one, two = open_space(client, 'one'), open_space(client, 'two')")
    worker.do("a, b = chain(one, 1, 4), chain(two, 1, 4); gput(one, a); gput(two, b)")
    worker.do("first, second = one.borrow(a, tier='cuda'), two.borrow(b, tier='cuda')")
    assert worker.do("result = first[0].handle.slab == second[0].handle.slab")
    worker.do("assert not gwrong(first, a) and not gwrong(second, b); first.release()")
    assert worker.do("result = gwrong(second, b)") == []
    with pytest.raises(RuntimeError, match="StaleHandle"):
        worker.do("first[0].torch()")


@pytest.mark.parametrize("victim", ["writer", "reader"])
def test_a_worker_killed_in_the_middle_of_moves(gpu: Daemon, victim: str) -> None:
    client = here(gpu)
    space = open_space(client)
    kept = chain(space, 9, PAGES)
    gput(space, kept)
    for turn in range(3):
        worker = on_gpu(gpu)
        if victim == "writer":
            worker.do(f"keys = chain(space, {100 + turn}, {PAGES}); r = space.reserve(keys); gfill(r[0], keys[0])")
            worker.tell("torch.cuda._sleep(10_000_000_000)\nfor page, key in zip(r, keys): gfill(page, key)")
        else:
            worker.do(f"keys = chain(space, 9, {PAGES}); space.migrate(keys, 'host', move=True)")
            worker.tell("while True:\n    gread(space, keys); space.migrate(keys, 'host', move=True)")
            time.sleep(0.05)
        worker.kill()
        eventually(lambda: client.stats()["daemon"]["sessions"] == 1, "the dead session gone")
        tiers = client.stats()["tiers"]
        assert all(tier["leased"] == tier["reserved_bytes"] == 0 for tier in tiers)
        eventually(lambda: all(tier["quarantined_bytes"] == 0 for tier in client.stats()["tiers"]), "frames back")
        assert gread(space, kept) == PAGES
        if victim == "writer":
            assert space.lookup(chain(space, 100 + turn, PAGES)) == 0


def test_the_daemon_killed_while_a_kernel_reads_its_pages(make: MakeDaemon) -> None:
    daemon = with_hbm(make).start()
    worker = on_gpu(daemon)
    worker.do(f"keys = chain(space, 10, {PAGES}); gput(space, keys); lease = space.borrow(keys, tier='cuda')")
    worker.do("total = torch.zeros(1, device='cuda', dtype=torch.int64); page = lease[5].torch().view(torch.int16)")
    worker.do("wanted = int(page.long().sum()); torch.cuda._sleep(2_000_000_000); total += page.long().sum()")
    daemon.kill()
    assert worker.do("torch.cuda.synchronize(); result = int(total) == wanted != 0")
    with pytest.raises(RuntimeError, match="DaemonLost"):
        worker.do("space.lookup(keys)")
    daemon.start()
    eventually(lambda: _attached(worker), "the worker attached again")
    worker.do("gput(space, keys)")
    assert worker.do("result = gread(space, keys)") == PAGES


def _attached(worker: Worker) -> bool:
    try:
        worker.do("space.lookup(keys)")
    except RuntimeError:
        return False
    return True


def test_resizing_under_load_touches_no_leased_page(gpu: Daemon) -> None:
    client = here(gpu)
    space = open_space(client)
    held = chain(space, 11, PAGES)
    gput(space, held)
    lease = space.borrow(held, tier="cuda")
    worker = on_gpu(gpu)
    worker.tell(
        f"for turn in range(30): keys = chain(space, 2000 + turn, {PAGES}); gput(space, keys); gread(space, keys)"
    )
    for size in ("64MiB", "256MiB", "32MiB", "128MiB", "16MiB", "256MiB"):
        answer = client.resize("hbm", size, timeout=2)
        assert not gwrong(lease, held)
        assert answer.capacity == client.stats()["tiers"][0]["capacity"]
    worker.heard()
    lease.release()
    client.resize("hbm", "8MiB", timeout=1)
    worker.do("client.ping()")  # an idle worker lets go of its mappings when it next hears from the daemon
    eventually(lambda: client.stats()["tiers"][0]["allocated"] <= 8 << 20, "the memory given back")
    assert gread(space, held) == PAGES


def test_two_hbm_tiers_migrate_between_each_other(make: MakeDaemon) -> None:
    """Two tiers of one GPU stand for two GPUs: pages written in one are replicated, moved and read in place."""
    daemon = with_hbm(make)
    daemon.settings = {
        "tiers.hbm2.medium": "cuda",
        "tiers.hbm2.device": "0",
        "tiers.hbm2.capacity": "64MiB",
        "tiers.hbm2.slab": "8MiB",
        **daemon.settings,
    }
    daemon.start()
    client = here(daemon)
    space = open_space(client)
    keys = chain(space, 12, PAGES)
    gput(space, keys, tier="hbm")
    reader = on_gpu(daemon)
    reader.do(f"keys = chain(space, 12, {PAGES})")
    assert reader.do("result = gread(space, keys, tier='hbm2')") == PAGES  # replicated: there is room
    stats = client.stats()
    assert {(move["from"], move["to"]) for move in stats["moves"]} >= {("hbm", "hbm2")}
    assert space.migrate(keys, "hbm", move=True) == PAGES
    assert set(space.locate(keys)) == {"hbm"}
    client.resize("hbm2", "8MiB")
    others = chain(space, 13, 40)
    lease = space.borrow(keys, tier="hbm")
    gput(space, others, tier="hbm2", timeout=5)
    busy = space.borrow(others[:20], tier="hbm2")
    with space.borrow(keys, tier="hbm2") as mixed:  # where no frame can be had, read in place
        assert len(mixed) == PAGES and not gwrong(mixed, keys)
    busy.release()
    lease.release()


def test_a_soak_of_random_operations(make: MakeDaemon) -> None:
    """Three processes, tiers that are too small, every operation: each page read has its bytes, and nothing leaks."""
    daemon = with_hbm(make, hbm="32MiB", host="48MiB", ssd="128MiB").start()
    workers = [on_gpu(daemon) for _ in range(3)]
    for number, worker in enumerate(workers):
        worker.do(
            f"""
import random
from kvtier.errors import OutOfPages
draw = random.Random({number})
def turn():
    keys = chain(space, draw.randrange(12), draw.randrange(1, 40))
    what = draw.random()
    try:
        if what < .35:
            gput(space, keys, tier=draw.choice([None, 'host']), timeout=2)
        elif what < .85:
            gread(space, keys, tier=draw.choice(['cuda', 'host', 'any']), timeout=2)
        elif what < .93:
            space.migrate(keys, draw.choice(['hbm', 'host', 'ssd']), move=draw.random() < .5, timeout=2)
        elif what < .95:
            space.evict(keys[-1:])
        else:
            space.prefetch(keys, tier=draw.choice(['hbm', 'host']))
    except OutOfPages:
        pass
"""
        )
        worker.tell("for _ in range(200): turn()")
    for worker in workers:
        worker.heard(within=120)
    for worker in workers:
        worker.close()
    client = here(daemon)
    eventually(lambda: client.stats()["daemon"]["sessions"] == 1, "sessions gone")
    client.evict(everything=True)
    eventually(
        lambda: all(
            tier["used"] == tier["leased"] == tier["reserved_bytes"] == tier["filling_bytes"] == 0
            for tier in client.stats()["tiers"]
        ),
        "every frame free",
    )
    assert client.stats()["counters"]["lost"] == 0


def test_without_room_in_hbm_the_other_tiers_serve(make: MakeDaemon) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    hog = torch.empty(max(0, torch.cuda.mem_get_info()[0] - (1 << 30)), dtype=torch.uint8, device="cuda")
    daemon = with_hbm(make, hbm=str(total // 2), ssd=None)
    daemon.settings["tiers.hbm.slab"] = "2GiB"
    daemon.start()
    client = here(daemon)
    space = open_space(client)
    keys = chain(space, 14, 4)
    with pytest.raises(OutOfPages):
        space.reserve(keys, timeout=1)
    gput(space, keys, tier="host")
    assert gread(space, keys, tier="any") == 4
    assert "no slab of" in daemon.log
    del hog
    torch.cuda.empty_cache()
