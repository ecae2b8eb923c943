"""The `kvtierd` command."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import resource
import sys

from kvtier import config as settings
from kvtier.errors import KvtierError
from kvtier.sizes import format_size
from kvtier_daemon import __version__, logs
from kvtier_daemon.daemon import Daemon
from kvtier_daemon.notify import Notifier

log = logging.getLogger(__name__)

_SWITCH = 2e-5
"""Seconds that a mover waits at most for the interpreter lock to start the next copy; Python's own 5 ms idles a link."""
_COLLECTIONS = (20_000, 20, 100_000)
"""When Python looks for garbage that names itself. The store makes none, and looking through all of it would hold every
request up for a moment that grows with the number of pages: next to never, then."""


def main(arguments: list[str] | None = None) -> int:
    """Run the daemon in the foreground until SIGTERM or SIGINT. Exit status 0, or 2 where it cannot start."""
    given = parser().parse_args(arguments)
    flags = list(given.set)
    if given.runtime_dir:
        flags.append(f"runtime_dir={given.runtime_dir}")
    try:
        config = settings.load(given.config, flags=flags)
        if given.check_config:
            for name, tier in config.tiers.items():
                place = f" at {tier.path}" if tier.path else ""
                print(f"tier {name}: {tier.medium}, {format_size(tier.capacity)}{place}")
            print(f"workers attach at {config.runtime_dir}")
            return 0
        limit = logs.setup(config.log_level, config.log_format)
        _raise_descriptor_limit()
        sys.setswitchinterval(_SWITCH)
        gc.set_threshold(*_COLLECTIONS)
        notifier = Notifier()
        daemon = Daemon(config, notifier)
        daemon.reread = lambda: settings.load(given.config, flags=flags, tiers=config.tiers)
        daemon.quiet = limit
        if given.end_with_parent:
            daemon.end_with(os.getppid())
    except KvtierError as error:
        print(f"kvtierd: {error}", file=sys.stderr)
        return 2
    daemon.heed_signals()
    sizes = ", ".join(f"{tier.name} {format_size(tier.capacity)}" for tier in daemon.tiers)
    for line in (
        f"kvtierd {__version__} (pid {os.getpid()}): {sizes}",
        f"workers attach at {config.runtime_dir} (or KVTIER_ENDPOINT={config.runtime_dir})",
    ):
        if logs.is_journal(sys.stdout):
            log.info("%s", line)
        else:
            print(line, flush=True)
    daemon.run()
    limit.tell(all_of_them=True)
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="kvtierd",
        description="Own the KV cache of every LLM inference process on this host.",
        epilog="SIGHUP: read the settings again and take over what can change live (log_level, slow_request, admins, "
        "capacities of tiers). SIGTERM: save what lives only in memory, and end. With no arguments: a quarter of free "
        "memory (at most 8 GiB) and 10 GiB of SSD in your cache directory.",
    )
    made.add_argument("--config", metavar="FILE", help="settings in TOML")
    made.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="one setting, such as tiers.host.capacity=8GiB"
    )
    made.add_argument("--runtime-dir", metavar="DIR", help="where the sockets are; workers attach here")
    made.add_argument("--end-with-parent", action="store_true", help="stop when the process that started it ends")
    made.add_argument("--check-config", action="store_true", help="say what would run, and end")
    made.add_argument("--version", action="version", version=f"kvtierd {__version__}")
    return made


def _raise_descriptor_limit() -> None:
    """As far as it may go: each slab and each worker takes some, and the usual 1,024 is for programs with select()."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    sys.exit(main())
