"""Write docs/cli.md from the commands' own argument parsers: `python docs/generate.py`. A test holds the page to them.

Not made from argparse's help texts, since their layout differs between versions of Python.
Not here: docs/metrics.md, which `kvtier_daemon.metrics` writes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cli.md"
_INTRODUCTION = """\
# Commands

Made from the code by `python docs/generate.py`; do not edit. What to do with them is in [operations.md](operations.md).

`kvtierd` is the daemon; `kvtier` asks a running one, and tells it what to do. Exit status of `kvtier`: 0 done, 1 the
daemon refused or something is wrong, 2 the command line is wrong, 3 no daemon answers. `kvtier doctor` has its own, told
there. Sizes are written as "20GiB", "500MB" or a number of bytes.
"""


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The two commands, by name."""
    from kvtier_client import cli
    from kvtier_daemon import main

    return {"kvtierd": main.parser(), "kvtier": cli._parser()}


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def page() -> str:
    parts = [_INTRODUCTION]
    for name, parser in parsers().items():
        nested = subcommands(parser)
        parts += _section(f"## {name}", name, parser, brief=bool(nested))
        if nested:
            shared = [action for action in _options(next(iter(nested.values()))) if _in_all(action, nested)]
            parts += ["Every command takes:\n", *_table(shared)]
            for command, one in nested.items():
                parts += _section(f"### {name} {command}", f"{name} {command}", one, without=shared)
    return "\n".join(parts)


def _section(
    heading: str,
    name: str,
    parser: argparse.ArgumentParser,
    *,
    brief: bool = False,
    without: list[argparse.Action] | None = None,
) -> Iterator[str]:
    hidden = {_flags(action) for action in without or ()}
    actions = [action for action in (*_positionals(parser), *_options(parser)) if _flags(action) not in hidden]
    words = ["COMMAND"] if brief else [_usage(action) for action in actions]
    yield f"{heading}\n"
    yield f"    {' '.join([name, *words])}\n"
    if parser.description:
        yield f"{_sentence(parser.description)}\n"
    if not brief:
        yield from _table(actions)
    if parser.epilog:
        yield f"{parser.epilog}\n"


def _table(actions: list[argparse.Action]) -> Iterator[str]:
    if not actions:
        return
    rows = [f"| `{_flags(action)}` | {_meaning(action)} |" for action in actions]
    yield "\n".join(["| argument | meaning |", "| --- | --- |", *rows, ""])


def _positionals(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [one for one in parser._actions if not one.option_strings]


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [one for one in parser._actions if one.option_strings and not isinstance(one, argparse._HelpAction)]


def _in_all(action: argparse.Action, nested: dict[str, argparse.ArgumentParser]) -> bool:
    return all(_flags(action) in map(_flags, _options(parser)) for parser in nested.values())


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    name = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    name = name if isinstance(name, str) else " ".join(name)
    return f"[{name}]" if action.nargs == "?" else name


def _flags(action: argparse.Action) -> str:
    return " ".join(filter(None, [", ".join(action.option_strings), _value(action)]))


def _usage(action: argparse.Action) -> str:
    if not action.option_strings:
        return _value(action)
    text = " ".join(filter(None, [action.option_strings[-1], _value(action)]))
    return text if action.required else f"[{text}]"


def _meaning(action: argparse.Action) -> str:
    text = (action.help or "").replace("|", "\\|")
    shown = not action.option_strings or (action.nargs != 0 and "default" not in text)
    if shown and action.default not in (None, "", [], argparse.SUPPRESS):
        text += (
            f" (default: {action.default:g})" if isinstance(action.default, float) else f" (default: {action.default})"
        )
    if action.choices and not isinstance(action.choices, dict) and not action.metavar:
        text += f" ({', '.join(map(str, action.choices))})"
    return text.strip()


def _sentence(text: str) -> str:
    text = text[0].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


if __name__ == "__main__":
    for folder in (".", "kernels", "daemon", "client"):
        sys.path.insert(0, str(ROOT / folder))
    PAGE.write_text(page())
