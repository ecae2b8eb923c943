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
        f"missed {counters['requested'] - hits:,}; asked to look up {counters['lookup_keys']:,}, "
        f"had {counters['lookup_found']:,}; "
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


def size(report: dict[str, Any]) -> None:
    """Draw what `kvtier_client.size.report` says."""
    shape = f"latent {report['latent']} + {report['rope']}" if "latent" in report else _heads(report)
    _console.print(f"[bold]{report['model']}[/bold]  {report['layers']} layers with KV, {shape}")
    rows = report["rows"]
    slides = report["window_layers"]
    columns = ["dtype", "TP", "heads a rank", "bytes a token", "GiB per 1,000", "on a rank", "pages of a rank"]
    table = _table(*columns, f"tokens in {format_size(report['memory'])}", *(["in full attention"] if slides else []))
    for row in rows:
        cells = [
            row["dtype"],
            str(row["tp"] if row["kv_heads"] else "any"),
            str(row["kv_heads"] or "-"),
            f"{row['token_bytes']:,.0f}",
            f"{row['gib_per_thousand']:.3f}",
            f"{row['rank_bytes']:,.0f}",
            f"{format_size(row['smallest_page'])} to {format_size(row['largest_page'])}",
            f"{row['tokens']:,}",
        ]
        table.add_row(*cells, *([f"{row['open_bytes']:,.0f}"] if slides else []))
    _console.print(table)
    for line in _remarks(report):
        _console.print(line)


def _heads(report: dict[str, Any]) -> str:
    return f"{report['kv_heads']} KV heads of {report['head_dim']}"


def _remarks(report: dict[str, Any]) -> list[str]:
    lines = list(report["notes"])
    rows, slides = report["rows"], report["window_layers"]
    if slides and rows:
        first = rows[0]
        windows = " or ".join(f"{window:,}" for window in report["windows"])
        lines.append(
            f"{slides} of {report['layers']} layers see the last {windows} tokens. kvtier keeps all layers of each page that it "
            f"is given. An engine that frees what left the window needs {first['open_bytes']:,.0f} bytes a token in "
            f"{first['dtype']}, and {format_size(first['window_bytes'])} more for each sequence, however long"
        )
    if report["stateful_layers"]:
        lines.append(f"{report['stateful_layers']} more layers keep a state of fixed size, which is not counted")
    if "latent" in report:
        lines.append("every rank has all of it: counted once, which is what is stored where one rank writes for all")
    if report["not_split"]:
        ranks = " or ".join(map(str, report["not_split"]))
        lines.append(f"{report['kv_heads']} KV heads cannot be divided among {ranks} ranks")
    return lines


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
