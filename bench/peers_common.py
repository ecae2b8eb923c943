"""What every peer's script shares: one process puts, another gets, and a third, which started both, keeps the times.

A peer's script defines a `Store` and a context manager that starts its servers, and hands both to `main`. It runs under
the peer's own Python, so this module needs nothing but numpy. Events go to standard output as lines of JSON.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

PAGE = 2 << 20
SMALL = 1000  # keys of a batched lookup
SECONDS = 0.5  # a rate is measured for so long, three times
SINGLES = 300  # gets of one page, of which the median counts
WARM = 6  # rounds before those that count: by then every byte of a long-lived worker's and server's memory has been touched


class Store(Protocol):
    """A cache as a worker sees it. A put or a get is of all pages of a round, in one batch where there is one."""

    source: np.ndarray  # `[pages, PAGE]`: what the next put writes

    def clear(self) -> None:
        """Forget every page, so that memory used before is used again."""

    def put(self, turn: int) -> None: ...
    def prepare(self, turn: int, pages: int) -> None:
        """What must come before a get of so many pages, and is not counted."""

    def get(self, turn: int, pages: int) -> Sequence[np.ndarray]:
        """The bytes of the first pages, readable until `done`."""
        ...

    def done(self) -> None:
        """Give back what the last get took. Counted."""

    def put_small(self) -> None:
        """Store SMALL little entries, the subject of lookups."""

    def exists(self, count: int) -> int:
        """How many of the first little entries are there."""
        ...


def event(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def say(text: str) -> None:
    event(progress=text)


def loopback_up() -> None:
    """A new network namespace has its loopback down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = bytearray(struct.pack("16sH14x", b"lo", 0))
        fcntl.ioctl(sock, 0x8913, request)  # SIOCGIFFLAGS
        flags = struct.unpack_from("H", request, 16)[0] | 1  # IFF_UP
        fcntl.ioctl(sock, 0x8914, struct.pack("16sH14x", b"lo", flags))  # SIOCSIFFLAGS


@contextmanager
def server(command: Sequence[str | Path], ready: Callable[[], bool], wait: float = 60, **env: str) -> Iterator[None]:
    """A process, from when `ready` says so until the end of the block. Its output is the log's."""
    process = subprocess.Popen([str(part) for part in command], stdout=sys.stderr, env={**os.environ, **env})
    try:
        limit = time.monotonic() + wait
        while not ready():
            if process.poll() is not None:
                raise RuntimeError(f"{Path(command[0]).name} ended with status {process.returncode}")
            if time.monotonic() > limit:
                raise RuntimeError(f"{Path(command[0]).name} was not ready within {wait:.0f} s")
            time.sleep(0.1)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


class Worker:
    """A process of its own around a store; a call goes there and its result comes back."""

    def __init__(self, place: str, role: str, variant: str, pages: int) -> None:
        command = [sys.executable, sys.argv[0], "work", place, role, variant, str(pages)]
        self.role = role
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, name: str, *arguments: int) -> float:
        assert self.process.stdin and self.process.stdout
        try:
            print(json.dumps([name, *arguments]), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"the {self.role} ended with status {self.process.wait()}")
        reply = json.loads(line)
        if isinstance(reply, str):
            raise RuntimeError(f"the {self.role}: {reply}")  # noqa: TRY004 - it is what the worker could not do
        return float(reply)

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Work:
    """What the writer and the reader are asked to do. Every answer is in seconds, or a rate."""

    def __init__(self, store: Store, pages: int) -> None:
        self.store, self.pages, self.back = store, pages, 0.0
        self.plain = np.ones((2, 64, PAGE), np.uint8)

    def memcpy(self) -> float:
        """GB/s of copying pages within this process: what the machine gives at the moment."""
        started = time.perf_counter()
        for target, data in zip(self.plain[0], self.plain[1], strict=True):
            np.copyto(target, data)
        return self.plain[0].nbytes / (time.perf_counter() - started) / 1e9

    def put(self, turn: int) -> float:
        self.store.clear()
        for index in range(self.pages):
            self.store.source[index] = pattern(turn, index)
        started = time.perf_counter()
        self.store.put(turn)
        return time.perf_counter() - started

    def get(self, turn: int) -> float:
        self.store.prepare(turn, self.pages)
        started = time.perf_counter()
        views = self.store.get(turn, self.pages)
        taken = time.perf_counter() - started
        if len(views) != self.pages:
            raise RuntimeError(f"{len(views)} of {self.pages} pages came back")
        for index, view in enumerate(views):
            if view.nbytes != PAGE or view.min() != pattern(turn, index) or view.max() != pattern(turn, index):
                raise RuntimeError(f"page {index} came back with other bytes")
        del views
        started = time.perf_counter()
        self.store.done()
        return taken + time.perf_counter() - started

    def get_one(self, turn: int) -> float:
        """Until the page can be read."""
        times, back = [], []
        for _ in range(SINGLES):
            self.store.prepare(turn, 1)
            started = time.perf_counter()
            views = self.store.get(turn, 1)
            times.append(time.perf_counter() - started)
            if len(views) < 1:
                raise RuntimeError("a page was gone")
            del views
            started = time.perf_counter()
            self.store.done()
            back.append(time.perf_counter() - started)
        self.back = statistics.median(back)
        return statistics.median(times)

    def given_back(self) -> float:
        """What `done` took after each page of `get_one`."""
        return self.back

    def put_small(self) -> float:
        self.store.put_small()
        return 0.0

    def lookups(self, count: int) -> float:
        """Keys a second, `count` at a time."""
        rates = []
        for _ in range(3):
            calls, started = 0, time.perf_counter()
            while (passed := time.perf_counter() - started) < SECONDS:
                if self.store.exists(count) != count:
                    raise RuntimeError("a lookup missed what was put")
                calls += 1
            rates.append(calls * count / passed)
        return statistics.median(rates)


def pattern(turn: int, index: int) -> int:
    return (turn * 31 + index * 7 + 1) % 251


def work(make: Callable[[str, str, str, int], Store], place: str, role: str, variant: str, pages: int) -> int:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print do so into the log
    job = Work(make(place, role, variant, pages), pages)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            reply: float | str = getattr(job, name)(*arguments)
        except Exception as error:  # noqa: BLE001 - told to the process that asked, which ends the peer's turn
            reply = f"{type(error).__name__}: {error}"
        print(json.dumps(reply), file=out, flush=True)
    out.close()
    os._exit(0)  # some of these libraries do not survive their own destructors


def measure(place: str, name: str, variant: str, pages: int, rounds: int) -> None:
    """One row: medians of `rounds`, after those that warm up."""
    workers = [Worker(place, role, variant, pages) for role in ("writer", "reader")]
    writer, reader = workers
    try:
        puts, gets, copies = [], [], []
        for turn in range(WARM + rounds):
            which = f"round {turn - WARM + 1}" if turn >= WARM else "warming up"
            say(f"{name}: {pages} pages of 2 MiB put and got, {which}")
            puts.append(writer("put", turn))
            gets.append(reader("get", turn))
            copies.append(writer("memcpy"))
        say(f"{name}: one page at a time, then lookups")
        one = reader("get_one", WARM + rounds - 1)
        back = reader("given_back")
        writer("put_small")
        single, batched = reader("lookups", 1), reader("lookups", SMALL)
    finally:
        for worker in workers:
            worker.end()
    total = pages * PAGE / 1e9
    event(
        row=name,
        put=total / statistics.median(puts[WARM:]),
        get=total / statistics.median(gets[WARM:]),
        memcpy=statistics.median(copies[WARM:]),
        page=one * 1e3,
        back=back * 1e3,
        single=single,
        batched=batched,
    )


def in_turn(place: str, variant: str, pages: int) -> None:
    """A put for each line of standard input, until it ends; with a memcpy after it, to hold it against."""
    writer = Worker(place, "writer", variant, pages)
    try:
        for turn, _ in enumerate(sys.stdin):
            took = writer("put", turn % 20)
            event(put=pages * PAGE / 1e9 / took, memcpy=writer("memcpy"))
    finally:
        writer.end()


def main(
    make: Callable[[str, str, str, int], Store],
    servers: Callable[[str, int], AbstractContextManager[object]],
    variants: dict[str, str],
    after: Callable[[str, int], None] | None = None,
) -> int:
    """`variants`: the name of a row by what the store is told; `after` adds rows of another kind."""
    if sys.argv[1] == "work":
        return work(make, *sys.argv[2:5], int(sys.argv[5]))
    parser = argparse.ArgumentParser()
    parser.add_argument("--pages", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--in-turn", action="store_true", help="only puts of the first variant, when told to")
    given = parser.parse_args()
    loopback_up()
    with tempfile.TemporaryDirectory(prefix="kvp-") as place:
        os.environ["HOME"] = place
        if given.in_turn:
            with servers(place, given.pages):
                in_turn(place, next(iter(variants)), given.pages)
            return 0
        for variant, name in variants.items():  # each with servers of its own, which know nothing of the last
            try:
                with servers(place, given.pages):
                    measure(place, name, variant, given.pages, given.rounds)
            except RuntimeError as error:
                event(row=name, error=str(error))
        if after:
            after(place, given.pages)
    return 0
