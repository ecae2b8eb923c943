"""The `kvtier` command: what an operator asks a running daemon.

Tables have human units; `--json` has exact numbers. Exit status: 0 done, 1 the daemon refused or something is wrong,
2 the command line is wrong, 3 no daemon answers.
Not here: how answers are drawn (`kvtier_client.tables`), what they mean (docs/protocol.md).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any, get_args

from kvtier import paths
from kvtier.config import LogLevel
from kvtier.errors import DaemonLost, InvalidRequest, KvtierError
from kvtier.layout import DType
from kvtier.sizes import format_size, parse_size
from kvtier_client.client import Client
from kvtier_client.serve import command as serve

_OK, _REFUSED, _USAGE, _NO_DAEMON = 0, 1, 2, 3
_DOCTOR = "find what keeps kvtierd from working well here, and the mend; exit status 1: warnings, 2: will not work"
_SERVE = "serve a model over HTTP, as OpenAI's API does, on pages of a running daemon (needs kvtier[serve])"
_SIZE = "how much memory a model's KV takes: GiB a thousand tokens, bytes a token, sizes of pages, tokens that fit"
_BENCH = "what this host gives (memory, disk, GPUs), beside what kvtierd gives on it"


def main(arguments: list[str] | None = None) -> int:
    """Run one command; its exit status."""
    given = _parser().parse_args(arguments)
    try:
        if given.alone:
            alone: int = given.run(given)
            return alone
        with Client(given.endpoint, name="kvtier") as client:
            status: int = given.run(client, given)
            return status
    except DaemonLost as error:
        print(f"kvtier: {error}", file=sys.stderr)
        print(
            f"Looked in {paths.find_endpoint(given.endpoint)}. Start a daemon with `kvtierd`, or say where one is with "
            f"--endpoint or KVTIER_ENDPOINT.",
            file=sys.stderr,
        )
        return _NO_DAEMON
    except KvtierError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return _REFUSED
    except (KeyboardInterrupt, BrokenPipeError):
        return _OK


def _stats(client: Client, given: argparse.Namespace) -> int:
    from kvtier_client import tables

    if given.watch is None:
        report = client.stats()
        _show(given, report, lambda: tables.stats(report))
        return _OK
    before: dict[str, Any] | None = None
    while True:
        report = client.stats()
        if given.json:
            print(json.dumps(report), flush=True)
        else:
            tables.clear()
            tables.stats(report, before, given.watch)
        before = report
        time.sleep(given.watch)


def _top(client: Client, given: argparse.Namespace) -> int:
    from kvtier_client import top

    if given.json or given.once:
        while True:
            view = top.once(client, given.interval)
            if given.json:
                print(json.dumps(top.report(view)), flush=True)
            else:
                top.show(view)
            if given.once:
                return _OK
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidRequest("top draws on a terminal, and this is none: use --once, or --json")
    top.run(client, given.interval)
    return _OK


def _bench(given: argparse.Namespace) -> int:
    from kvtier_client.bench import run

    return run(given)


def _size_of(given: argparse.Namespace) -> int:
    from kvtier_client import size

    return size.run(given)


def _sessions(client: Client, given: argparse.Namespace) -> int:
    from kvtier_client import tables

    report = client.sessions()
    _show(given, report, lambda: tables.sessions(report))
    return _OK


def _ls(client: Client, given: argparse.Namespace) -> int:
    from kvtier_client import tables

    report = client.inventory()
    if given.namespace:
        seed = _chosen(report, given.namespace)
        report = client.inventory(seed)
        while report["more"]:
            more = client.inventory(seed, len(report["pages"]))
            report["pages"] += more["pages"]
            report["more"] = more["more"]
    _show(given, report, lambda: tables.inventory(report))
    return _OK


def _evict(client: Client, given: argparse.Namespace) -> int:
    if given.all:
        count = client.evict(everything=True)
    else:
        count = client.evict(namespace=_chosen(client.inventory(), given.namespace))
    _say(given, {"evicted": count}, f"{count} pages forgotten in every tier; leased ones stay readable until released")
    return _OK


def _drain(client: Client, given: argparse.Namespace) -> int:
    count = client.drain(given.tier, timeout=given.timeout)
    if given.tier:
        _say(given, {"drained": count}, f"{count} frames of tier {given.tier} emptied")
        return _OK
    text = "all pages are saved" if not count else f"{count} pages are still to be saved"
    _say(given, {"unsaved": count}, f"{text}; kvtierd accepts no new pages until it is restarted")
    return _OK if not count else _REFUSED


def _resize(client: Client, given: argparse.Namespace) -> int:
    answer = client.resize(given.tier, given.capacity, timeout=given.timeout)
    there = answer.allocated <= answer.capacity
    text = f"tier {given.tier} has {format_size(answer.capacity)}, of which {format_size(answer.allocated)} is in slabs"
    if not there:
        text += "; the rest goes as soon as leases on it are released"
    _say(given, {"capacity": answer.capacity, "allocated": answer.allocated}, text)
    return _OK


def _log_level(client: Client, given: argparse.Namespace) -> int:
    before = client.log_level(given.level)
    text = f"kvtierd logs from {given.level} on; it was {before}" if given.level else before
    _say(given, {"level": given.level or before, "before": before}, text)
    return _OK


def _doctor(given: argparse.Namespace) -> int:
    from kvtier_client import doctor

    return doctor.run(given.endpoint, given.config, given.set, probe=not given.no_probe, as_json=given.json)


def _unpin(client: Client, given: argparse.Namespace) -> int:
    count = client.unpin(given.pin)
    _say(given, {"unpinned": count}, f"{count} pages are no longer pinned")
    return _OK


def _ping(client: Client, given: argparse.Namespace) -> int:
    times = sorted(client.ping() for _ in range(given.count))
    median = times[len(times) // 2]
    _say(
        given,
        {"seconds": times, "median": median},
        f"kvtierd answers in {median * 1e6:.0f} us (median of {given.count})",
    )
    return _OK


def _chosen(report: dict[str, Any], wanted: str) -> bytes:
    """The digest of the one namespace that `wanted` (a digest's beginning, or a model's name) means."""
    spaces = report["namespaces"]
    found = [space for space in spaces if space["digest"].startswith(wanted.lower()) or space["model"] == wanted]
    digests = sorted({space["digest"] for space in found})
    if len(digests) != 1:
        names = ", ".join(f"{space['digest'][:12]} ({space['model']})" for space in found or spaces) or "none"
        problem = "is ambiguous" if digests else "is no namespace"
        raise InvalidRequest(f"{wanted!r} {problem}; there are: {names}")
    return bytes.fromhex(digests[0])


def _show(given: argparse.Namespace, report: dict[str, Any], draw: Callable[[], None]) -> None:
    if given.json:
        print(json.dumps(report, indent=2))
    else:
        draw()


def _say(given: argparse.Namespace, report: dict[str, Any], text: str) -> None:
    print(json.dumps(report) if given.json else text)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _ranks(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return value


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--endpoint", metavar="DIR", help="the daemon's runtime directory (default: KVTIER_ENDPOINT)")
    common.add_argument("--json", action="store_true", help="exact numbers, for scripts")
    parser = argparse.ArgumentParser(prog="kvtier", description="Ask a running kvtierd, and tell it what to do.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[Client, argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, parents=[common])
        command.set_defaults(run=run, alone=False)
        return command

    stats = add("stats", _stats, "tiers, hits, moves, latencies")
    stats.add_argument(
        "--watch", metavar="SECONDS", type=float, nargs="?", const=2.0, help="again and again, with rates"
    )
    top = add("top", _top, "tiers, rates, hits, moves, who is busy: live")
    top.add_argument("--interval", metavar="SECONDS", type=_seconds, default=2.0, help="between pictures (default: 2)")
    top.add_argument("--once", action="store_true", help="one picture of one interval, for a file or a pipe")
    add("sessions", _sessions, "attached processes and what they hold")
    ls = add("ls", _ls, "namespaces, or the pages of one")
    ls.add_argument("namespace", nargs="?", help="the beginning of a digest, or a model's name")
    evict = add("evict", _evict, "forget pages in every tier, for good")
    what = evict.add_mutually_exclusive_group(required=True)
    what.add_argument("--namespace", help="the beginning of a digest, or a model's name")
    what.add_argument("--all", action="store_true", help="every page (of all tenants, for an administrator)")
    drain = add("drain", _drain, "empty a tier into the one below, or save all and accept no new pages")
    drain.add_argument("tier", nargs="?", default="", help="its name (default: all that is unsaved, for a stop)")
    drain.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="to wait at most")
    resize = add("resize", _resize, "give a tier another capacity, live")
    resize.add_argument("tier", help="its name, as kvtier stats has it")
    resize.add_argument("capacity", type=_size, help='such as "20GiB"')
    resize.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="to wait for leases at most")
    unpin = add("unpin", _unpin, "end a pin")
    unpin.add_argument("pin", type=int, help="its number, as kvtier ls has it")
    level = add("log-level", _log_level, "have the daemon log more or less, live")
    level.add_argument(
        "level",
        nargs="?",
        default="",
        choices=["", *get_args(LogLevel)],
        metavar="LEVEL",
        help=f"{', '.join(get_args(LogLevel))} (default: only say which it is)",
    )
    ping = add("ping", _ping, "measure the round trip")
    ping.add_argument("-n", "--count", type=_positive, default=20, help="how often")
    doctor = commands.add_parser("doctor", help=_DOCTOR, description=_DOCTOR, parents=[common])
    doctor.set_defaults(run=_doctor, alone=True)
    doctor.add_argument(
        "--config",
        metavar="FILE",
        default="",
        help="the daemon's settings (default: those of the daemon that runs, else /etc/kvtier/kvtierd.toml, else none)",
    )
    doctor.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="one setting, as of kvtierd")
    doctor.add_argument("--no-probe", action="store_true", help="do not measure disks (not done while a daemon runs)")
    serving = commands.add_parser("serve", help=_SERVE, description=_SERVE, parents=[common])
    serving.set_defaults(run=serve.run, alone=True)
    serve.add_options(serving)
    size = commands.add_parser("size", help=_SIZE, description=_SIZE, parents=[common])
    size.set_defaults(run=_size_of, alone=True)
    size.add_argument("model", metavar="MODEL_CONFIG", help="a config.json, the directory of one, or a model's name")
    size.add_argument(
        "--dtype", action="append", choices=get_args(DType), help="of the KV; again for more (default: the usual four)"
    )
    size.add_argument("--tp", metavar="RANKS", type=_ranks, default=[1, 2, 4, 8], help="in turn (default: 1,2,4,8)")
    size.add_argument("--memory", type=_size, default=64 << 30, help="for tokens to fit in (default: 64GiB)")
    bench = commands.add_parser("bench", help=_BENCH, description=_BENCH, parents=[common])
    bench.set_defaults(run=_bench, alone=True)
    bench.add_argument(
        "--running", action="store_true", help="measure the running daemon, in a namespace that is evicted afterwards"
    )
    bench.add_argument("--size", type=_size, default=256 << 20, help="bytes moved at a time (default: 256MiB)")
    bench.add_argument(
        "--directory",
        metavar="DIR",
        help="on the file system that is to be measured (default: where a daemon of yours keeps its pages; with "
        "--running: none, and the disk's own speed is left out)",
    )
    bench.add_argument("--no-gpu", action="store_true", help="leave GPUs out")
    bench.add_argument("--plot", metavar="FILE", help="draw the ratios to a PNG file (needs kvtier[plot])")
    return parser


if __name__ == "__main__":
    sys.exit(main())
