"""Real daemons and real worker processes, each in a directory of its own, taken down whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from kvtier_client import Client, NamespaceClient
from tests.system.pages import open_space

PATIENCE = 30.0
"""Seconds after which something that should happen is taken not to."""
ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join(
    [
        os.environ.get("KVTIER_COMPILED", ""),  # kvtier as installed, which `make test` has made
        *(str(ROOT / part) for part in (".", "daemon", "client", "kernels")),
        os.environ.get("PYTHONPATH", ""),
    ]
).strip(os.pathsep)
_ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("KVTIER")},
    "PYTHONPATH": PYTHONPATH,
    "PYTHONDONTWRITEBYTECODE": "1",
}


def eventually(true: Callable[[], object], what: str, within: float = PATIENCE) -> None:
    """Wait until `true()` is. For what no event tells of."""
    deadline = time.monotonic() + within
    while not true():
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        time.sleep(0.005)


class Process:
    """A child of the test whose first line of output says that it is ready."""

    def __init__(
        self,
        *command: str,
        errors: Path,
        environment: dict[str, str] | None = None,
        python: str = sys.executable,
        keeps: Sequence[int] = (),
    ) -> None:
        with errors.open("ab") as log:
            process: subprocess.Popen[bytes] = subprocess.Popen(
                [python, "-m", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_ENVIRONMENT | (environment or {}),
                cwd=ROOT,
                pass_fds=keeps,
            )
        self.adopt(process, errors)

    def adopt(self, process: Any, errors: Path) -> None:
        """Have `process`, a Popen or what acts as one, whose errors go to that file."""
        self.process = process
        self.errors = errors
        self._output = b""

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def line(self, within: float = PATIENCE) -> str:
        """The next line of its output, "" if it ended."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + within
        while b"\n" not in self._output:
            ready = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, f"no line within {within} s; its errors:\n{self.log()}"
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                return ""
            self._output += data
        line, _, self._output = self._output.partition(b"\n")
        return line.decode()

    def log(self) -> str:
        return self.errors.read_text(errors="replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def wait(self, within: float = PATIENCE) -> int:
        return int(self.process.wait(within))

    def close(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
            self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class Worker(Process):
    """A process attached to a daemon, doing what it is told (see `tests.system.worker`)."""

    def __init__(self, endpoint: str, errors: Path, options: dict[str, Any]) -> None:
        super().__init__("tests.system.worker", endpoint, json.dumps(options), errors=errors)
        assert self.line() == '{"result": "ready"}', self.log()

    def tell(self, code: str) -> None:
        """Have it run `code`, without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code).encode() + b"\n")
        self.process.stdin.flush()

    def heard(self, within: float = PATIENCE) -> Any:
        """What `code` left in `result`. Raises RuntimeError with the error that it raised."""
        line = self.line(within)
        if not line:
            raise RuntimeError(f"the worker ended: {self.log()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def do(self, code: str) -> Any:
        self.tell(code)
        return self.heard()


class Daemon:
    """A `kvtierd`, started as often as a test likes in the same directory with the same settings."""

    def __init__(self, directory: Path, settings: dict[str, object]) -> None:
        self.directory = directory
        self.settings = settings
        self.runtime = directory / "run"
        self.ssd = directory / "ssd"
        self.process: Process | None = None
        self.clients: list[Client] = []
        self.workers: list[Worker] = []
        self.expected_traceback = False
        self.environment: dict[str, str] = {}
        self.arguments: list[str] = []
        self._faults: dict[str, Any] = {}

    @property
    def endpoint(self) -> str:
        return str(self.runtime)

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def spawn(self, faults: list[dict[str, Any]] | None = None, **options: Any) -> Process:
        """The process, not waited for."""
        flags = [word for key, value in self.settings.items() for word in ("--set", f"{key}={value}")]
        arranged = json.dumps({"faults": faults or [], **options})
        command = ["tests.system.faulty", arranged, "--runtime-dir", self.endpoint, *flags, *self.arguments]
        return Process(*command, errors=self.directory / "log", environment=self.environment)

    def start(self, faults: list[dict[str, Any]] | None = None, **options: Any) -> Self:
        self.process = self.spawn(faults, **options)
        first = self.process.line()
        assert first, f"kvtierd did not start:\n{self.log}"
        assert "workers attach at" in self.process.line()
        return self

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.close()

    def stop(self, within: float = PATIENCE) -> None:
        """SIGTERM; it must end well."""
        assert self.process is not None
        self.process.process.send_signal(signal.SIGTERM)
        assert self.process.wait(within) == 0, self.log
        self.process.close()

    def client(self, **options: Any) -> Client:
        client = Client(self.endpoint, **options)
        self.clients.append(client)
        return client

    def space(self, model: str = "model", *, big: bool = False, **fields: Any) -> NamespaceClient:
        """A namespace of a client of its own."""
        return open_space(self.client(), model, big=big, **fields)

    def worker(self, **options: Any) -> Worker:
        """`options` are the client's, and `user`: whom it becomes (in the daemon's group)."""
        worker = Worker(self.endpoint, self.directory / f"worker-{len(self.workers)}", options)
        self.workers.append(worker)
        return worker

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for client in self.clients:
            client.close()
        if self.process is None:
            return
        running = self.process.process.poll() is None
        if running:
            self.process.process.send_signal(signal.SIGCONT)
            self.process.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait()
        status = self.process.process.poll()
        self.process.close()
        log = self.log
        assert status == 0 or not running, f"kvtierd did not end well ({status}):\n{log}"
        assert self.expected_traceback or "Traceback" not in log, log


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short path, since sockets stand in it; others may pass through it."""
    directory = Path(tempfile.mkdtemp(prefix="kvt", dir="/tmp"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


MakeDaemon = Callable[..., Daemon]


@pytest.fixture
def make(place: Path) -> Iterator[MakeDaemon]:
    """Daemons not started yet. `host` and `ssd` are capacities (`ssd` None: no such tier), `slab` that of both; other
    settings by name, with "__" for each dot."""
    made: list[Daemon] = []

    def factory(*, host: str = "16MiB", ssd: str | None = None, slab: str = "256KiB", **others: object) -> Daemon:
        directory = place / f"d{len(made)}"
        directory.mkdir(mode=0o755)
        settings: dict[str, object] = {
            "log_level": "info",
            "http_port": "off",
            "stop_timeout": 10,
            "tiers.host.medium": "host",
            "tiers.host.capacity": host,
            "tiers.host.slab": slab,
        }
        if ssd is not None:
            settings |= {
                "tiers.ssd.medium": "file",
                "tiers.ssd.capacity": ssd,
                "tiers.ssd.slab": slab,
                "tiers.ssd.path": directory / "ssd",
            }
        settings |= {name.replace("__", "."): value for name, value in others.items()}
        made.append(Daemon(directory, settings))
        return made[-1]

    yield factory
    problems = []
    for daemon in reversed(made):
        try:
            daemon.close()
        except AssertionError as error:
            problems.append(str(error))
    assert not problems, "\n".join(problems)


@pytest.fixture
def daemon(make: MakeDaemon) -> Daemon:
    """Host memory of 16 MiB and SSD of 64 MiB, running."""
    return make(ssd="64MiB").start()
