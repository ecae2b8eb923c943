"""What the project promises as a whole: its README runs, its commands start light, its document matches its code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier import errors, wire
from kvtier.config import load
from kvtier_client import local

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def _run(code: str, **environment: str) -> str:
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels", "daemon", "client"))
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_readme_example_runs_and_the_second_process_finds_all_pages() -> None:
    with local(host="256MiB") as daemon:
        first = _run(EXAMPLES[0], KVTIER_ENDPOINT=daemon.endpoint)
        second = _run(EXAMPLES[0], KVTIER_ENDPOINT=daemon.endpoint)
    assert "0 of 47 pages are held" in first and "starts at token 0" in first
    assert "47 of 47 pages are held" in second and "starts at token 992" in second


def test_the_readme_notebook_example_runs() -> None:
    assert re.fullmatch(r"\d+ us\n", _run(EXAMPLES[1]))


def test_the_readme_configuration_is_valid(tmp_path: Path) -> None:
    (toml,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    file = tmp_path / "kvtier.toml"
    file.write_text(toml)
    config = load(file, environment={})
    assert [tier.medium for tier in config.tiers.values()] == ["host", "file"]


@pytest.mark.parametrize("module", ["kvtier_client.cli", "kvtier_daemon.main", "kvtier.wire"])
def test_commands_start_without_heavy_imports(module: str) -> None:
    heavy = _run(f"import sys, {module}; print(*sorted({{'torch', 'numpy', 'triton', 'cupy'}} & set(sys.modules)))")
    assert heavy.strip() == ""


def test_the_handbook_is_a_long_prompt() -> None:
    words = (ROOT / "docs" / "handbook.md").read_text().split()
    assert len(words) >= 3200  # some 4,400 tokens of the demo's model; it checks the exact number itself


@pytest.mark.parametrize("verb", wire.REQUESTS)
def test_the_protocol_documents_each_verb(verb: str) -> None:
    body = wire.REQUESTS[verb]
    section = PROTOCOL.partition(f"\n### {verb}\n")[2].partition("\n### ")[0]
    assert section, f"docs/protocol.md has no section {verb}"
    for field in body.__struct_fields__:
        assert f"`{field}`" in section, f"docs/protocol.md does not describe {verb}.{field}"


@pytest.mark.parametrize("kind", wire.ATTACH)
def test_the_protocol_documents_each_attach_message(kind: str) -> None:
    row = re.search(rf"^\| `{kind}` \|.*$", PROTOCOL, re.MULTILINE)
    assert row, f"docs/protocol.md has no row for {kind}"
    for field in wire.ATTACH[kind].__struct_fields__:
        assert f"`{field}`" in row[0]


_ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.KvtierError)]


@pytest.mark.parametrize("code", [kind.code for kind in _ERRORS])
def test_the_protocol_documents_each_error(code: str) -> None:
    assert f"| `{code}` |" in PROTOCOL
