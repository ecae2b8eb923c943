"""Real vLLM engines, in processes of another environment than the tests': vLLM brings a torch of its own.

`KVTIER_VLLM` names a folder that `.ci/vllm` has filled; its default is where that puts it. Without one, tests that need an
engine are skipped, and say so; where the variable is set they are not.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.conftest import Daemon, Process

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier-ci" / "vllm"
HOME = Path(os.environ.get("KVTIER_VLLM") or CACHE)
PYTHON = HOME / "venv" / "bin" / "python"
MODEL = HOME / "model"
BLOCK = 32
START = 180.0
"""Seconds that an engine may take to come up, and `ANSWER` a step of a test."""
ANSWER = 120.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if (HOME / "complete").exists():
        return
    if os.environ.get("KVTIER_VLLM"):
        raise pytest.UsageError(f"KVTIER_VLLM is {HOME}, and there is no vLLM: fill it with .ci/vllm")
    skip = pytest.mark.skip(reason=f"no vLLM in {HOME}: .ci/vllm puts one there (3.5 GB)")
    for item in items:
        if "engines" in getattr(item, "fixturenames", ()):
            item.add_marker(skip)


class Engine(Process):
    """A vLLM engine that does as it is told; see `tests.vllm.engine`."""

    def __init__(self, errors: Path, options: dict[str, Any], environment: dict[str, str]) -> None:
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


_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
MakeEngine = Callable[..., Engine]


def transfer(endpoint: str, **extra: Any) -> dict[str, Any]:
    """What docs/vllm.md says to give vLLM, and where these tests' kvtierd is."""
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier_client.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"endpoint": endpoint, **extra},
    }


@pytest.fixture(scope="module")
def room() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="kvv", dir="/tmp"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def engines(room: Path) -> Iterator[MakeEngine]:
    """Starts engines: at an endpoint, or with none, without kvtier; `environment` beside vLLM's own options."""
    made: list[Engine] = []

    def factory(endpoint: str | None, environment: dict[str, str] | None = None, **options: Any) -> Engine:
        chosen = {"model": str(MODEL), "dtype": "float32", "max_model_len": 2048, "enforce_eager": True}
        chosen |= {"block_size": BLOCK, "seed": 0, **options}
        if endpoint is not None:
            chosen.setdefault("kv_transfer_config", transfer(endpoint))
        made.append(Engine(room / f"engine-{len(made)}", chosen, environment or {}))
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
