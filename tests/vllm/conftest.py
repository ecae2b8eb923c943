"""Real vLLM engines, in processes of another environment than the tests': vLLM brings a torch of its own.

`KVTIER_VLLM` names a folder that `.ci/vllm` has filled; its default is where that puts it. Without one, tests that need an
engine are skipped, and say so; where the variable is set they are not. `KVTIER_VLLM_VERSION` has every engine be of another
version of vLLM, one that `.ci/vllm` has put beside the first.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.conftest import PYTHONPATH, Daemon, Process

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier-ci" / "vllm"
HOME = Path(os.environ.get("KVTIER_VLLM") or CACHE)
PYTHON = HOME / "venv" / "bin" / "python"
MODEL = HOME / "model"
BLOCK = 32
VERSION = os.environ.get("KVTIER_VLLM_VERSION", "")
START = 180.0
"""Seconds that an engine may take to come up, and `ANSWER` a step of a test."""
ANSWER = 120.0


_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # several engines and tests share the cores
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def version(number: str) -> dict[str, str]:
    """The environment of an engine of that version."""
    return {"PYTHONPATH": os.pathsep.join((str(HOME / "versions" / number), PYTHONPATH)), "VLLM_TARGET_DEVICE": "cpu"}


if VERSION:
    _ENVIRONMENT |= version(VERSION)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if (HOME / "complete").exists():
        return
    if os.environ.get("KVTIER_VLLM"):
        raise pytest.UsageError(f"KVTIER_VLLM is {HOME}, and there is no vLLM: fill it with .ci/vllm")
    skip = pytest.mark.skip(reason=f"no vLLM in {HOME}: .ci/vllm puts one there (3.5 GB)")
    for item in items:
        if "engines" in getattr(item, "fixturenames", ()):
            item.add_marker(skip)


class Nursery(Process):
    """The process that engines are forked from, with vLLM imported; see `tests.vllm.engine.nursery`."""

    def __init__(self, errors: Path) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            command = ("tests.vllm.engine", str(theirs.fileno()))
            super().__init__(
                *command, errors=errors, environment=_ENVIRONMENT, python=str(PYTHON), keeps=(theirs.fileno(),)
            )
        self.ended: dict[int, int] = {}

    def fork(self, options: dict[str, Any], environment: dict[str, str], errors: Path) -> Forked:
        """An engine. Its input and output are pipes, as a child's."""
        message = json.dumps({"options": options, "environment": environment}).encode()
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        with errors.open("ab") as log:
            socket.send_fds(self.socket, [message], [theirs_in, theirs_out, log.fileno()])
        os.close(theirs_in)
        os.close(theirs_out)
        while "born" not in (told := self.hear(START)):
            assert told, f"no engine was forked: {self.log()[-4000:]}"
        return Forked(self, told["born"], ours_in, ours_out)

    def hear(self, within: float) -> dict[str, int]:
        """The next that it tells, or nothing."""
        if not select.select([self.socket], [], [], within)[0]:
            return {}
        told: dict[str, int] = json.loads(self.socket.recv(1 << 16) or b"{}")
        if "ended" in told:
            self.ended[told["ended"]] = told["status"]
        return told

    def close(self) -> None:
        self.socket.close()
        super().close()


class Forked:
    """A child of the nursery, in what tests use of `subprocess.Popen`."""

    def __init__(self, nursery: Nursery, pid: int, stdin: int, stdout: int) -> None:
        self.nursery = nursery
        self.pid = pid
        self.stdin, self.stdout = os.fdopen(stdin, "wb", 0), os.fdopen(stdout, "rb", 0)

    def poll(self) -> int | None:
        while self.pid not in self.nursery.ended and self.nursery.hear(0):
            pass
        return self.nursery.ended.get(self.pid)

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("an engine", timeout)
            self.nursery.hear(0.05)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Engine(Process):
    """A vLLM engine that does as it is told; see `tests.vllm.engine`. Forked from a nursery, or with none started anew."""

    def __init__(
        self, nursery: Nursery | None, errors: Path, options: dict[str, Any], environment: dict[str, str]
    ) -> None:
        if nursery is not None:
            self.adopt(nursery.fork(options, environment, errors), errors)
            return
        command = ("tests.vllm.engine", json.dumps(options))
        super().__init__(*command, errors=errors, environment=_ENVIRONMENT | environment, python=str(PYTHON))

    def ready(self) -> Engine:
        assert self.line(START) == '{"result": "ready"}', self.log()[-4000:]
        return self

    def tell(self, code: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code).encode() + b"\n")
        self.process.stdin.flush()

    def heard(self) -> Any:
        line = self.line(ANSWER)
        answer = json.loads(line) if line else {"error": "the engine ended"}
        assert "error" not in answer, f"{answer['error']}\n{self.log()[-4000:]}"
        return answer["result"]

    def do(self, code: str) -> Any:
        self.tell(code)
        return self.heard()

    def generate(self, *prompts: list[int], tokens: int = 4, **more: Any) -> list[dict[str, Any]]:
        """Of each prompt the greedy tokens, and how many of its own were cached."""
        answers: list[dict[str, Any]] = self.do(f"result = generate({list(prompts)}, {tokens}, **{more})")
        return answers

    def settle(self) -> None:
        """Return when what is to be saved is."""
        self.do("settle()")

    def stop(self) -> None:
        """As its user would, by ending the input."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.wait(60) == 0, self.log()[-4000:]


MakeEngine = Callable[..., Engine]


def transfer(endpoint: str, **extra: Any) -> dict[str, Any]:
    """What docs/vllm.md says to give vLLM, and where these tests' kvtierd is."""
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier_client.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"endpoint": endpoint, **extra},
    }


@pytest.fixture(scope="session")
def nursery() -> Iterator[Callable[[], Nursery]]:
    """Started when the first engine is."""
    made: list[Nursery] = []
    directory = Path(tempfile.mkdtemp(prefix="kvn", dir="/tmp"))

    def one() -> Nursery:
        if not made:
            made.append(Nursery(directory / "nursery"))
        return made[0]

    yield one
    for each in made:
        each.close()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def room() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="kvv", dir="/tmp"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def engines(room: Path, nursery: Callable[[], Nursery]) -> Iterator[MakeEngine]:
    """Starts engines: at an endpoint, or with none, without kvtier; `environment` beside vLLM's own options. `make` names what
    of `tests.vllm.models` to run; `anew` is to start a Python for it, whose hashes are seeded anew."""
    made: list[Engine] = []

    def factory(
        endpoint: str | None,
        environment: dict[str, str] | None = None,
        *,
        make: str | None = None,
        anew: bool = False,
        **options: Any,
    ) -> Engine:
        chosen = {"model": str(MODEL), "dtype": "float32", "max_model_len": 2048, "enforce_eager": True}
        chosen |= {"block_size": BLOCK, "seed": 0, **options}
        if make is not None:
            chosen |= {"model": str(room / make), "make": make, "like": str(MODEL)}
        if endpoint is not None:
            chosen.setdefault("kv_transfer_config", transfer(endpoint))
        log = room / f"engine-{len(made)}"
        made.append(Engine(None if anew else nursery(), log, chosen, environment or {}))
        return made[-1].ready()

    yield factory
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def shared(room: Path) -> Iterator[Daemon]:
    """A kvtierd of the module's, with host memory and SSD, running."""
    (room / "d").mkdir()
    settings: dict[str, object] = {
        "log_level": "info",
        "http_port": "off",
        "tiers.host.medium": "host",
        "tiers.host.capacity": "512MiB",
        "tiers.host.slab": "16MiB",
        "tiers.ssd.medium": "file",
        "tiers.ssd.capacity": "1GiB",
        "tiers.ssd.slab": "16MiB",
        "tiers.ssd.path": room / "d" / "ssd",
    }
    daemon = Daemon(room / "d", settings).start()
    yield daemon
    daemon.close()
