"""What the log looks like, and that no event can flood it."""

from __future__ import annotations

import io
import json
import logging
import os
import time
from collections.abc import Iterator

import pytest

from kvtier_daemon import logs

log = logging.getLogger("kvtier_daemon.test")


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    """The root logger as it was."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in list(root.handlers):
        root.removeHandler(handler)
    for handler in before:
        root.addHandler(handler)
    root.setLevel(level)


def test_text_is_key_and_value_on_one_line() -> None:
    out = io.StringIO()
    logs.setup("info", "auto", out)
    log.warning("session %d said\n%s", 7, '"hello"', extra=logs.fields(session=7, tenant="uid:1 x", seconds=0.25))
    (line,) = out.getvalue().splitlines()
    assert line.startswith("time=20") and " level=warning " in line
    assert r'msg="session 7 said\n\"hello\""' in line
    assert line.endswith('session=7 tenant="uid:1 x" seconds=0.250')


def test_json_has_the_same_and_a_trace() -> None:
    out = io.StringIO()
    logs.setup("info", "json", out)
    try:
        raise ValueError("bad")
    except ValueError:
        log.exception("it failed", extra=logs.fields(verb="borrow", msg="not this"))
    record = json.loads(out.getvalue())
    assert (record["level"], record["msg"], record["verb"]) == ("error", "it failed", "borrow")
    assert "ValueError: bad" in record["trace"]


def test_the_journal_gets_json_with_a_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    status = os.fstat(write)
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
    with os.fdopen(write, "w") as stream, os.fdopen(read) as lines:
        assert logs.is_journal(stream) and not logs.is_journal(lines, {"JOURNAL_STREAM": "1:1"})
        logs.setup("info", "auto", stream)
        log.error("a disk is full")
        stream.flush()
        line = lines.readline()
    assert line.startswith("<3>") and json.loads(line[3:])["msg"] == "a disk is full"


def _storm(number: int) -> None:
    for at in range(number):
        log.warning("session %d is slow", at)


def test_a_storm_is_a_few_lines_and_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    out, now = io.StringIO(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    limit = logs.setup("info", "json", out)
    _storm(1000)
    log.warning("another kind is not held back by it")
    assert len(out.getvalue().splitlines()) == logs.BURST + 1
    limit.tell()
    assert len(out.getvalue().splitlines()) == logs.BURST + 1, "its window is not over"
    now[0] += logs.WINDOW
    limit.tell()
    limit.tell()
    (summary,) = out.getvalue().splitlines()[logs.BURST + 1 :]
    record = json.loads(summary)
    assert record["suppressed"] == 1000 - logs.BURST and "session 999 is slow" in record["msg"]
    _storm(2)
    assert len(out.getvalue().splitlines()) == logs.BURST + 4, "a new window begins"


def test_what_is_held_back_is_told_when_the_next_comes_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    out, now = io.StringIO(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    limit = logs.setup("info", "json", out)
    _storm(logs.BURST + 3)
    now[0] += logs.WINDOW
    _storm(logs.BURST + 2)
    limit.tell(all_of_them=True)
    records = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [record["suppressed"] for record in records if "suppressed" in record] == [3, 2]


def test_debug_messages_are_not_held_back_and_levels_change_live() -> None:
    out = io.StringIO()
    logs.setup("warning", "text", out)
    log.info("unseen")
    assert logs.set_level("debug") == "warning" and logs.level() == "debug"
    for at in range(100):
        log.debug("request %d", at)
    assert len(out.getvalue().splitlines()) == 100
