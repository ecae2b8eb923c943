"""The documents hold: links lead somewhere, commands run, pages made from code are current, and operators find every
alert, metric and line of the log.

Fenced `bash` and `console` blocks of README.md and docs/ are run as they stand, each against a daemon of its own with a
few pages in it, unless the line before says why not: `<!-- not executed: REASON -->`.
Not here: the Python and TOML examples of the README (tests/test_project.py).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
from argparse import ArgumentParser
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from kvtier.layout import AttentionLayout, LatentLayout, Layout
from kvtier_client.local import LocalDaemon
from tests.system.pages import chain, open_space, put

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- not executed: (\S.*?) -->\n\Z", re.DOTALL)


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    code: str
    reason: str
    """Why it is not run, "" where it is."""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        mark = _MARK.search(text[: match.start()])
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, match[2], textwrap.dedent(match[3]), mark[1] if mark else ""))
    return found


COMMANDS = [block for page in PAGES for block in blocks(page) if block.language in ("bash", "console", "sh", "shell")]


def script(block: Block) -> str:
    """A console block's commands are the lines with a prompt."""
    if block.language != "console":
        return block.code
    return "\n".join(line[2:] for line in block.code.splitlines() if line.startswith(("$ ", "> ")))


def prose(page: Path) -> str:
    """The page without its code."""
    text = _FENCE.sub("", page.read_text())
    text = re.sub(r"^(?: {4}.*\n)+", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]+`", lambda code: code[0] if "](" not in code[0] else "", text)


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    seen: dict[str, int] = {}
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *$", _FENCE.sub("", page.read_text()), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = seen.get(name, 0)
        seen[name] = count + 1
        found.add(f"{name}-{count}" if count else name)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    for link in links:
        if re.match(r"[a-z]+:", link):
            assert link.startswith("https://"), f"{link}: only https, or relative"
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), f"{link} leaves the repository"
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in anchors(target), f"{link}: {target.name} has {sorted(anchors(target))}"


def test_the_pages_know_each_other() -> None:
    """Each page can be reached from the README."""
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in reached:
            reached.add(page)
            links = re.findall(r"\]\(([^)#\s]+\.md)", prose(page))
            todo += [(page.parent / link).resolve() for link in links if not link.startswith("https:")]
    lost = [page.name for page in PAGES if page not in reached]
    assert not lost, f"no way from the README leads to {lost}"


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH on which `kvtier`, `kvtierd` and `python` are those under test."""
    place = tmp_path_factory.mktemp("bin")
    for name, module in (("kvtier", "kvtier_client.cli"), ("kvtierd", "kvtier_daemon.main")):
        (place / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {module} "$@"\n')
        (place / name).chmod(0o755)
    return f"{place}{os.pathsep}{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize("block", [block for block in COMMANDS if not block.reason], ids=str)
def test_commands_run(block: Block, commands: str, tmp_path: Path) -> None:
    settings = ("tiers.host.slab=4MiB", "tiers.ssd.slab=4MiB")
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels", "daemon", "client"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER")}
    environment |= {"PATH": commands, "PYTHONPATH": paths, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    with (
        LocalDaemon(host="256MiB", ssd="256MiB", settings=settings) as daemon,
        daemon.client(name="worker") as client,
    ):
        space = open_space(client, "org/model")
        put(space, chain(space, 1, 20))
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script(block)],
            cwd=tmp_path,
            env=environment | {"KVTIER_ENDPOINT": daemon.endpoint},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.returncode == 0, f"{block}:\n{block.code}\n{done.stdout}\n{done.stderr}"


def test_there_are_commands_that_run() -> None:
    assert len([block for block in COMMANDS if not block.reason]) >= 5


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_of_commands_is_current() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    assert page == _generator().page(), "docs/cli.md is not what the code says: python docs/generate.py"


def _mentioned(page: Path) -> list[str]:
    """Commands in the text and in its plain blocks."""
    text = page.read_text()
    inline = re.findall(r"(?<!`)`(kvtierd? [^`\n]+)`(?!`)", text)
    return [*inline, *re.findall(r"^ {4}(?:\.venv/bin/)?(kvtierd? .*?)(?:  .*)?$", text, re.MULTILINE)]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "cli.md"], ids=lambda page: page.name)
def test_commands_that_are_mentioned_exist(page: Path) -> None:
    parsers: dict[str, ArgumentParser] = _generator().parsers()
    for text in _mentioned(page):
        name, *words = shlex.split(text, comments=True)
        if not words or " | " in text:
            continue
        parser = parsers[name]
        nested = _generator().subcommands(parser)
        if nested and not words[0].startswith("-"):
            assert words[0] in nested, f"{page.name}: {text}: there is no {words[0]}"
            parser = nested[words[0]]
        flags = {flag for action in parser._actions for flag in action.option_strings}
        for word in words:
            assert not word.startswith("-") or word.partition("=")[0] in flags, f"{page.name}: {text}: no {word}"


MODELS: dict[str, Layout] = {
    "Llama 3.1 8B": AttentionLayout(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16"),
    "Llama 3.3 70B": AttentionLayout(layers=80, kv_heads=8, head_dim=128, dtype="bfloat16"),
    "Qwen3 32B": AttentionLayout(layers=64, kv_heads=8, head_dim=128, dtype="bfloat16"),
    "DeepSeek V3 (latent)": LatentLayout(layers=61, latent=512, rope=64, dtype="bfloat16"),
}


@pytest.mark.parametrize("model", MODELS)
def test_the_sizes_of_known_models_are_those_of_their_layouts(model: str) -> None:
    layout = MODELS[model]
    nbytes = layout.unit_stride // layout.unit_tokens
    row = next(line for line in OPERATIONS.splitlines() if line.startswith(f"| {model} |"))
    cells = [cell.strip() for cell in row.split("|")[4:7]]
    assert cells == [f"{nbytes:,}", f"{8_000 * nbytes / 2**30:.2f} GiB", f"{128_000 * nbytes / 2**30:.1f} GiB"]


RULES = (ROOT / "deploy" / "prometheus" / "kvtier.yml").read_text()


def test_each_alert_is_explained_and_asks_for_metrics_that_exist() -> None:
    alerts = re.findall(r"alert: (\w+)", RULES)
    assert alerts == re.findall(r"^### (Kvtier\w+)$", OPERATIONS, re.MULTILINE)
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    for name in set(re.findall(r"\bkvtier_[a-z_]+\b", RULES + OPERATIONS)):
        assert f"`{re.sub('_(bucket|sum|count)$', '', name)}`" in metrics, f"docs/metrics.md has no {name}"


def _messages() -> list[str]:
    """The formats of what the daemon logs to operators, from its source."""
    found = []
    for source in sorted((ROOT / "daemon" / "kvtier_daemon").glob("*.py")):
        calls = re.findall(
            r"\blog\.(?:info|warning|error|exception)\(\s*((?:f?\"(?:[^\"\\]|\\.)*\"\s*)+)", source.read_text()
        )
        found += ["".join(re.findall(r'"((?:[^"\\]|\\.)*)"', call)) for call in calls]
    return found


def test_each_line_of_the_log_is_explained() -> None:
    table = OPERATIONS.partition("## What the log says")[2]
    messages = _messages()
    assert len(messages) > 20
    for message in messages:
        pieces = [piece.strip(" ,;:()") for piece in re.split(r"%[-\d.]*[a-z]", message)]
        longest = max(pieces, key=len)
        if len(longest) > 3:
            assert longest in table, f"docs/operations.md does not explain the log's {message!r}"
