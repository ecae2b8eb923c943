"""The index of a file tier: which page is in which frame, in LMDB, so that it survives the daemon.

Order of a write: the page's bytes, fdatasync of their extents, then one transaction for the batch; only then is the
page served from here. Order of an eviction: the transaction, then the frame is reused. So a crash at any point loses
at most what was not yet recorded, and an entry never points at other bytes than its own; the checksum in it is
verified at every read all the same.

    meta        "version"                    -> FORMAT
    namespaces  id                           -> [tenant, fields of the namespace]
    slabs       id                           -> [bytes, frame bytes, tenant]
    pages       namespace id, page key       -> the `_PAGE` record

One process opens an index, and one thread writes it. Its map grows ahead of need.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import msgpack
import msgspec

from kvtier.errors import KvtierError
from kvtier.keys import KEY_BYTES, Namespace
from kvtier_daemon.jobs import Barrier, Carve, Erase, Job, Record, Shrink

log = logging.getLogger(__name__)

FORMAT = 1
_PAGE = struct.Struct("<16sIIIQQ")
_ID = struct.Struct(">I")
_MAP_START = 16 << 20
_UNDECODABLE = (ValueError, TypeError, struct.error, msgspec.ValidationError, KvtierError, msgpack.UnpackException)
_MAP_SPARE = 0.5
"""Share of the map that is kept free."""


class BadIndex(KvtierError):
    """The index cannot be used; the tier stays closed and its files untouched."""

    code = "index"


class PageRecord(NamedTuple):
    """A page as it was recorded; `stamp` orders pages by when they were."""

    namespace: int
    key: bytes
    parent: bytes
    number: int
    slab: int
    frame: int
    checksum: int
    stamp: int


class SlabRecord(NamedTuple):
    nbytes: int
    frame_bytes: int
    tenant: str


class Contents(NamedTuple):
    """All that an index says. `namespaces` are (tenant, namespace) by id."""

    namespaces: dict[int, tuple[str, Namespace]]
    slabs: dict[int, SlabRecord]
    pages: list[PageRecord]


class Index:
    """Owned by one thread at a time: who opens it, then the index thread of its tier."""

    def __init__(self, directory: Path, name: str) -> None:
        """Opens or creates the index in `directory`. Raises BadIndex for one of another version or unreadable."""
        self.name = name
        path = directory / "index"
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            self.env = lmdb.open(str(path), map_size=_MAP_START, max_dbs=4, mode=0o600)
            self._grow_to(self._used())
        except (lmdb.Error, OSError) as error:
            raise BadIndex(
                f"tier {name}: the index at {path} cannot be opened ({error}): restore it, or move {directory} away to "
                f"start empty"
            ) from error
        self.env.reader_check()
        self.meta = self.env.open_db(b"meta")
        self.namespaces = self.env.open_db(b"namespaces", integerkey=False)
        self.slabs = self.env.open_db(b"slabs")
        self.pages = self.env.open_db(b"pages")
        with self.env.begin(write=True) as txn:
            version = txn.get(b"version", db=self.meta)
            if version is None:
                txn.put(b"version", _ID.pack(FORMAT), db=self.meta)
            elif version != _ID.pack(FORMAT):
                raise BadIndex(
                    f"tier {name}: the index at {path} has format {int.from_bytes(version, 'big')} and this release reads "
                    f"{FORMAT}: run the release that wrote it, or move {directory} away to start empty"
                )
        self.ids: dict[tuple[str, bytes], int] = {}

    def read(self) -> Contents:
        """Everything. Entries that cannot be decoded are left out and erased. Raises BadIndex where LMDB itself cannot
        read it."""
        namespaces: dict[int, tuple[str, Namespace]] = {}
        slabs: dict[int, SlabRecord] = {}
        pages: list[PageRecord] = []
        bad: list[tuple[object, bytes]] = []
        unpack_page = _PAGE.unpack
        try:
            with self.env.begin() as txn:
                for key, value in txn.cursor(db=self.namespaces):
                    try:
                        (number,) = _ID.unpack(key)
                        tenant, fields = msgpack.unpackb(value)
                        spec = msgspec.convert(fields, Namespace)
                        namespaces[number] = (msgspec.convert(tenant, str), spec)
                        self.ids[tenant, spec.digest()] = number
                    except _UNDECODABLE:
                        bad.append((self.namespaces, key))
                for key, value in txn.cursor(db=self.slabs):
                    try:
                        (number,) = _ID.unpack(key)
                        slab = msgspec.convert(msgpack.unpackb(value), SlabRecord)
                        if not 0 < slab.frame_bytes <= slab.nbytes:
                            raise ValueError
                        slabs[number] = slab
                    except _UNDECODABLE:
                        bad.append((self.slabs, key))
                for key, value in txn.cursor(db=self.pages):
                    if len(value) != _PAGE.size or len(key) != _ID.size + KEY_BYTES:
                        bad.append((self.pages, key))
                        continue
                    parent, number, slab_id, frame, checksum, stamp = unpack_page(value)
                    space = int.from_bytes(key[:4], "big")
                    pages.append(PageRecord(space, key[4:], parent, number, slab_id, frame, checksum, stamp))
            if bad:
                self._write(lambda txn: [txn.delete(key, db=db) for db, key in bad])
        except lmdb.Error as error:
            raise BadIndex(
                f"tier {self.name}: the index cannot be read ({error}): restore it, or move it away to start empty"
            ) from error
        if bad:
            log.warning("tier %s: %d entries of the index could not be decoded; they are erased", self.name, len(bad))
        return Contents(namespaces, slabs, pages)

    def rewrite(self, lost_pages: Iterable[tuple[int, bytes]], lost_slabs: Iterable[int]) -> None:
        """Erase pages, by (namespace id, key), and slabs; durable on return."""

        def erase(txn: lmdb.Transaction) -> None:
            for namespace, key in lost_pages:
                txn.delete(_ID.pack(namespace) + key, db=self.pages)
            for slab in lost_slabs:
                txn.delete(_ID.pack(slab), db=self.slabs)

        lost_pages, lost_slabs = list(lost_pages), list(lost_slabs)
        if lost_pages or lost_slabs:
            self._write(erase)

    def apply(self, jobs: list[Job]) -> None:
        """Record the jobs in order; durable on return. Raises OSError or lmdb.Error, with nothing of it recorded."""
        for fd in {job.target.slab.backing for job in jobs if isinstance(job, Record)}:
            os.fdatasync(fd)
        known = dict(self.ids)

        def record(txn: lmdb.Transaction) -> None:
            for job in jobs:
                match job:
                    case Record():
                        self._record(txn, job)
                    case Erase():
                        page_key = self.ids.get((job.tenant, job.seed))
                        if page_key is not None:
                            txn.delete(_ID.pack(page_key) + job.key, db=self.pages)
                    case Carve():
                        slab = job.slab
                        value = msgpack.packb((slab.nbytes, slab.owner.frame_bytes, slab.owner.tenant.name))
                        txn.put(_ID.pack(slab.id), value, db=self.slabs)
                    case Shrink():
                        txn.delete(_ID.pack(job.slab.id), db=self.slabs)
                    case Barrier():
                        pass

        try:
            self._write(record)
        except BaseException:
            self.ids = known
            raise

    def close(self) -> None:
        self.env.close()

    def _record(self, txn: lmdb.Transaction, job: Record) -> None:
        page, frame = job.page, job.target
        namespace = page.namespace
        identity = (namespace.tenant.name, namespace.seed)
        number = self.ids.get(identity)
        if number is None:
            number = max(self.ids.values(), default=0) + 1
            fields = msgspec.to_builtins(namespace.spec)
            txn.put(_ID.pack(number), msgpack.packb((namespace.tenant.name, fields)), db=self.namespaces)
            self.ids[identity] = number
        parent = page.parent.key if page.parent is not None else namespace.seed
        value = _PAGE.pack(parent, page.number, frame.slab.id, frame.index, frame.checksum, frame.touched)
        txn.put(_ID.pack(number) + page.key, value, db=self.pages)

    def _write(self, body: Any) -> None:
        """Run `body` in one durable transaction, with a larger map if it needs one."""
        self._grow_to(self._used())
        while True:
            try:
                with self.env.begin(write=True) as txn:
                    body(txn)
                return
            except lmdb.MapFullError:
                self.env.reader_check()
                self.env.set_mapsize(2 * self.env.info()["map_size"])

    def _used(self) -> int:
        info = self.env.info()
        used: int = (info["last_pgno"] + 1) * self.env.stat()["psize"]
        return used

    def _grow_to(self, used: int) -> None:
        size = self.env.info()["map_size"]
        if used > size * (1 - _MAP_SPARE):
            self.env.set_mapsize(max(2 * size, 2 * used))
