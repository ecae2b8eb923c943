"""Start-up: what an earlier daemon recorded comes back, as far as it fits and can be reached."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.config import Config, Size, TenantConfig, TierConfig
from kvtier_daemon.directory import Directory
from kvtier_daemon.index import Contents, Index, PageRecord, SlabRecord
from kvtier_daemon.media import FileMedium
from kvtier_daemon.restore import Restored, restore
from kvtier_daemon.store import Store
from kvtier_daemon.tenancy import Tenancy
from kvtier_daemon.tiers import Tier
from tests.daemon.test_index import SPEC
from tests.daemon.world import UNIT

FRAMES = 64
SLAB = FRAMES * UNIT


class Disk:
    """An index that says what a test likes, and the files it speaks of."""

    def __init__(self, directory: Path, slabs: int, pages: list[PageRecord], *, sparse: bool = False) -> None:
        self.directory = directory
        self.medium = FileMedium("ssd", directory)
        self.contents = Contents(
            {1: ("me", SPEC)}, {number: SlabRecord(SLAB, UNIT, "me") for number in range(1, slabs + 1)}, pages
        )
        self.erased: tuple[int, int] = (0, 0)
        for number in self.contents.slabs:
            with self.medium.path(number).open("wb") as file:
                file.truncate(SLAB)

    def restore(self, capacity: int, tenants: dict[str, TenantConfig] | None = None) -> tuple[Restored, Store, Tier]:
        config = TierConfig(medium="file", capacity=Size(capacity), slab=Size(SLAB), path=str(self.directory))
        tier = Tier(0, "ssd", config, persistent=True, mappable=False)
        directory = Directory(1)
        store = Store(directory, [tier], lambda job: None)
        tenancy = Tenancy(Config(tiers={"ssd": config}, tenants=tenants or {}), directory, [tier])
        disk = self

        class Recorded(Index):
            def __init__(self) -> None:
                pass

            def read(self) -> Contents:
                return disk.contents._replace(pages=list(disk.contents.pages))

            def rewrite(self, lost_pages: object, lost_slabs: object) -> None:
                disk.erased = (len(list(lost_pages)), len(list(lost_slabs)))  # type: ignore[call-overload]

        restored = restore(store, tier, self.medium, Recorded(), tenancy.named)
        store.check()
        assert tier.allocated <= capacity
        return restored, store, tier


def key(chain: int, number: int) -> bytes:
    return chain.to_bytes(8, "big") + number.to_bytes(8, "big")


def pages_of(chains: int, length: int = 32, *, stamp: Callable[[int, int], int] = lambda c, n: c) -> list[PageRecord]:
    """Chains of pages of order 0, laid out one after the other."""
    records = []
    for chain in range(chains):
        for number in range(length):
            at = chain * length + number
            parent = key(chain, number - 1) if number else SPEC.digest()
            records.append(
                PageRecord(
                    1, key(chain, number), parent, number, 1 + at // FRAMES, at % FRAMES, 0, stamp(chain, number)
                )
            )
    return records


def test_all_comes_back_in_order_of_recency(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 4, pages_of(8, stamp=lambda chain, number: (chain * 5) % 8 * 100 + number))
    restored, store, tier = disk.restore(4 * SLAB)
    assert restored == (256, 0, 0)
    (owner,) = tier.classes.values()
    order = [frame.page for frame in owner.lru if frame.page is not None]
    assert len(order) == 256
    first = order[0]
    assert first.number == 31 and first.key[:8] == key(0, 0)[:8], "the coldest chain's tail leaves first"
    for chain in range(8):
        numbers = [page.number for page in order if page.key[:8] == key(chain, 0)[:8]]
        assert numbers == sorted(numbers, reverse=True), "tails before heads"
    assert store.tick >= 731
    assert store.room.next_slab == 5


def test_a_smaller_tier_keeps_the_youngest_slabs(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 10, pages_of(20))
    restored, store, tier = disk.restore(3 * SLAB)
    assert sorted(tier.slabs) == [8, 9, 10]
    assert (restored.pages, restored.lost_pages, restored.lost_slabs) == (6 * 32, 14 * 32, 7)
    assert disk.erased == (14 * 32, 7)
    assert {path.name for path in tmp_path.glob("*.kv")} == {f"slab-{n:08d}.kv" for n in (8, 9, 10)}
    assert store.room.next_slab == 11, "numbers are not used twice"


def test_a_hundred_thousand_pages_and_a_tenth_of_them(tmp_path: Path) -> None:
    slabs = 100_000 // FRAMES
    disk = Disk(tmp_path, slabs, pages_of(slabs * FRAMES // 32))
    started = time.monotonic()
    restored, _, tier = disk.restore(slabs // 10 * SLAB)
    assert time.monotonic() - started < 30, "seconds are meant to be about 2"
    assert restored.pages == slabs // 10 * FRAMES
    assert tier.allocated <= slabs // 10 * SLAB
    assert len(list(tmp_path.glob("*.kv"))) == slabs // 10


def test_pages_whose_prefix_is_gone_go_too(tmp_path: Path) -> None:
    records = [record for record in pages_of(2) if record.key != key(0, 3)]
    restored, _, _ = Disk(tmp_path, 1, records).restore(SLAB)
    assert (restored.pages, restored.lost_pages) == (3 + 32, 28)


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_slabs_that_are_not_there_whole(tmp_path: Path, damage: str) -> None:
    disk = Disk(tmp_path, 2, pages_of(4))
    path = disk.medium.path(1)
    if damage == "missing":
        path.unlink()
    else:
        with path.open("r+b") as file:
            file.truncate(SLAB - 1)
    restored, _, tier = disk.restore(2 * SLAB)
    assert (restored.pages, restored.lost_slabs, list(tier.slabs)) == (64, 1, [2])


def nonsense() -> dict[str, PageRecord]:
    good = PageRecord(1, key(9, 0), SPEC.digest(), 0, 1, 5, 0, 0)
    return {
        "no such namespace": good._replace(namespace=7),
        "no such slab": good._replace(slab=9),
        "no such frame": good._replace(frame=FRAMES),
        "a frame that is taken": good._replace(frame=0),
        "a number that is not its parent's next": good._replace(parent=key(0, 3), number=9),
        "a first page with a parent": good._replace(parent=key(0, 3), number=0),
        "a page of another size than its frame": good._replace(parent=key(0, 31), number=32),
        "its own parent": good._replace(parent=key(9, 0), number=1),
    }


@pytest.mark.parametrize("what", nonsense())
def test_records_that_make_no_sense(tmp_path: Path, what: str) -> None:
    disk = Disk(tmp_path, 2, [*pages_of(1), nonsense()[what]])
    restored, _, _ = disk.restore(2 * SLAB)
    assert (restored.pages, restored.lost_pages) == (32, 1)
    assert disk.erased == (1, 0)


def test_a_tenants_limit_holds_at_start_too(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 4, pages_of(8))
    restored, _, tier = disk.restore(4 * SLAB, {"me": TenantConfig(limit={"ssd": Size(2 * SLAB)})})
    assert len(tier.slabs) == 2 and restored.pages == 128
    restored, _, tier = disk.restore(4 * SLAB, {"you": TenantConfig(guaranteed={"ssd": Size(3 * SLAB)})})
    assert len(tier.slabs) == 1 and restored.pages == 64


def test_files_of_no_slab_are_removed(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 1, pages_of(2))
    (tmp_path / "slab-00000077.kv").write_bytes(b"x")
    (tmp_path / "notes").write_text("mine")
    disk.restore(SLAB)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "slab-00000001.kv"]
