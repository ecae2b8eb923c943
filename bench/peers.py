"""kvtier beside other caches, in one run: pages of 2 MiB that one process puts and another gets.

    python bench/peers.py [--mooncake] [--lmcache] [--redis] [--pages N] [--rounds N] [--turns N] [--json FILE]

kvtier is always measured. A peer is installed on first use under .cache/bench/, in a virtual environment of its own,
and every one runs in a network namespace of its own (`unshare -n`), which reaches nothing outside. One that cannot be
installed or does not run says so in its row. With `--turns`, puts again, of all of them by turns: on a machine that is
not quiet, that is what tells who is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PLACE = HERE.parent / ".cache" / "bench"
LIMIT = 300  # seconds that a peer may take
WARM = 6  # turns before those that count
COLUMNS = {
    "put": ("put GB/s", ".2f"),
    "get": ("get GB/s", ".2f"),
    "memcpy": ("memcpy GB/s", ".2f"),
    "page": ("one page ms", ".3f"),
    "back": ("given back ms", ".3f"),
    "single": ("lookups/s", ",.0f"),
    "batched": ("batched/s", ",.0f"),
}
GETS = """\
What a get does. kvtier, borrowed: nothing moves, the reader sees the daemon's memory; GB/s count the borrow and the
release, one page the time until it can be read. Copied out: a borrow and one memcpy into memory of the reader's own.
Mooncake: `batch_get_into` copies into memory that the reader shares with mooncake_client. LMCache: `retrieve` copies
from shared memory into the blocks of the layers, after a lookup that is not counted. Redis: one GET a page (faster
than MGET), through a socket, into new memory. A batched lookup is of 1,000 keys that are all there (LMCache's own
bench: one key a page); kvtier looks them up in a table that its daemon shares, the others ask a server. memcpy is that
of one thread between the rounds of that row: what the machine gave just then."""


class Failed(Exception):
    """A peer that cannot be had here, and why."""


def run(command: list[str], **options: Any) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900, check=False, **options
    )
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.strip()] or ["nothing"]
        raise Failed(f"{' '.join(command[:4])} ...: {lines[-1].strip()}")


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Says what is under way, and again every ten seconds while it is."""
    over, began = threading.Event(), time.monotonic()

    def talk() -> None:
        while not over.wait(10):
            print(f"  {text} ... {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    print(f"  {text} ...", file=sys.stderr, flush=True)
    threading.Thread(target=talk, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def environment(name: str, *steps: list[str]) -> str:
    """The Python of a virtual environment in which `pip install` has taken these steps."""
    place = PLACE / name
    python, mark, wanted = str(place / "bin" / "python"), place / "installed.json", json.dumps(steps)
    if not (mark.exists() and mark.read_text() == wanted):
        with progress(f"{name}: installing into .cache/bench/{name}, this once"):
            shutil.rmtree(place, ignore_errors=True)
            run([sys.executable, "-m", "venv", str(place)])
            for step in steps:
                run([python, "-m", "pip", "install", "--quiet", *step])
            mark.write_text(wanted)
    return python


def debian(name: str, *packages: str) -> Path:
    """A folder with the files of Debian packages, unpacked and not installed."""
    place = PLACE / f"{name}-debian"
    mark, wanted = place / "installed.json", json.dumps(packages)
    if not (mark.exists() and mark.read_text() == wanted):
        for tool in ("apt-get", "dpkg"):
            if not shutil.which(tool):
                raise Failed(f"it needs files of Debian packages ({', '.join(packages)}), and there is no {tool}")
        with progress(f"{name}: unpacking {' '.join(packages)}, this once"):
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            try:
                run(["apt-get", "download", *packages], cwd=place)
            except Failed:
                run(["apt-get", "update"])
                run(["apt-get", "download", *packages], cwd=place)
            for package in place.glob("*.deb"):
                run(["dpkg", "-x", str(package), str(place)])
                package.unlink()
            mark.write_text(wanted)
    return place


def libraries(place: Path) -> dict[str, str]:
    folders = sorted({str(path.parent) for path in place.rglob("*.so*")})
    return {"LD_LIBRARY_PATH": ":".join(folders), "BENCH_DEBIAN": str(place)}


def kvtier() -> tuple[str, dict[str, str]]:
    return sys.executable, {}


def mooncake() -> tuple[str, dict[str, str]]:
    # The same release as mooncake-transfer-engine, built without CUDA, whose libraries are not here.
    python = environment("mooncake", ["mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy==2.4.6"])
    return python, libraries(debian("mooncake", "libibverbs1", "libnl-3-200", "libnl-route-3-200"))


def lmcache() -> tuple[str, dict[str, str]]:
    # torch from a wheel on disk (pip's find-links): what an index offers is a CUDA build of several GB.
    return environment("lmcache", ["--no-index", "--no-deps", "torch==2.13.0"], ["lmcache==0.5.6"]), {}


def redis() -> tuple[str, dict[str, str]]:
    python = environment("redis", ["redis[hiredis]==8.1.0", "numpy==2.4.6"])
    return python, libraries(debian("redis", "redis-server", "redis-tools", "libjemalloc2", "liblzf1", "libatomic1"))


PEERS: dict[str, Callable[[], tuple[str, dict[str, str]]]] = {"mooncake": mooncake, "lmcache": lmcache, "redis": redis}


def namespace() -> list[str]:
    for command in (["unshare", "-n"], ["unshare", "-rn"]):
        if (
            shutil.which("unshare")
            and not subprocess.run([*command, "true"], stderr=subprocess.DEVNULL, check=False).returncode
        ):
            return command
    raise Failed("no network namespace can be made here (unshare -n), and nothing runs outside one")


def start(name: str, install: Callable[[], tuple[str, dict[str, str]]], *options: str) -> subprocess.Popen[str]:
    """The script of one peer, under its own Python; its log is .cache/bench/NAME.log."""
    python, more = install()
    script = [*namespace(), python, str(HERE / f"peers_{name}.py"), *options]
    PLACE.mkdir(parents=True, exist_ok=True)
    with (PLACE / f"{name}.log").open("w") as errors:
        return subprocess.Popen(
            script,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            env={**os.environ, **more},
        )


def measure(name: str, install: Callable[[], tuple[str, dict[str, str]]], pages: int, rounds: int) -> Iterator[dict]:
    """The rows of one peer, as they come."""
    rows = 0
    log = PLACE / f"{name}.log"
    with start(name, install, "--pages", str(pages), "--rounds", str(rounds)) as process:
        timer = threading.Timer(LIMIT, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        try:
            assert process.stdout
            for line in process.stdout:
                told = json.loads(line)
                if "progress" in told:
                    print(f"  {told['progress']} ...", file=sys.stderr, flush=True)
                else:
                    rows += 1
                    yield told
            status = process.wait()
        finally:
            timer.cancel()
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    if status or not rows:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["it said nothing"]
        raise Failed(f"status {status}: {last[-1].strip()} (.cache/bench/{log.name})")


def by_turns(peers: dict[str, Callable[[], tuple[str, dict[str, str]]]], pages: int, turns: int) -> Iterator[dict]:
    """Puts of all peers, one after another, again and again; the first turns warm up."""
    options = ["--pages", str(pages), "--rounds", "1", "--in-turn"]
    running: dict[str, subprocess.Popen[str]] = {}
    timers: list[threading.Timer] = []
    try:
        for name, install in peers.items():
            running[name] = start(name, install, *options)
            timers.append(threading.Timer(2 * LIMIT, os.killpg, (running[name].pid, signal.SIGKILL)))
            timers[-1].start()
        puts: dict[str, list[float]] = {name: [] for name in running}
        copies: dict[str, list[float]] = {name: [] for name in running}
        for turn in range(WARM + turns):
            for name, process in running.items():
                told = told_by(name, process)
                if turn >= WARM:
                    puts[name].append(told["put"])
                    copies[name].append(told["memcpy"])
        for name, each in puts.items():
            best = sum(put == max(others) for put, others in zip(each, zip(*puts.values(), strict=True), strict=True))
            ratio = statistics.median(put / copy for put, copy in zip(each, copies[name], strict=True))
            row = {"row": f"{name}, puts by turns", "put": statistics.median(each)}
            yield row | {"memcpy": statistics.median(copies[name]), "of_memcpy": ratio, "first": best, "turns": turns}
    finally:
        for timer in timers:
            timer.cancel()
        for process in running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=60)  # it ends with its input
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def told_by(name: str, process: subprocess.Popen[str]) -> dict[str, float]:
    """What a peer's script says of the put that it is told to make."""
    assert process.stdin and process.stdout
    try:
        print(file=process.stdin, flush=True)
    except BrokenPipeError:
        pass
    for line in process.stdout:
        told: dict[str, Any] = json.loads(line)
        if "progress" not in told:
            return told
    raise Failed(f"{name} ended with status {process.wait()}: see .cache/bench/{name}.log")


def show(row: dict[str, Any]) -> None:
    if "error" in row:
        print(f"{row['row']:33} did not run: {row['error']}", flush=True)
        return
    if "of_memcpy" in row:
        print(
            f"{row['row']:33}{row['put']:14.2f}{'':14}{row['memcpy']:14.2f}   {row['of_memcpy']:.2f} of memcpy, the fastest "
            f"in {row['first']} of {row['turns']} turns",
            flush=True,
        )
        return
    cells = [format(row[key], form) if key in row else "-" for key, (_, form) in COLUMNS.items()]
    print(f"{row['row']:33}" + "".join(f"{cell:>14}" for cell in cells), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for peer in PEERS:
        parser.add_argument(f"--{peer}", action="store_true")
    parser.add_argument("--pages", type=int, default=256, help="of 2 MiB, in a put or a get (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, choices=range(1, 10), help="(default: %(default)s)")
    parser.add_argument("--turns", type=int, default=0, help="of puts of all peers (default: none)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    given = parser.parse_args()
    print(f"{'':33}" + "".join(f"{title:>14}" for title, _ in COLUMNS.values()), flush=True)
    rows: list[dict[str, Any]] = []
    peers = {"kvtier": kvtier, **{name: install for name, install in PEERS.items() if getattr(given, name)}}
    for name, install in peers.items():
        try:
            for row in measure(name, install, given.pages, given.rounds):
                rows.append(row)
                show(row)
        except (Failed, OSError, subprocess.SubprocessError) as error:
            rows.append({"row": name, "error": str(error)})
            show(rows[-1])
    if given.turns:
        try:
            with progress(f"puts of {', '.join(peers)} by turns"):
                for row in by_turns(peers, given.pages, given.turns):
                    rows.append(row)
                    show(row)
        except (Failed, OSError, subprocess.SubprocessError) as error:
            rows.append({"row": "puts by turns", "error": str(error)})
            show(rows[-1])
    print(f"\n{GETS}")
    if given.json:
        Path(given.json).write_text(json.dumps(rows, indent=2))
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
