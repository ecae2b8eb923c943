"""The command around the server: what can be wrong before it serves, and what it says then."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier_client import cli
from kvtier_client.local import LocalDaemon
from kvtier_client.serve import command, models
from tests.system.conftest import _ENVIRONMENT


def test_a_model_is_served_under_the_last_part_of_its_path(tmp_path: Path) -> None:
    (tmp_path / "smol").mkdir()
    assert command.served_name(str(tmp_path / "smol")) == "smol"
    assert command.served_name(f"{tmp_path}/smol/") == "smol"
    assert command.served_name("/models/smol.Q4_1.gguf") == "smol.Q4_1"
    assert command.served_name("org/model") == "org/model"


def test_the_key_is_in_a_file_or_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(command.API_KEY, raising=False)
    assert command.api_key(None) == ""
    monkeypatch.setenv(command.API_KEY, " from the environment\n")
    assert command.api_key(None) == "from the environment"
    file = tmp_path / "key"
    file.write_text("from the file\n")
    assert command.api_key(str(file)) == "from the file"
    file.write_text("\n")
    for name in (file, tmp_path / "nothing", tmp_path):
        with pytest.raises(ConfigError, match="--api-key-file"):
            command.api_key(str(name))


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}.*--port"):
            command.listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match="--host"):
        command.listen("no such host", 0)


@pytest.mark.parametrize(
    "options",
    [["--port", "65536"], ["--port", "-1"], ["--max-batch", "0"], ["--stop-timeout", "soon"], ["--dtype", "int4"], []],
    ids=str,
)
def test_options_that_make_no_sense(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", *(["model"] if options else []), *options])
    assert caught.value.code == 2
    assert options[0] in capsys.readouterr().err if options else "MODEL" in capsys.readouterr().err


def test_a_device_that_is_not_there() -> None:
    for name in ("cuda:99", "nonsense"):
        with pytest.raises(ConfigError, match=f"--device {name}"):
            models.find_device(name)
    assert models.find_device("cpu").type == "cpu"


def test_a_model_that_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "nothing.gguf"):
        with pytest.raises(ConfigError, match=f"{name} cannot be loaded"):
            models.load(str(tmp_path / name), device=models.find_device("cpu"))


def test_what_is_wrong_ends_it_with_one_line(tmp_path: Path) -> None:
    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kvtier_client.cli", "serve", str(tmp_path), "--port", "0", *options],
            env=_ENVIRONMENT | {"HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    away = run("--endpoint", str(tmp_path))
    assert away.returncode == 3 and "Start a daemon with `kvtierd`" in away.stderr
    with LocalDaemon(host="64MiB") as daemon:
        broken = run("--endpoint", daemon.endpoint)
    assert broken.returncode == 1 and "cannot be loaded" in broken.stderr
    for done in (away, broken):
        assert not done.stdout and "Traceback" not in done.stderr
