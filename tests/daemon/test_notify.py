"""sd_notify's protocol, against a socket of our own."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path

from kvtier_daemon.notify import Notifier


def test_without_a_manager_nothing_is_sent() -> None:
    notifier = Notifier({})
    notifier.ready("serving")
    notifier.alive(time.monotonic())
    assert notifier.due == float("inf")


def test_a_manager_that_is_gone_or_reads_nothing_costs_nothing(tmp_path: Path) -> None:
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "none")}).ready("serving")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        started = time.monotonic()
        for _ in range(2000):
            notifier.starting("x" * 1000)
        assert time.monotonic() - started < 5


def test_messages_in_an_abstract_socket() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        name = f"kvtier-test-{os.getpid()}"
        manager.bind(f"\0{name}")
        notifier = Notifier({"NOTIFY_SOCKET": f"@{name}", "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())})
        assert notifier.interval == 1.0
        notifier.ready("serving")
        assert manager.recv(4096) == b"READY=1\nSTATUS=serving"
        now = time.monotonic()
        for moment in (now, now + 0.5, now + 1.1):
            notifier.alive(moment)
        assert [manager.recv(4096), manager.recv(4096)] == [b"WATCHDOG=1"] * 2
        notifier.reloading()
        assert re.fullmatch(rb"RELOADING=1\nMONOTONIC_USEC=\d+", manager.recv(4096))
        notifier.stopping("saving")
        assert manager.recv(4096) == b"STOPPING=1\nSTATUS=saving\nEXTEND_TIMEOUT_USEC=10000000"


def test_another_processs_watchdog_is_not_fed() -> None:
    assert Notifier({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}).interval == 0
    assert Notifier({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "soon"}).interval == 0
