"""Where a daemon is found: its runtime directory and the two sockets in it."""

from __future__ import annotations

import os
from pathlib import Path

from kvtier.errors import ConfigError

SYSTEM_DIR = Path("/run/kvtier")
ATTACH_SOCKET = "attach.sock"
ROUTER_SOCKET = "verbs.sock"
_SUN_PATH = 107
"""Bytes of a unix socket's path on Linux, without the closing NUL."""


def user_dir() -> Path:
    """The runtime directory of a daemon that this user starts with no arguments."""
    if os.geteuid() == 0:
        return SYSTEM_DIR
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "kvtier" if runtime else Path(f"/tmp/kvtier-{os.geteuid()}")


def state_dir() -> Path:
    """Where that daemon keeps pages on SSD."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "kvtier"


def find_endpoint(endpoint: str | os.PathLike[str] | None = None) -> Path:
    """The runtime directory to attach in: `endpoint` (the directory or its attach socket), else `KVTIER_ENDPOINT`,
    else the user's own daemon if one is there, else the system's."""
    named = endpoint or os.environ.get("KVTIER_ENDPOINT")
    if named:
        path = Path(named)
        return path.parent if path.name == ATTACH_SOCKET else path
    own = user_dir()
    try:
        trusted = (own / ATTACH_SOCKET).stat().st_uid in (0, os.geteuid())  # it may stand in /tmp, where anyone can
    except OSError:
        trusted = False
    return own if trusted else SYSTEM_DIR


def socket_path(directory: Path, name: str) -> Path:
    """Path of socket `name`. Raises ConfigError where the kernel would refuse its length."""
    path = directory / name
    length = len(os.fsencode(path))
    if length > _SUN_PATH:
        raise ConfigError(
            f"the socket path {path} has {length} bytes and the kernel takes {_SUN_PATH}: choose a shorter runtime_dir"
        )
    return path
