"""`kvtier top`: what a running daemon does, drawn again and again in the terminal.

`sample` makes a `View` of two reports, `lines` draws it for a width and a height; neither touches a terminal. `run` does:
an alternate screen, single keys, and the terminal as it was on any way out, also when the daemon goes away meanwhile.
Every mark differs in shape as well as in colour (blue and orange), so nothing hangs on telling colours apart.
Not here: `kvtier stats`, which prints all the numbers (`kvtier_client.tables`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kvtier.errors import DaemonLost, DeadlineExceeded
from kvtier_client.client import Client
from kvtier_client.tables import narrow_size, short_time

BLUE, ORANGE, DIM, BOLD, ALARM = "color(33)", "color(208)", "color(244)", "bold", "bold color(208)"
_GLYPHS = ("█", "▓", "▒", "·", "─")
_ASCII = ("#", "=", "+", ".", "-")
_SPARKS = "▁▂▃▄▅▆▇█"
_SEQUENCE = re.compile("\x1b[\\[O][0-9;]*[A-Za-z~]")
"""Arrows and the like, which would else end it as Escape does."""
_HISTORY = 120
_LOOK = 0.25
"""Seconds after which a key or another size of the window is noticed at the latest."""


class TierLine(NamedTuple):
    """Bytes of one tier. `arriving`: reserved for writers, or on their way in."""

    name: str
    medium: str
    capacity: int
    leased: int
    held: int
    arriving: int
    queue: int
    unsaved: int
    closed: bool
    hits: float
    """Pages a second that were found here."""
    hit_share: float
    """Of the pages asked for."""


class MoveLine(NamedTuple):
    source: str
    target: str
    pages: float
    bytes: float
    busy: float
    """Movers at work, on average."""
    failed: int


class SessionLine(NamedTuple):
    name: str
    pid: int
    tenant: str
    requests: float
    leased: int
    waiting: int


class NamespaceLine(NamedTuple):
    digest: str
    model: str
    borrowed: float
    pages: int


@dataclasses.dataclass(frozen=True)
class View:
    """One picture. Rates are a second, over `seconds`."""

    seconds: float
    daemon: dict[str, Any]
    tiers: tuple[TierLine, ...]
    asked: float
    found: float
    tokens: float
    commits: float
    committed_tokens: float
    borrow_p99: float
    """Upper bound, since the start of the daemon; 0 before the first."""
    moves: tuple[MoveLine, ...]
    sessions: tuple[SessionLine, ...]
    namespaces: tuple[NamespaceLine, ...]
    alarms: tuple[str, ...]

    @property
    def hit_share(self) -> float:
        return self.found / self.asked if self.asked else 0.0


class Reports(NamedTuple):
    """What the daemon was asked for one picture."""

    at: float
    stats: dict[str, Any]
    sessions: dict[str, Any]
    inventory: dict[str, Any]


def ask(client: Client) -> Reports:
    """Raises DaemonLost."""
    return Reports(time.monotonic(), client.stats(), client.sessions(), client.inventory())


def sample(before: Reports, now: Reports) -> View:
    """The picture of the time between two reports; of the daemon's whole life where `before` is of another one."""
    seconds = max(1e-3, now.at - before.at)
    old, new = before.stats, now.stats
    if old["daemon"]["epoch"] != new["daemon"]["epoch"]:
        old, seconds = _nothing(new), max(1e-3, new["daemon"]["uptime"])
        before = Reports(0.0, old, {"sessions": []}, {"namespaces": []})
    past, counters = old["counters"], new["counters"]

    def rate(name: str) -> float:
        return float(max(0, counters[name] - past[name]) / seconds)

    hits = [max(0, one - two) for one, two in zip(counters["hits"], past["hits"], strict=True)]
    tokens = sum(counters["hit_tokens"]) - sum(past["hit_tokens"])
    asked = max(counters["requested"] - past["requested"], sum(hits))
    borrow = new["latency"].get("borrow", {"p99": 0.0})
    return View(
        seconds=seconds,
        daemon=new["daemon"],
        tiers=tuple(
            TierLine(
                name=tier["name"],
                medium=tier["medium"],
                capacity=tier["capacity"],
                leased=tier["leased"],
                held=max(0, tier["used"] - tier["leased"]),
                arriving=tier["reserved_bytes"] + tier["filling_bytes"],
                queue=tier["queue"],
                unsaved=tier["unsaved"],
                closed=tier["closed"],
                hits=count / seconds,
                hit_share=count / asked if asked else 0.0,
            )
            for tier, count in zip(new["tiers"], hits, strict=True)
        ),
        asked=asked / seconds,
        found=sum(hits) / seconds,
        tokens=max(0, tokens) / seconds,
        commits=rate("commits"),
        committed_tokens=rate("committed_tokens"),
        borrow_p99=borrow["p99"],
        moves=tuple(_moves(old, new, seconds)),
        sessions=tuple(_sessions(before.sessions, now.sessions, seconds)),
        namespaces=tuple(_namespaces(before.inventory, now.inventory, seconds)),
        alarms=tuple(_alarms(past, new, now.sessions)),
    )


def report(view: View) -> dict[str, Any]:
    """For `--json`."""
    plain = dataclasses.asdict(view)
    for name in ("tiers", "moves", "sessions", "namespaces"):
        plain[name] = [one._asdict() for one in getattr(view, name)]
    return plain | {"hit_share": view.hit_share}


def _nothing(stats: dict[str, Any]) -> dict[str, Any]:
    """The report of a daemon that has just started, with the tiers of this one."""
    counters = {
        name: 0 if isinstance(value, int) else [0] * len(value) if isinstance(value, list) else {}
        for name, value in stats["counters"].items()
    }
    return {**stats, "counters": counters, "moves": []}


def _moves(old: dict[str, Any], new: dict[str, Any], seconds: float) -> Iterator[MoveLine]:
    past = {(move["from"], move["to"]): move for move in old["moves"]}
    zero = {"pages": 0, "bytes": 0, "seconds": 0.0}
    lines = []
    for move in new["moves"]:
        base = past.get((move["from"], move["to"]), zero)
        pages, nbytes, busy = ((move[key] - base[key]) / seconds for key in ("pages", "bytes", "seconds"))
        lines.append(MoveLine(move["from"], move["to"], pages, nbytes, busy, move["failed"]))
    yield from sorted(lines, key=lambda line: -line.bytes)


def _sessions(old: dict[str, Any], new: dict[str, Any], seconds: float) -> Iterator[SessionLine]:
    past = {one["id"]: one["requests"] for one in old["sessions"]}
    lines = []
    for one in new["sessions"]:
        requests = max(0, one["requests"] - past.get(one["id"], 0)) / seconds
        line = SessionLine(one["name"], one["pid"], one["tenant"], requests, one["leased_pages"], one["waiting"])
        if one["pid"] != os.getpid():  # this program is not what anyone looks for
            lines.append(line)
    yield from sorted(lines, key=lambda line: (-line.requests, -line.leased, line.pid))


def _namespaces(old: dict[str, Any], new: dict[str, Any], seconds: float) -> Iterator[NamespaceLine]:
    past = {(one["digest"], one["tenant"]): one["borrowed"] for one in old["namespaces"]}
    lines = []
    for one in new["namespaces"]:
        base = past.get((one["digest"], one["tenant"]), 0)
        lines.append(NamespaceLine(one["digest"], one["model"], max(0, one["borrowed"] - base) / seconds, one["pages"]))
    yield from sorted(lines, key=lambda line: (-line.borrowed, -line.pages, line.digest))


def _alarms(past: dict[str, Any], new: dict[str, Any], sessions: dict[str, Any]) -> Iterator[str]:
    """What an operator should know now, the worst first."""
    counters = new["counters"]
    for tier in new["tiers"]:
        if tier["closed"]:
            yield f"tier {tier['name']} is closed"
    for name, text in (
        ("lost", "pages failed their checksum"),
        ("out_of_pages", "requests got no frame (OutOfPages)"),
        ("unsaved", "pages not saved, queue full"),
        ("grow_failures", "slabs refused by their medium"),
        ("deaths", "workers died"),
    ):
        count = counters[name] - past[name]
        if count > 0:
            yield f"{count:,} {text}"
    if sessions["quarantined_frames"]:
        yield f"{sessions['quarantined_frames']:,} frames in quarantine"
    if new["daemon"]["restarts"]:
        yield f"movers restarted {new['daemon']['restarts']} times"


# Drawing


def lines(view: View, width: int, height: int, *, history: Sequence[float] = (), plain: bool = False) -> list[Text]:
    """At most `height` lines of at most `width` columns. `plain`: ASCII only. `history`: hit shares, the last one last."""
    glyphs = _ASCII if plain else _GLYPHS
    width, height = max(40, width), max(10, height)
    drawn = [_header(view, width)]
    room = height - 12  # header, headings, legend, rates and the tables' first lines
    shown = view.tiers if len(view.tiers) <= max(3, room) else view.tiers[: max(2, room - 1)]
    drawn += _tiers(view, shown, width, glyphs)
    sections = [_rates(view, width, glyphs, history, plain)]
    rest = height - len(drawn) - len(sections[0]) - 2  # a blank line and the footer
    if rest >= 3:
        sections.append(_movers(view.moves[: max(1, min(6, rest // 3))], width))
        rest -= len(sections[-1])
    if rest >= 2:
        sections.append(_busiest(view, width, rest - 1))
        rest -= len(sections[-1])
    for section in sections:
        if rest >= len(sections):  # there is room to set them apart
            drawn.append(Text())
        drawn += section
    while len(drawn) < height - 1:
        drawn.append(Text())
    drawn = drawn[: height - 1]
    drawn.append(_footer(view, width))
    for line in drawn:
        line.truncate(width)
        line.no_wrap = True
    return drawn


def _header(view: View, width: int) -> Text:
    daemon = view.daemon
    left = f"kvtierd {daemon['version']}"
    facts = f"  pid {daemon['pid']}  up {_duration(daemon['uptime'])}"
    counts = f"{daemon['sessions']} sessions  {daemon['leases']:,} leases  {daemon['pages']:,} pages"
    gap = width - len(left) - len(facts) - len(counts)
    return Text.assemble((left, BOLD), (facts, DIM), " " * max(2, gap), counts)


def _tiers(view: View, shown: Sequence[TierLine], width: int, glyphs: Sequence[str]) -> list[Text]:
    name = max(4, min(10, max(len(tier.name) for tier in view.tiers)))
    fixed = name + 1 + 5 + 18 + 7 + 6  # name, percent, sizes, queue, share of hits
    bar = max(8, width - fixed)
    drawn = [_heading(f"{'TIER':{name}} {'':{bar}} {'full':>4} {'':>17} {'queue':>6} {'hits':>5}", width)]
    for tier in shown:
        filled = tier.leased + tier.held + tier.arriving
        share = filled / tier.capacity if tier.capacity else 0.0
        line = Text(f"{tier.name[:name]:{name}} ")
        line.append(_bar(tier, bar, glyphs))
        line.append(f" {share:>4.0%}", BOLD)
        if tier.closed:
            line.append(f" {'! CLOSED':>17}", ALARM)
        else:
            line.append(f" {narrow_size(filled):>7} of {narrow_size(tier.capacity):<6}", "")
        line.append(f" {tier.queue:>6,}", ORANGE if tier.queue > 100 else DIM)
        line.append(f" {tier.hit_share:>5.0%}" if view.asked else f" {'-':>5}")
        drawn.append(line)
    if len(shown) < len(view.tiers):
        drawn.append(Text(f"{'':{name}} and {len(view.tiers) - len(shown)} more: make the window higher", DIM))
    legend = Text(" " * (name + 1))
    for glyph, text, style in (
        (glyphs[0], "leased", ORANGE),
        (glyphs[1], "held", BLUE),
        (glyphs[2], "arriving", DIM),
        (glyphs[3], "free", DIM),
    ):
        legend.append(glyph * 2, style).append(f" {text}   ", DIM)
    unsaved = sum(tier.unsaved for tier in view.tiers)
    if unsaved:
        legend.append(f"{narrow_size(unsaved)} still to be saved", ORANGE)
    return [*drawn, legend]


def _bar(tier: TierLine, width: int, glyphs: Sequence[str]) -> Text:
    """Leased, held, arriving, free: each by its share, and at least one cell where it is not nothing."""
    parts = (tier.leased, tier.held, tier.arriving)
    cells = [min(width, max(1 if part else 0, round(width * part / max(1, tier.capacity)))) for part in parts]
    while sum(cells) > width:
        cells[cells.index(max(cells))] -= 1
    bar = Text()
    for glyph, count, style in zip(glyphs, cells, (ORANGE, BLUE, DIM), strict=False):
        bar.append(glyph * count, style)
    return bar.append(glyphs[3] * (width - sum(cells)), DIM)


def _rates(view: View, width: int, glyphs: Sequence[str], history: Sequence[float], plain: bool) -> list[Text]:
    drawn = [_heading(f"RATES a second, of the last {view.seconds:.1f} s", width)]
    facts = Text.assemble(
        "borrow ",
        (f"{_count(view.found)}", BOLD),
        f" of {_count(view.asked)} pages ({_count(view.tokens)} tokens)   commit ",
        (f"{_count(view.commits)}", BOLD),
        f" pages ({_count(view.committed_tokens)} tokens)",
    )
    if view.borrow_p99 and width >= 100:
        facts.append(f"   borrow p99 <= {short_time(view.borrow_p99)}", DIM)
    drawn.append(facts)
    if not view.asked:
        drawn.append(Text("hits   nothing was borrowed", DIM))
        return drawn
    line = Text.assemble("hits ", (f"{view.hit_share:>4.0%} ", BOLD))
    # what fits is drawn in tiers' order, each with its own glyph and its name beside it
    parts = [(tier.name, tier.hit_share) for tier in view.tiers if tier.hits > 0]
    parts.append(("miss", max(0.0, 1 - view.hit_share)))
    sparks = "" if plain or width < 100 else "".join(_SPARKS[min(7, int(8 * share))] for share in history[-24:])
    text = "  ".join(f"{name} {share:.0%}" for name, share in parts if share > 0)
    bar = max(8, min(48, width - len(line) - len(text) - 4 - len(sparks) - 12))
    cells = _shares([share for _, share in parts], bar)
    for at, ((name, _), count) in enumerate(zip(parts, cells, strict=True)):
        style, glyph = (DIM, glyphs[3]) if name == "miss" else ((BLUE, ORANGE)[at % 2], glyphs[at % 2])
        line.append(glyph * count, style)
    line.append("  ")
    for at, (name, share) in enumerate(parts):
        if share > 0:
            style = DIM if name == "miss" else (BLUE, ORANGE)[at % 2]
            glyph = glyphs[3] if name == "miss" else glyphs[at % 2]
            line.append(glyph, style).append(f"{name} {share:.0%}  ")
    if sparks:
        line.append("lately ", DIM).append(sparks, BLUE)
    return [*drawn, line]


def _movers(moves: Sequence[MoveLine], width: int) -> list[Text]:
    drawn = [_heading(f"{'MOVERS':24} {'pages/s':>9} {'bytes/s':>10} {'at work':>9} {'failed':>8}", width)]
    for move in moves:
        route = f"{move.source} -> {move.target}"
        style = "" if move.pages or move.failed else DIM
        line = Text(f"{route:24} {_count(move.pages):>9} {narrow_size(move.bytes):>10} {move.busy:>9.1f}", style)
        line.append(f" {move.failed:>8,}", ORANGE if move.failed else DIM)
        drawn.append(line)
    if not moves:
        drawn.append(Text("nothing has been moved yet", DIM))
    return drawn


def _busiest(view: View, width: int, rows: int) -> list[Text]:
    """Sessions on the left and namespaces on the right."""
    left = max(36, width // 2 - 1)
    right = width - left - 2
    name, model = left - 23, right - 16
    heading = (
        f"{'SESSION':{name}} {'pid':>7} {'req/s':>6} {'leased':>7}  {'NAMESPACE':{model}} {'pages/s':>8} {'held':>6}"
    )
    drawn = [_heading(heading, width)]
    count = max(len(view.sessions), len(view.namespaces))
    for row in range(min(rows, count)):
        last = row == rows - 1
        line = Text()
        more = len(view.sessions) - row
        if row < len(view.sessions) and last and more > 1:
            line.append(f"and {more} more: kvtier sessions".ljust(left), DIM)
        elif row < len(view.sessions):
            one = view.sessions[row]
            label = one.name if not one.waiting else f"{one.name} ({one.waiting} wait)"
            text = f"{_end(label, name):{name}} {one.pid:>7} {_count(one.requests):>6} {_count(one.leased):>7}"
            line.append(text.ljust(left), "" if one.requests else DIM)
        else:
            line.append(" " * left)
        line.append("  ")
        more = len(view.namespaces) - row
        if row < len(view.namespaces) and last and more > 1:
            line.append(f"and {more} more: kvtier ls", DIM)
        elif row < len(view.namespaces):
            space = view.namespaces[row]
            text = f"{_end(space.model, model):{model}} {_count(space.borrowed):>8} {_count(space.pages):>6}"
            line.append(text, "" if space.borrowed else DIM)
        drawn.append(line)
    if not view.sessions and not view.namespaces:
        drawn.append(Text("nobody is attached", DIM))
    return drawn


def _footer(view: View, width: int) -> Text:
    if view.alarms:
        shown = "; ".join(view.alarms)
        return Text(f"! {shown}", ALARM)
    return Text("nothing to report", DIM)


def _end(text: str, width: int) -> str:
    """The end of a name that is too long: what tells workers and models apart is there."""
    return text if len(text) <= width else f"~{text[1 - width :]}"


def _heading(text: str, width: int) -> Text:
    return Text(text.ljust(width)[:width], f"{BOLD} underline")


def _shares(shares: Sequence[float], width: int) -> list[int]:
    """Cells for shares that sum to 1: exactly `width` of them, and none gone that is not nothing."""
    cells = [max(1 if share > 0 else 0, int(share * width)) for share in shares]
    largest = max(range(len(shares)), key=lambda at: shares[at])
    cells[largest] = max(1, cells[largest] + width - sum(cells))
    return cells


def _count(value: float) -> str:
    """A number in at most six columns."""
    if value < 10 and value != int(value):
        return f"{value:.1f}"
    for unit in ("", "k", "M"):
        if value < 9999.5:
            return f"{value:,.0f}{unit}"
        value /= 1000
    return f"{value:,.0f}G"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours}h"
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"


# The terminal


def once(client: Client, seconds: float) -> View:
    """The picture of the next `seconds`."""
    before = ask(client)
    time.sleep(seconds)
    return sample(before, ask(client))


def show(view: View) -> None:
    """Print it once: as high as it needs to be, also to a file or a pipe."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    width = console.width
    height = 18 + len(view.tiers) + min(10, max(len(view.sessions), len(view.namespaces))) + min(6, len(view.moves))
    drawn = lines(view, width, height, plain=_plain(console))
    body = [line for line in drawn[:-1] if line.plain.strip()]
    console.print(Group(*body, drawn[-1]))


def run(client: Client, seconds: float) -> None:
    """Draw until q, Ctrl-C, SIGTERM or the end of the terminal. A daemon that goes away is waited for."""
    console = Console(highlight=False)
    plain = _plain(console)
    history: list[float] = []
    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        before = now = ask(client)
        view = sample(before._replace(at=before.at - 1e-3), now)
        away, paused = "", False
        while True:
            size = console.size
            drawn = lines(view, size.width, size.height, history=history, plain=plain)
            state = away or ("paused: p goes on" if paused else f"every {seconds:g} s")
            drawn[-1] = _with_keys(drawn[-1], state, size.width, alarm=bool(away))
            live.update(Group(*drawn), refresh=True)
            until = now.at + seconds if not away else time.monotonic() + 1.0
            while time.monotonic() < until and console.size == size:
                key = keys(min(_LOOK, max(0.0, until - time.monotonic())))
                if key in ("q", "Q", "\x1b", "\x03", None):
                    return
                if key in ("p", " "):
                    paused = not paused
                    break
            if time.monotonic() < until:
                continue  # the window has another size, or a key was pressed
            if paused:
                now = now._replace(at=time.monotonic())
                before = now
                continue
            try:
                before, now = now, ask(client)
            except (DaemonLost, DeadlineExceeded):
                away, before = "no daemon answers; waiting for it", now
                continue
            away = ""
            view = sample(before, now)
            if view.asked:
                history = [*history[-_HISTORY:], view.hit_share]


def _with_keys(footer: Text, state: str, width: int, *, alarm: bool) -> Text:
    right = f"{state}   p pause   q quit"
    left = footer.copy()
    left.truncate(max(0, width - len(right) - 2), overflow="ellipsis", pad=True)
    return left.append("  ").append(right, ALARM if alarm else DIM)


def _plain(console: Console) -> bool:
    return not (console.encoding or "").lower().startswith("utf")


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """A function that waits so many seconds for a key: "" for none, None when the terminal is gone. Inside, keys come one
    by one and unseen, and SIGTERM and SIGHUP end the program as Ctrl-C does; on the way out all is as it was."""
    fd = sys.stdin.fileno()
    saved = termios.tcgetattr(fd)

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    handlers = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}

    typed: list[str] = []

    def key(wait: float) -> str | None:
        if typed:
            return typed.pop(0)
        if not select.select([fd], [], [], wait)[0]:
            return ""
        try:
            data = os.read(fd, 64)
        except OSError:
            return None
        if not data:
            return None
        typed.extend(_SEQUENCE.sub("", data.decode(errors="replace")))
        return typed.pop(0) if typed else ""

    try:
        tty.setcbreak(fd)
        mode = termios.tcgetattr(fd)
        mode[6][termios.VSUSP] = b"\0"  # stopped, it would leave the shell on its screen
        termios.tcsetattr(fd, termios.TCSANOW, mode)
        yield key
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, saved)
        for number, handler in handlers.items():
            signal.signal(number, handler)
