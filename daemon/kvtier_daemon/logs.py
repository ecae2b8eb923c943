"""The daemon's log: one line for an event that an operator acts on, and nothing while there is none.

    time=2026-01-31T12:00:00.123 level=warning msg="slow: borrow took 2.31 s" session=7 verb=borrow frames=2.3
    {"time": "2026-01-31T12:00:00.123", "level": "warning", "msg": "slow: ...", "session": 7, ...}

JSON where `log_format` says so, and where standard error is the journal (then with the priority that it understands in
front). Fields come from `extra=fields(...)`. Of one kind of message, that is of one line of the source, `BURST` are
written in `WINDOW` seconds; the rest are counted, and the count is told when the window ends.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, TextIO

BURST = 5
WINDOW = 10.0
"""Seconds."""

_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


def setup(least: str, form: str = "auto", stream: TextIO | None = None) -> Limit:
    """Log from level `least` on to `stream` (standard error); the limit, whose `tell` is to be called now and then."""
    stream = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(stream)
    journal = is_journal(stream)
    handler.setFormatter(Json(journal) if form == "json" or (form == "auto" and journal) else Text())
    limit = Limit()
    handler.addFilter(limit)
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    set_level(least)
    return limit


def level() -> str:
    """From which level on is logged."""
    return logging.getLevelName(logging.getLogger().level).lower()


def set_level(name: str) -> str:
    """Log from level `name` on, at once; the level before."""
    before = level()
    logging.getLogger().setLevel(name.upper())
    return before


def fields(**values: Any) -> dict[str, Any]:
    """`extra=fields(session=7)`: what the message is about, to be searched by."""
    return {"fields": values}


def is_journal(stream: TextIO, environment: Mapping[str, str] | None = None) -> bool:
    """Whether `stream` leads to the journal, and not merely the process's parent's."""
    named = (os.environ if environment is None else environment).get("JOURNAL_STREAM", "")
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return named == f"{status.st_dev}:{status.st_ino}"


class Limit(logging.Filter):
    """Lets `BURST` messages of a kind through in `WINDOW` seconds. Debug messages were asked for, and all pass."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[tuple[str, int], tuple[float, int, logging.LogRecord]] = {}
        """By line of the source: when its window began, how many came in it, and the last of them."""
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG or getattr(record, "unlimited", False):
            return True
        kind, now = (record.pathname, record.lineno), time.monotonic()
        over = None
        with self._lock:
            since, count, last = self.kinds.get(kind, (now, 0, record))
            if now - since >= WINDOW:
                over = (count, last)
                since, count = now, 0
            self.kinds[kind] = (since, count + 1, record)
        if over is not None:
            _summary(*over)
        return count < BURST

    def tell(self, *, all_of_them: bool = False) -> None:
        """End the windows that are over (`all_of_them`: whether they are or not), and say what was held back in them."""
        if not self.kinds:
            return
        now = time.monotonic()
        with self._lock:
            over = [kind for kind, (since, _, _) in self.kinds.items() if all_of_them or now - since >= WINDOW]
            ended = [self.kinds.pop(kind) for kind in over]
        for _, count, last in ended:
            _summary(count, last)


class Text(logging.Formatter):
    """key=value, for people and grep."""

    def format(self, record: logging.LogRecord) -> str:
        line = " ".join(f"{key}={_quoted(value)}" for key, value in _parts(record).items())
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class Json(logging.Formatter):
    """One JSON object a line. `journal` puts the priority in front, as journald reads it."""

    def __init__(self, journal: bool) -> None:
        super().__init__()
        self.journal = journal

    def format(self, record: logging.LogRecord) -> str:
        parts = _parts(record)
        if record.exc_info:
            parts["trace"] = self.formatException(record.exc_info)
        line = json.dumps(parts, default=str, ensure_ascii=False)
        return f"<{_PRIORITIES.get(parts['level'], 6)}>{line}" if self.journal else line


def _summary(count: int, last: logging.LogRecord) -> None:
    held = count - BURST
    if held > 0:
        logging.getLogger(last.name).log(
            last.levelno,
            "%d more like this were not written; the last was: %s",
            *(held, last.getMessage()),
            extra={"unlimited": True, **fields(suppressed=held)},
        )


def _parts(record: logging.LogRecord) -> dict[str, Any]:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
    parts = {
        "time": f"{stamp}.{int(record.msecs):03}",
        "level": record.levelname.lower(),
        "msg": record.getMessage(),
    }
    return parts | {key: value for key, value in getattr(record, "fields", {}).items() if key not in parts}


def _quoted(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return (
        text
        if text and all(sign.isalnum() or sign in "-_.:/+" for sign in text)
        else json.dumps(text, ensure_ascii=False)
    )
