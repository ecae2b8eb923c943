"""`kvtierd` with bad luck arranged: `python -m tests.system.faulty FAULTS ARGUMENT...`.

The daemon has no hooks for this; its media and index are wrapped here before its `main` runs. FAULTS is a JSON list of
faults, each met when the daemon passes its `point` for the `nth` time (and with `lasting`, ever after):

    store, stored       before and after a page is written to a file tier         load    before one is read
    synced              after the fdatasync of a batch                            grow    before a slab is made
    record, recorded    before and after the transaction that records pages
    erase, erased       before and after one that erases pages

`do` is "exit" (at once, as by SIGKILL), "fail" (OSError `errno`), "hang" (until the file `until` exists) or "sleep" for
`seconds`. With `offset`, only the page at that byte of its slab is meant.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier.errors import SlabError
from kvtier_daemon import index, main, media, server, web
from kvtier_daemon.jobs import Erase, Job, Record
from kvtier_daemon.slabs import Frame
from kvtier_daemon.store import SourceLost

EXITED = 77
"""Exit status of a daemon that met "exit"."""


class Faults:
    def __init__(self, faults: list[dict[str, Any]]) -> None:
        self.faults = faults
        self.passed: dict[int, int] = {}
        self.lock = threading.Lock()

    def reach(self, point: str, offset: int = -1) -> None:
        for number, fault in enumerate(self.faults):
            if fault["point"] != point or fault.get("offset", offset) != offset:
                continue
            with self.lock:
                times = self.passed[number] = self.passed.get(number, 0) + 1
            nth = fault.get("nth", 1)
            if times == nth or (times > nth and fault.get("lasting")):
                self.act(fault)

    def act(self, fault: dict[str, Any]) -> None:
        match fault["do"]:
            case "exit":
                os._exit(EXITED)
            case "fail":
                raise OSError(fault.get("errno", 5), os.strerror(fault.get("errno", 5)))
            case "sleep":
                time.sleep(fault["seconds"])
            case "hang":
                while not Path(fault["until"]).exists():
                    time.sleep(0.01)
            case other:
                raise ValueError(other)


def arrange(faults: Faults) -> None:
    """Wrap what does the daemon's I/O."""
    plain_store, plain_load, plain_grow = media.FileMedium.store, media.FileMedium.load, media.FileMedium.grow
    plain_apply, plain_write, plain_sync = index.Index.apply, index.Index._write, os.fdatasync
    under_way = threading.local()

    def store(self: media.FileMedium, frame: Frame, data: memoryview) -> None:
        faults.reach("store", frame.offset)
        plain_store(self, frame, data)
        faults.reach("stored", frame.offset)

    def load(self: media.FileMedium, frame: Frame, into: memoryview) -> None:
        try:
            faults.reach("load", frame.offset)
        except OSError as error:
            raise SourceLost(f"cannot read: {error.strerror}") from error
        plain_load(self, frame, into)

    def grow(self: media.FileMedium, slab_id: int, nbytes: int) -> int:
        try:
            faults.reach("grow")
        except OSError as error:
            raise SlabError(f"no room: {error.strerror}") from error
        return plain_grow(self, slab_id, nbytes)

    def apply(self: index.Index, jobs: list[Job]) -> None:
        under_way.jobs = jobs
        try:
            plain_apply(self, jobs)
        finally:
            under_way.jobs = []

    def write(self: index.Index, body: Callable[..., None]) -> None:
        jobs = getattr(under_way, "jobs", [])
        kinds = [(Record, "record", "recorded"), (Erase, "erase", "erased")]
        present = [names for kind, *names in kinds if any(isinstance(job, kind) for job in jobs)]
        for before, _ in present:
            faults.reach(before)
        plain_write(self, body)
        for _, after in present:
            faults.reach(after)

    def fdatasync(fd: int) -> None:
        plain_sync(fd)
        faults.reach("synced")

    patched: list[tuple[object, str, object]] = [
        *((media.FileMedium, "store", store), (media.FileMedium, "load", load), (media.FileMedium, "grow", grow)),
        *((index.Index, "apply", apply), (index.Index, "_write", write), (os, "fdatasync", fdatasync)),
    ]
    for owner, name, wrapped in patched:
        setattr(owner, name, wrapped)


def run(arguments: list[str]) -> int:
    settings: dict[str, Any] = json.loads(arguments[0])
    arrange(Faults(settings.get("faults", [])))
    if "most_unread" in settings:
        server._MOST_UNREAD = settings["most_unread"]
    if "period" in settings:
        web.PERIOD = settings["period"]
    return main.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
