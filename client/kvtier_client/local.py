"""A private daemon for notebooks and tests, which ends with the process that started it."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtier.errors import DaemonLost, KvtierError
from kvtier.paths import ATTACH_SOCKET
from kvtier_client.client import Client


class LocalDaemon:
    """A running `kvtierd` of this process's own. `endpoint` is where to attach; a context manager that stops it."""

    def __init__(
        self,
        *,
        host: str | int = "512MiB",
        ssd: str | int | None = None,
        directory: str | None = None,
        settings: Sequence[str] = (),
        first: Sequence[str] = (),
    ) -> None:
        """Host memory of that size, and with `ssd` a file tier, under `directory` or a temporary one; `settings` are
        further ones, such as "tiers.host.slab=64MiB", and `first` those of tiers above host memory."""
        self.temporary = directory is None
        self.directory = Path(directory or tempfile.mkdtemp(prefix="kvtier-"))
        self.endpoint = str(self.directory / "run")
        given = [*first, "tiers.host.medium=host", f"tiers.host.capacity={host}", "tiers.host.slab=16MiB"]
        if ssd is not None:
            given += ["tiers.ssd.medium=file", f"tiers.ssd.capacity={ssd}", f"tiers.ssd.path={self.directory / 'ssd'}"]
            given += ["tiers.ssd.slab=16MiB"]
        command = [sys.executable, "-m", "kvtier_daemon.main", "--end-with-parent", "--runtime-dir", self.endpoint]
        for setting in ("log_level=warning", "http_port=off", *given, *settings):
            command += ["--set", setting]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=_environment())
        atexit.register(self.stop)
        self._wait()

    def client(self, *, name: str = "", read_only: bool = False) -> Client:
        return Client(self.endpoint, name=name, read_only=read_only)

    def stop(self) -> None:
        """End it, its saved pages kept only in a directory that was given."""
        atexit.unregister(self.stop)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait(self) -> None:
        socket = Path(self.endpoint) / ATTACH_SOCKET
        for _ in range(1000):
            if self.process.poll() is not None:
                raise DaemonLost(f"kvtierd ended with status {self.process.returncode}; its errors are above")
            if socket.exists():
                try:
                    Client(self.endpoint, name="local").close()
                    return
                except KvtierError:
                    pass
            time.sleep(0.01)
        self.stop()
        raise DaemonLost("kvtierd did not come up within 10 s")


def local(*, host: str | int = "512MiB", ssd: str | int | None = None, directory: str | None = None) -> LocalDaemon:
    """Start a private daemon and wait until it serves. See `LocalDaemon`. Raises DaemonLost if it does not come up."""
    return LocalDaemon(host=host, ssd=ssd, directory=directory)


def _environment() -> dict[str, str]:
    """So that the daemon finds the packages this process was given, also where they are not installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
