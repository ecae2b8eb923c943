"""How the CLI draws what the daemon reports: tables with human units."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from kvtier.sizes import format_size

_console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def clear() -> None:
    _console.clear()


def stats(report: dict[str, Any], before: dict[str, Any] | None = None, seconds: float = 0.0) -> None:
    """Draw `Client.stats`; with the report of `seconds` ago, rates too."""
    daemon, counters = report["daemon"], report["counters"]
    _console.print(
        f"[bold]kvtierd {daemon['version']}[/bold]  pid {daemon['pid']}  up {_duration(daemon['uptime'])}  "
        f"{daemon['sessions']} sessions  {daemon['leases']} leases  {daemon['pages']:,} pages  "
        f"{daemon['namespaces']} namespaces"
    )
    tiers = _table("tier", "capacity", "used", "free", "leased", "filling", "reserved", "pages", "hits", "share")
    requested = max(1, counters["requested"])
    for tier, hits in zip(report["tiers"], counters["hits"], strict=True):
        tiers.add_row(
            tier["name"] + (" (closed)" if tier["closed"] else ""),
            *(narrow_size(tier[key]) for key in ("capacity", "used", "free_bytes", "leased")),
            *(narrow_size(tier[key]) for key in ("filling_bytes", "reserved_bytes")),
            f"{tier['pages']:,}",
            f"{hits:,}",
            f"{hits / requested:.1%}",
        )
    _console.print(tiers)
    hits = sum(counters["hits"])
    allocated = sum(tier["allocated"] for tier in report["tiers"])
    used = sum(tier["used"] for tier in report["tiers"])
    wanted = counters["borrows"] + counters["reserved"] + counters["out_of_pages"]
    line = (
        f"borrowed {hits:,} of {counters['requested']:,} pages ({hits / requested:.1%}), "
        f"missed {counters['requested'] - hits:,}; looked up {counters['lookup_found']:,} of {counters['lookup_keys']:,}; "
        f"committed {counters['commits']:,}\n"
        f"OutOfPages {counters['out_of_pages']:,} ({counters['out_of_pages'] / max(1, wanted):.2%} of requests); "
        f"page utilisation {used / max(1, allocated):.1%} of slabs; lost to bad reads {counters['lost']:,}; "
        f"not saved {counters['unsaved']:,}"
    )
    if before is not None and seconds > 0:
        borrows = (counters["borrows"] - before["counters"]["borrows"]) / seconds
        commits = (counters["commits"] - before["counters"]["commits"]) / seconds
        line += f"\n{borrows:,.0f} borrows/s, {commits:,.0f} commits/s"
    _console.print(line)
    if report["moves"]:
        moves = _table("moves", "pages", "bytes", "rate", "failed")
        earlier = {(move["from"], move["to"]): move for move in before["moves"]} if before else {}
        for move in report["moves"]:
            past = earlier.get((move["from"], move["to"]))
            if past is not None and seconds > 0:
                rate = f"{format_size((move['bytes'] - past['bytes']) / seconds)}/s now"
            else:
                rate = f"{format_size(move['bytes'] / max(1e-9, move['seconds']))}/s a mover"
            moves.add_row(
                f"{move['from']} -> {move['to']}",
                f"{move['pages']:,}",
                format_size(move["bytes"]),
                rate,
                str(move["failed"]),
            )
        _console.print(moves)
    latency = _table("verb", "requests", "mean", "p50 <=", "p99 <=")
    for verb, figures in report["latency"].items():
        latency.add_row(verb, f"{figures['count']:,}", *(short_time(figures[key]) for key in ("mean", "p50", "p99")))
    _console.print(latency)
    evictions = ", ".join(f"{reason} {number:,}" for reason, number in sorted(counters["evictions"].items()))
    if evictions:
        _console.print(f"evictions: {evictions}")


def sessions(report: dict[str, Any]) -> None:
    """Draw `Client.sessions`."""
    table = _table("session", "name", "pid", "tenant", "since", "requests", "leased", "reserved", "waiting", "mode")
    for one in report["sessions"]:
        since = time.strftime("%m-%d %H:%M:%S", time.localtime(one["since"]))
        table.add_row(
            str(one["id"] & 0xFFFFFFFF),
            one["name"],
            str(one["pid"]),
            one["tenant"],
            since,
            f"{one['requests']:,}",
            f"{one['leased_pages']:,} pages",
            f"{one['reserved_pages']:,} pages",
            str(one["waiting"]),
            "read" if one["read_only"] else "write",
        )
    _console.print(table)
    if report["quarantined_frames"]:
        _console.print(f"{report['quarantined_frames']} frames wait for dead writers' processes to end")


def inventory(report: dict[str, Any]) -> None:
    """Draw `Client.inventory`."""
    spaces = _table("namespace", "model", "revision", "lora", "rank", "dtype", "tenant", "pages")
    for space in report["namespaces"]:
        spaces.add_row(
            space["digest"][:12],
            space["model"],
            space["revision"][:12],
            space["lora"][:12],
            space["rank"],
            space["dtype"],
            space["tenant"],
            f"{space['pages']:,}",
        )
    _console.print(spaces)
    if report["pins"]:
        pins = _table("pin", "tenant", "pages")
        for pin in report["pins"]:
            pins.add_row(str(pin["pin"]), pin["tenant"], f"{pin['pages']:,}")
        _console.print(pins)
    if "pages" in report:
        pages = _table("page", "number", "tokens", "size", "uses", "tiers", "leased")
        for page in report["pages"]:
            pages.add_row(
                page["key"],
                str(page["number"]),
                str(page["tokens"]),
                format_size(page["bytes"]),
                str(page["uses"]),
                " ".join(page["tiers"]),
                "yes" if page["leased"] else "",
            )
        _console.print(pages)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        left = number == 0 or column in (
            "medium",
            "name",
            "tenant",
            "model",
            "revision",
            "lora",
            "rank",
            "dtype",
            "tiers",
        )
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    return table


def narrow_size(nbytes: float) -> str:
    """`format_size` for narrow columns: "1.5G"."""
    return format_size(nbytes).replace(" B", "B").replace(" ", "").replace("iB", "")


def short_time(value: float) -> str:
    """Seconds in the unit that leaves few digits: "93 us"."""
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
