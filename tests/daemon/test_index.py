"""The index by itself: what it keeps, how it grows, and what it does with entries that are none."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from kvtier.config import Size, TierConfig
from kvtier.keys import Namespace, chain
from kvtier_daemon import index as index_module
from kvtier_daemon.directory import Directory, Page
from kvtier_daemon.index import BadIndex, Index
from kvtier_daemon.jobs import Barrier, Carve, Erase, Job, Record, Shrink
from kvtier_daemon.slabs import Slab
from kvtier_daemon.tiers import Tier
from tests.daemon.world import LAYOUT, UNIT

SPEC = Namespace(layout=LAYOUT, model="model")


class Shelf:
    """A slab on disk (its file is empty) and a chain of pages to record in it."""

    def __init__(self, directory: Path, pages: int) -> None:
        config = TierConfig(medium="file", capacity=Size(pages * UNIT), slab=Size(pages * UNIT), path=str(directory))
        tier = Tier(0, "ssd", config, persistent=True, mappable=False)
        directories = Directory(1)
        tenant = directories.tenant("me")
        self.space = directories.open(tenant, Namespace(layout=LAYOUT, model="model", cap_tokens=16))
        file = (directory / "slab").open("w+b")
        self.file = file
        self.slab = Slab(1, tier.slab_class(tenant, UNIT), pages * UNIT, file.fileno())
        self.slab.owner.adopt(self.slab)
        self.keys = chain(self.space.spec, range(16 * pages))
        self.pages: list[Page] = []
        for number, key in enumerate(self.keys):
            page = directories.publish(key, self.space, number, self.pages[-1] if self.pages else None)
            self.slab.frames[number].checksum = number * 7
            self.slab.frames[number].touched = number
            self.pages.append(page)

    def records(self, start: int, stop: int) -> list[Job]:
        frames = self.slab.frames
        return [Record(self.pages[at], frames[at], frames[at]) for at in range(start, stop)]

    def erases(self, start: int, stop: int) -> list[Job]:
        frames = self.slab.frames
        return [Erase("me", self.space.seed, self.keys[at], frames[at]) for at in range(start, stop)]


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    made = Shelf(tmp_path, 64)
    yield made
    made.file.close()


def test_what_is_recorded_is_read_again(tmp_path: Path, shelf: Shelf) -> None:
    index = Index(tmp_path, "ssd")
    index.apply([Carve(shelf.slab), *shelf.records(0, 10)])
    index.apply([*shelf.erases(8, 10), *shelf.records(10, 12), Barrier()])
    index.close()
    contents = Index(tmp_path, "ssd").read()
    assert contents.namespaces == {1: ("me", shelf.space.spec)}
    assert contents.slabs == {1: (64 * UNIT, UNIT, "me")}
    recorded = {page.number: page for page in contents.pages}
    assert sorted(recorded) == [0, 1, 2, 3, 4, 5, 6, 7, 10, 11]
    assert recorded[3] == (1, shelf.keys[3], shelf.keys[2], 3, 1, 3, 21, 3)
    assert recorded[0].parent == shelf.space.seed


def test_jobs_of_a_batch_keep_their_order(tmp_path: Path, shelf: Shelf) -> None:
    index = Index(tmp_path, "ssd")
    index.apply([*shelf.records(0, 2), *shelf.erases(1, 2), *shelf.records(1, 2), *shelf.erases(0, 1)])
    index.apply([Carve(shelf.slab), Shrink(shelf.slab.owner.tier, shelf.slab)])
    contents = index.read()
    assert [page.number for page in contents.pages] == [1]
    assert not contents.slabs
    index.close()


def test_it_grows_past_its_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_MAP_START", 1 << 17)
    shelf = Shelf(tmp_path, 6000)
    index = Index(tmp_path, "ssd")
    before = index.env.info()["map_size"]
    for start in range(0, 6000, 1500):
        index.apply(shelf.records(start, start + 1500))
    assert index.env.info()["map_size"] > before
    index.apply(shelf.erases(0, 6000))
    assert not index.read().pages, "evictions work all the same"
    index.close()
    shelf.file.close()


def test_a_batch_greater_than_the_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_MAP_START", 1 << 17)
    monkeypatch.setattr(index_module, "_MAP_SPARE", 0.0)
    shelf = Shelf(tmp_path, 6000)
    index = Index(tmp_path, "ssd")
    index.apply(shelf.records(0, 6000))
    assert len(index.read().pages) == 6000
    index.close()
    shelf.file.close()


def test_a_failed_batch_records_nothing(tmp_path: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index(tmp_path, "ssd")

    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OSError, match="Input/output"):
        index.apply(shelf.records(0, 4))
    monkeypatch.undo()
    monkeypatch.setattr(index, "_write", fail)
    with pytest.raises(OSError, match="Input/output"):
        index.apply(shelf.records(0, 4))
    monkeypatch.undo()
    assert not index.read().pages
    index.apply(shelf.records(0, 4))
    assert len(index.read().pages) == 4
    assert len(index.read().namespaces) == 1
    index.close()


def test_entries_that_are_none_are_erased(tmp_path: Path, shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    index = Index(tmp_path, "ssd")
    index.apply([Carve(shelf.slab), *shelf.records(0, 3)])
    index.close()
    rubbish = {
        b"namespaces": [(struct.pack(">I", 9), b"\xc1"), (struct.pack(">I", 8), b"\x01"), (b"x", b"\x92\xa1a\x80")],
        b"slabs": [
            (struct.pack(">I", 9), b"\xc1"),
            (struct.pack(">I", 8), b"\x93\x00\x00\xa1a"),
            (b"x", b"\x93\x01\x01\xa1a"),
        ],
        b"pages": [(b"short", b"\0" * 44), (struct.pack(">I", 1) + bytes(16), b"cut")],
    }
    with lmdb.open(str(tmp_path / "index"), max_dbs=4) as env, env.begin(write=True) as txn:
        for name, entries in rubbish.items():
            for key, value in entries:
                txn.put(key, value, db=env.open_db(name, txn))
    index = Index(tmp_path, "ssd")
    contents = index.read()
    assert (len(contents.namespaces), len(contents.slabs), len(contents.pages)) == (1, 1, 3)
    assert "8 entries" in caplog.text
    caplog.clear()
    index.read()
    assert not caplog.text, "they are gone"
    index.close()


@pytest.mark.parametrize("version", [b"\0\0\0\x63", b"", b"a longer one"])
def test_another_version_is_refused(tmp_path: Path, version: bytes) -> None:
    index = Index(tmp_path, "ssd")
    with index.env.begin(write=True) as txn:
        txn.put(b"version", version, db=index.meta)
    index.close()
    with pytest.raises(BadIndex, match=r"format .* this release reads 1.*move .* away"):
        Index(tmp_path, "ssd")


def test_what_is_no_index_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "data.mdb").write_bytes(b"x" * 10000)
    with pytest.raises(BadIndex, match="cannot be opened"):
        Index(tmp_path, "ssd")
