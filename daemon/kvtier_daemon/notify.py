"""What systemd is told: sd_notify's protocol, in the few lines it takes. Without NOTIFY_SOCKET nothing is sent.

The watchdog is fed by the state thread, from its loop, and by nobody else: a daemon whose loop stands still is one that
answers no worker, and is to be restarted, whatever its other threads still do.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping

_EXTENSION = 10.0
"""Seconds by which a stop that makes progress is prolonged at a time."""


class Notifier:
    """Speaks to the manager that started this process, if one did. Never raises and never blocks."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        environment = os.environ if environment is None else environment
        address = environment.get("NOTIFY_SOCKET", "")
        self.address = "\0" + address[1:] if address.startswith("@") else address
        self.interval = 0.0
        """Seconds between two keep-alives, half of what the manager waits; 0: it does not watch."""
        if environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
            with contextlib.suppress(ValueError):
                self.interval = max(0, int(environment.get("WATCHDOG_USEC", "0"))) / 2e6
        self.due = float("inf")
        """When the next keep-alive is to be sent."""

    def send(self, *lines: str) -> None:
        if not self.address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.setblocking(False)
            connection.sendto("\n".join(lines).encode(), self.address)

    def starting(self, status: str) -> None:
        self.send(f"STATUS={status}")

    def ready(self, status: str) -> None:
        """It serves; from here on the watchdog runs."""
        self.send("READY=1", f"STATUS={status}")
        self.due = time.monotonic() if self.interval else float("inf")

    def reloading(self) -> None:
        """Settings are being read again; `ready` ends it."""
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, status: str) -> None:
        """It is stopping and gets on with it. To be said again within `_EXTENSION` seconds for as long as it does."""
        self.send("STOPPING=1", f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={_EXTENSION * 1e6:.0f}")

    def alive(self, now: float) -> None:
        """Called from every turn of the loop; tells the watchdog when it is time."""
        if now >= self.due:
            self.send("WATCHDOG=1")
            self.due = now + self.interval
