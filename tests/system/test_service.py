"""kvtierd as a system service: what it tells systemd, reloading, its log, and what the doctor says about it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import AccessDenied, InvalidRequest, OutOfPages
from tests.system.conftest import _ENVIRONMENT, PATIENCE, ROOT, Daemon, MakeDaemon, eventually
from tests.system.pages import chain, put


class Manager:
    """Plays systemd's end of the notify socket: what came, with when."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.heard: list[tuple[float, dict[str, str]]] = []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while data := self.socket.recv(1 << 16):
            lines = dict(line.partition("=")[::2] for line in data.decode().splitlines())
            self.heard.append((time.monotonic(), lines))

    def times(self, key: str) -> list[float]:
        return [moment for moment, lines in self.heard if key in lines]

    def first(self, key: str) -> dict[str, str]:
        return next(lines for _, lines in self.heard if key in lines)


@pytest.fixture
def manager(place: Path) -> Iterator[Manager]:
    made = Manager(place / "notify")
    yield made
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.sendto(b"", made.path)


def watched(daemon: Daemon, manager: Manager, seconds: float) -> Daemon:
    daemon.environment |= {"NOTIFY_SOCKET": manager.path, "WATCHDOG_USEC": f"{seconds * 1e6:.0f}"}
    return daemon


def send(daemon: Daemon, number: signal.Signals) -> None:
    assert daemon.process is not None
    daemon.process.process.send_signal(number)


def cli(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtier_client.cli", *arguments, "--endpoint", daemon.endpoint],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=_ENVIRONMENT,
        cwd=ROOT,
        check=False,
    )


def test_it_is_ready_when_the_index_is_read_and_workers_can_attach(make: MakeDaemon, manager: Manager) -> None:
    daemon = make(ssd="64MiB").start()
    space = daemon.space()
    keys = chain(space, 1, 30)
    put(space, keys)
    daemon.stop()
    daemon.process = watched(daemon, manager, 60).spawn()
    eventually(lambda: manager.times("READY"), "READY=1")
    assert daemon.space().lookup(keys) == 30, "ready before the pages are"
    statuses = [lines["STATUS"] for _, lines in manager.heard if "STATUS" in lines]
    assert any("index of tier ssd" in status for status in statuses)
    assert "serving: host 16.0 MiB, ssd 64.0 MiB" in manager.first("READY")["STATUS"]


def test_the_watchdog_is_fed_at_rest_and_not_by_a_daemon_that_stands_still(make: MakeDaemon, manager: Manager) -> None:
    daemon = watched(make(), manager, 0.6).start()
    eventually(lambda: len(manager.times("WATCHDOG")) >= 5, "keep-alives")
    times = manager.times("WATCHDOG")
    assert max(after - before for before, after in itertools.pairwise(times)) < 0.6
    send(daemon, signal.SIGSTOP)
    time.sleep(0.2)
    before = len(manager.times("WATCHDOG"))
    time.sleep(0.8)
    assert len(manager.times("WATCHDOG")) == before
    send(daemon, signal.SIGCONT)
    eventually(lambda: len(manager.times("WATCHDOG")) > before, "keep-alives again")


def test_a_stop_that_saves_pages_asks_for_the_time_it_takes(make: MakeDaemon, manager: Manager) -> None:
    daemon = watched(make(ssd="64MiB"), manager, 0.6)
    daemon.start([{"point": "store", "do": "sleep", "seconds": 0.4, "lasting": True}])
    space = daemon.space()
    put(space, chain(space, 1, 30))
    before = time.monotonic()
    send(daemon, signal.SIGTERM)
    assert daemon.process is not None and daemon.process.wait() == 0
    stops = [lines for _, lines in manager.heard if "STOPPING" in lines]
    assert len(stops) >= 2 and all(int(lines["EXTEND_TIMEOUT_USEC"]) > 0 for lines in stops)
    assert any("pages to go" in lines["STATUS"] for lines in stops)
    assert any(moment > before + 0.3 for moment in manager.times("WATCHDOG")), "the watchdog is fed while it saves"


def test_a_reload_takes_over_what_can_change_live(make: MakeDaemon, manager: Manager, place: Path) -> None:
    daemon = watched(make(), manager, 60)
    del daemon.settings["tiers.host.capacity"], daemon.settings["log_level"]
    file = place / "kvtierd.toml"
    text = 'log_level = "{}"\nslow_request = 1.0\n[tiers.host]\nmedium = "host"\ncapacity = "{}"\n'

    def write(level: str, capacity: str, more: str = "") -> None:
        file.write_text(text.format(level, capacity) + more)

    write("info", "16MiB")
    daemon.settings["tiers.host.slab"] = "256KiB"
    daemon.arguments = ["--config", str(file)]
    daemon.start()
    client = daemon.client()

    def capacity() -> int:
        return int(client.stats()["tiers"][0]["capacity"])

    assert (capacity(), client.log_level()) == (16 << 20, "info")
    write("debug", "32MiB", "queue_depth = 3\n")
    send(daemon, signal.SIGHUP)
    eventually(lambda: capacity() == 32 << 20, "the new capacity")
    assert client.log_level() == "debug"
    eventually(lambda: len(manager.times("READY")) == 2, "READY=1 after the reload")
    assert int(manager.first("RELOADING")["MONOTONIC_USEC"]) > 0
    assert "32.0 MiB" in [lines for _, lines in manager.heard if "READY" in lines][-1]["STATUS"]
    assert "only after a restart: tiers.host.queue_depth" in daemon.log

    client.resize("host", "8MiB")
    client.log_level("error")
    send(daemon, signal.SIGHUP)
    eventually(lambda: capacity() == 32 << 20 and client.log_level() == "debug", "the settings win over commands")

    file.write_text("log_level = 5\n")
    send(daemon, signal.SIGHUP)
    eventually(lambda: len(manager.times("READY")) == 4, "READY=1 after a reload in vain")
    assert "not reloaded" in daemon.log and capacity() == 32 << 20
    assert client.ping() < PATIENCE


def test_the_log_level_changes_live_and_for_administrators_only(daemon: Daemon) -> None:
    done = cli(daemon, "log-level", "debug")
    assert done.returncode == 0 and "it was info" in done.stdout
    client = daemon.client()
    client.ping()
    eventually(lambda: "verb=ping" in daemon.log, "a request in the log")
    assert cli(daemon, "log-level").stdout.strip() == "debug"
    assert json.loads(cli(daemon, "log-level", "warning", "--json").stdout) == {"level": "warning", "before": "debug"}
    with pytest.raises(InvalidRequest, match="no log level"):
        client.log_level("loud")
    if os.geteuid() == 0:
        with pytest.raises(RuntimeError, match=AccessDenied.__name__):
            daemon.worker(user=65534).do("result = client.log_level('debug')")


def test_at_rest_the_log_is_quiet(daemon: Daemon) -> None:
    space = daemon.space()
    put(space, chain(space, 1, 20))
    space.lookup(chain(space, 1, 20))
    eventually(lambda: not daemon.client().stats()["tiers"][1]["unsaved"], "all saved")
    before = daemon.log
    time.sleep(2.5)
    assert daemon.log == before


def test_the_journal_gets_json_with_priorities(make: MakeDaemon) -> None:
    daemon = make(ssd="64MiB")
    log = daemon.directory / "log"
    log.touch()
    daemon.environment["JOURNAL_STREAM"] = f"{log.stat().st_dev}:{log.stat().st_ino}"
    daemon.start().stop()
    lines = daemon.log.splitlines()
    assert all(line.startswith("<6>") for line in lines)
    messages = [json.loads(line[3:])["msg"] for line in lines]
    assert any("back in" in message for message in messages) and "all pages saved" in messages[-1]


def test_slow_requests_say_what_they_waited_for(make: MakeDaemon) -> None:
    daemon = make(host="1MiB", slow_request=0.3, log_format="json").start()
    space = daemon.space()
    held: list[Any] = []
    with pytest.raises(OutOfPages):
        while True:
            held.append(space.reserve(chain(space, 1 + len(held), 20), timeout=0.6))
    eventually(lambda: "slow: reserve" in daemon.log, "a slow request in the log")
    (line,) = [line for line in daemon.log.splitlines() if "slow: reserve" in line][-1:]
    record = json.loads(line)
    assert record["waited_frames"] == pytest.approx(0.6, abs=0.3) and record["result"] == "out_of_pages"
    assert record["verb"] == "reserve" and record["seconds"] >= 0.6


def test_the_doctor_examines_a_running_daemon(daemon: Daemon) -> None:
    done = cli(daemon, "doctor", "--json")
    report = json.loads(done.stdout)
    found = {finding["check"]: finding for finding in report["findings"]}
    assert done.returncode == report["status"] < 2, report
    assert found["daemon"]["level"] == "ok" and "answers" in found["daemon"]["text"]
    assert ("compiled" in found) is ("KVTIER_COMPILED" not in os.environ), "said of one that runs from its sources"
    assert found["directories"]["level"] == "ok"
    assert any(str(daemon.ssd) in finding["text"] for finding in report["findings"]), "its own settings"
    assert "speed" not in found, "a running daemon's disk is left alone"
    shown = cli(daemon, "doctor")
    assert shown.returncode == done.returncode and "kvtierd" in shown.stdout

    other = cli(daemon, "doctor", "--json", "--set", "tiers.h.medium=host", "--set", "tiers.h.capacity=900TiB")
    assert other.returncode == 2 and "900.0 TiB" in other.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_the_doctor_tells_a_user_who_may_not_attach(daemon: Daemon) -> None:
    code = (
        "import os, sys; from kvtier_client import cli, doctor; os.setgroups([]); os.setgid(65534); os.setuid(65534); "
    )
    code += f"sys.exit(cli.main(['doctor', '--no-probe', '--endpoint', {daemon.endpoint!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, env=_ENVIRONMENT, check=False
    )
    assert done.returncode == 2 and "may not attach" in done.stdout, done.stdout + done.stderr
