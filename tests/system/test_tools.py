"""`kvtier top` on a terminal of its own, and `kvtier bench` on private and running daemons."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.emulation import PATH
from tests.system.conftest import _ENVIRONMENT, PYTHONPATH, Daemon, MakeDaemon, eventually
from tests.system.pages import chain, put

CLI = [sys.executable, "-m", "kvtier_client.cli"]
ON_TERMINAL = """
import fcntl, runpy, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal to it
sys.argv[0] = "kvtier"
runpy.run_module("kvtier_client.cli", run_name="__main__")
"""
LEAVE = b"\x1b[?1049l"
"""Back from the alternate screen."""
SHOW = b"\x1b[?25h"
"""The cursor is seen again."""


class Terminal:
    """A process on a pseudo-terminal, as over ssh."""

    def __init__(self, *arguments: str, width: int = 80, height: int = 24) -> None:
        self.main, self.side = pty.openpty()
        self.resize(width, height)
        self.modes = termios.tcgetattr(self.side)
        self.output = b""
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_TERMINAL, *arguments],
            stdin=self.side,
            stdout=self.side,
            stderr=self.side,
            env=_ENVIRONMENT | {"TERM": "xterm-256color", "COLORTERM": "", "LANG": "C.UTF-8", "PYTHONUTF8": "1"},
            start_new_session=True,
        )

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def read(self) -> bytes:
        while select.select([self.main], [], [], 0)[0]:
            self.output += os.read(self.main, 1 << 16)
        return self.output

    def see(self, text: bytes) -> None:
        eventually(lambda: text in self.read(), f"{text!r} on the terminal")

    def press(self, keys: bytes) -> None:
        os.write(self.main, keys)

    def ended_well(self) -> None:
        """Status 0, and the terminal as it was."""

        def over() -> bool:
            self.read()
            return self.process.poll() is not None

        eventually(over, "the end of top")
        self.read()
        assert self.process.returncode == 0, self.output
        assert termios.tcgetattr(self.side) == self.modes
        assert self.output.rindex(LEAVE) > self.output.rindex(b"\x1b[?1049h")
        assert self.output.rindex(SHOW) > self.output.rindex(b"\x1b[?25l")
        os.close(self.main)
        os.close(self.side)


def start_top(daemon: Daemon) -> Terminal:
    terminal = Terminal("top", "--interval", "0.2", "--endpoint", daemon.endpoint)
    terminal.see(b"q quit")
    return terminal


@pytest.mark.parametrize("keys", [b"q", b"Q", b"\x03", b"\x1b"])
def test_top_quits_by_key_and_leaves_the_terminal_as_it_was(daemon: Daemon, keys: bytes) -> None:
    terminal = start_top(daemon)
    terminal.press(keys)
    terminal.ended_well()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_top_quits_by_signal_and_leaves_the_terminal_as_it_was(daemon: Daemon, number: signal.Signals) -> None:
    terminal = start_top(daemon)
    terminal.process.send_signal(number)
    terminal.ended_well()


def test_top_shows_what_happens_follows_the_window_and_ignores_other_keys(daemon: Daemon) -> None:
    space = daemon.space("org/some-model")
    put(space, chain(space, 1, 20))
    terminal = start_top(daemon)
    for text in (b"host", b"ssd", b"some-model", b"MOVERS"):
        terminal.see(text)
    terminal.press(b"x\x1a\x1b[A")  # a letter, Ctrl-Z and an arrow
    terminal.press(b"p")
    terminal.see(b"paused")
    terminal.press(b"p")
    terminal.resize(120, 40)
    time.sleep(0.6)
    assert terminal.process.poll() is None
    terminal.press(b"q")
    terminal.ended_well()


def test_top_waits_for_a_daemon_that_went_away(daemon: Daemon) -> None:
    terminal = start_top(daemon)
    daemon.stop()
    terminal.see(b"no daemon answers")
    terminal.output = b"\x1b[?1049h\x1b[?25l"
    daemon.start()
    terminal.see(b"every 0.2 s")
    terminal.press(b"q")
    terminal.ended_well()


def run(
    *arguments: str, status: int = 0, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*CLI, *arguments],
        env=_ENVIRONMENT | (environment or {}),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_top_once_prints_one_picture_without_escapes(daemon: Daemon) -> None:
    text = run("top", "--once", "--interval", "0.1", "--endpoint", daemon.endpoint).stdout
    assert "\x1b" not in text and "TIER" in text and "nothing to report" in text
    view = json.loads(run("top", "--once", "--json", "--interval", "0.1", "--endpoint", daemon.endpoint).stdout)
    assert [tier["name"] for tier in view["tiers"]] == ["host", "ssd"]


def test_top_needs_a_terminal_or_once(daemon: Daemon) -> None:
    assert "--once" in run("top", "--endpoint", daemon.endpoint, status=1).stderr


def figures(text: str) -> dict[str, dict[str, float]]:
    report = json.loads(text)
    return {row["name"]: row for row in report["figures"]}


def test_bench_measures_a_private_daemon_and_leaves_nothing(place: Path) -> None:
    plot = place / "bench.png"
    pytest.importorskip("matplotlib")
    done = run("bench", "--json", "--size", "32MiB", "--directory", str(place), "--plot", str(plot), "--no-gpu")
    rows = figures(done.stdout)
    assert set(rows) == {
        *("borrow and release 1 page", "borrow and release 16 pages", "write pages, host", "read borrowed pages, host"),
        *("SSD write", "SSD read"),
    }
    assert all(row["value"] > 0 for row in rows.values())
    for name in ("write pages, host", "SSD write", "SSD read"):
        assert rows[name]["ratio"] == pytest.approx(rows[name]["value"] / rows[name]["limit"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in place.iterdir()] == ["bench.png"]


def test_bench_of_a_running_daemon_evicts_what_it_wrote_and_nothing_else(make: MakeDaemon) -> None:
    daemon = make(host="160MiB", ssd="160MiB", slab="2MiB").start()
    space = daemon.space()
    put(space, keys := chain(space, 1, 20))
    arguments = ("--running", "--size", "32MiB", "--no-gpu", "--endpoint", daemon.endpoint)
    done = run("bench", *arguments, "--json", "--directory", str(daemon.directory))
    assert figures(done.stdout)["SSD read"]["limit"] > 0
    done = run("bench", *arguments)
    assert "without the disk's own speed: say --directory" in done.stdout
    assert space.lookup(keys) == 20
    spaces = space.client.inventory()["namespaces"]
    assert [(one["model"], one["pages"]) for one in spaces if one["pages"]] == [("model", 20)]
    assert not list(daemon.directory.glob(".kvtier-bench-*"))


def test_bench_does_not_evict_others_pages(daemon: Daemon) -> None:
    done = run("bench", "--running", "--no-gpu", "--endpoint", daemon.endpoint, status=1)
    assert "would evict others' pages" in done.stderr


def test_bench_says_what_is_missing(daemon: Daemon, place: Path) -> None:
    fake = place / "without"
    fake.mkdir()
    (fake / "matplotlib.py").write_text("raise ImportError('not here')")
    done = run("bench", "--plot", "x.png", status=1, environment={"PYTHONPATH": f"{fake}:{_ENVIRONMENT['PYTHONPATH']}"})
    assert "pip install 'kvtier[plot]'" in done.stderr
    assert "at least 32 MiB" in run("bench", "--size", "1MiB", status=1).stderr


def test_bench_measures_gpus(place: Path) -> None:
    environment = {"KVTIER_EMULATED_GPUS": "2", "PYTHONPATH": f"{PATH}:{PYTHONPATH}"}
    rows = figures(run("bench", "--json", "--size", "32MiB", "--directory", str(place), environment=environment).stdout)
    for name in ("host to GPU", "GPU to host", "GPU to GPU"):
        assert rows[name]["value"] > 0 and rows[name]["limit"] > 0
