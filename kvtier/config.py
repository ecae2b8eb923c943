"""The daemon's settings: TOML file, then environment, then flags, each over the one before.

    [tiers.host]                      KVTIER__TIERS__HOST__CAPACITY=8GiB      --set tiers.host.capacity=8GiB
    medium = "host"
    capacity = "4GiB"

Tiers stand in the file from the fastest to the slowest. With none: host memory (a quarter of what is free, at most
8 GiB) and SSD (10 GiB under the user's cache directory). Every mistake is a `ConfigError` that names the file, the key
and the remedy; an unknown key is refused with the nearest right name.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from kvtier import paths
from kvtier.errors import ConfigError
from kvtier.layout import ALIGNMENT
from kvtier.memory import available_memory
from kvtier.sizes import format_size, parse_size

ENV_PREFIX = "KVTIER__"
_MIB = 1 << 20

LogLevel = Literal["debug", "info", "warning", "error"]
LIVE = ("log_level", "admins", "slow_request")
"""Settings of `Config` that a running daemon takes over."""

StructT = TypeVar("StructT", bound=msgspec.Struct)


class Size(int):
    """A number of bytes; in TOML an integer or a text such as "4GiB"."""


class TierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One tier.

    `slab` is how much is taken from the medium at a time. `admission` says which pages a tier below the first gets a
    copy of: each at once, or those used twice. `write_queue` bounds the bytes that wait to be written down to it; what
    does not fit is not written, and counted. `path` and `queue_depth` (threads that read and write) are of "file".
    `device` is of "cuda": a GPU's UUID, its number, or all, each of which then gets a tier of this capacity; without
    `peers` they exchange pages through host memory even where they could over a link of their own.
    """

    medium: Literal["host", "file", "cuda"]
    capacity: Size
    slab: Size = Size(64 * _MIB)
    device: str | int = "all"
    peers: bool = True
    path: str = ""
    queue_depth: int = 8
    admission: Literal["always", "second-use"] = "always"
    write_queue: Size = Size(1024 * _MIB)


class TenantConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who a tenant is, and by tier the bytes that it always can have and the most that it can."""

    uids: list[int] = []
    gids: list[int] = []
    guaranteed: dict[str, Size] = {}
    limit: dict[str, Size] = {}


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of a daemon. `admins` may resize, drain and see all tenants, beside root and the daemon's user.
    `log_format` is text but where the journal reads; `slow_request` is after how many seconds a request is logged, with
    what it waited for. `http_port` of loopback has metrics and the status page; 0: a free port. `kvtierd` takes over
    `LIVE` ones, and tiers' capacities, when it is told to reload.
    """

    runtime_dir: str = ""
    log_level: LogLevel = "info"
    log_format: Literal["auto", "text", "json"] = "auto"
    slow_request: float = 1.0
    stop_timeout: float = 30.0
    admins: list[int] = []
    http_port: int | Literal["off"] = 9464
    tiers: dict[str, TierConfig] = {}
    tenants: dict[str, TenantConfig] = {}


def load(
    file: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    tiers: Mapping[str, TierConfig] | None = None,
) -> Config:
    """The settings of `file` (none: no file), `environment` (none: the process's) and `flags` ("key.path=value").
    `tiers` are taken where these name none, instead of what this host has room for now.

    Raises ConfigError.
    """
    data: dict[str, Any] = {}
    source = "the defaults"
    if file is not None:
        source = str(file)
        data = _read(Path(file))
    for name, value in (os.environ if environment is None else environment).items():
        if name.startswith(ENV_PREFIX):
            _put(data, name[len(ENV_PREFIX) :].lower().split("__"), value, f"environment variable {name}")
            source += f", {name}"
    for flag in flags:
        key, equals, value = flag.partition("=")
        if not equals:
            raise ConfigError(f"--set {flag}: write it as key.path=value, for example tiers.host.capacity=4GiB")
        _put(data, key.strip().split("."), value.strip(), f"--set {flag}")
        source += f", --set {key}"
    _over_defaults(data, default_tiers() if tiers is None else tiers)
    return _checked(_convert(data, source), source, tiers)


def _over_defaults(data: dict[str, Any], defaults: Mapping[str, TierConfig]) -> None:
    """Settings of tiers that define none of their own (no medium is named) change the default ones."""
    given = data.get("tiers")
    if not isinstance(given, dict) or not given or not all(isinstance(one, dict) for one in given.values()):
        return
    if any("medium" in one for one in given.values()) or not set(given) <= set(defaults):
        return
    merged = {name: {key: getattr(tier, key) for key in tier.__struct_fields__} for name, tier in defaults.items()}
    for name, settings in given.items():
        merged[name] |= settings
    data["tiers"] = merged


def default_tiers() -> dict[str, TierConfig]:
    """What a daemon with no configured tiers has."""
    quarter = available_memory() // 4 // (64 * _MIB) * (64 * _MIB)
    return {
        "host": TierConfig(medium="host", capacity=Size(max(64 * _MIB, min(quarter, 8 << 30)))),
        "ssd": TierConfig(medium="file", capacity=Size(10 << 30), path=str(paths.state_dir())),
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as handle:
            return tomllib.load(handle)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the right path with --config") from error
    except ValueError as error:  # also of bytes that are no UTF-8
        raise ConfigError(f"{path}: not TOML: {error}") from error


def _put(data: dict[str, Any], keys: list[str], text: str, source: str) -> None:
    """Set one setting given as text: a TOML value where it reads as one, else a string."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    for key in keys[:-1]:
        data = data.setdefault(key, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{source}: {key} is a setting, not a section")
    data[keys[-1]] = value


def _convert(data: dict[str, Any], source: str) -> Config:
    _check_keys(data, Config, source, "")
    sections: dict[str, type[msgspec.Struct]] = {"tiers": TierConfig, "tenants": TenantConfig}
    for section, kind in sections.items():
        entries = data.get(section, {})
        if not isinstance(entries, dict):
            raise ConfigError(f"{source}: {section} must be sections such as [{section}.name]")
        for name, entry in entries.items():
            if isinstance(entry, dict):
                _check_keys(entry, kind, source, f"{section}.{name}.")
            _converted(entry, kind, source, f"{section}.{name}")
    return _converted(data, Config, source, "")


def _converted(data: Any, kind: type[StructT], source: str, place: str) -> StructT:
    try:
        return msgspec.convert(data, kind, dec_hook=_size)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        where = (place + path.rstrip("`")).lstrip(".")
        raise ConfigError(f"{source}: {where or 'settings'}: {reason}") from error


def _size(kind: type, value: Any) -> Any:
    if kind is Size:
        return Size(parse_size(value))
    raise NotImplementedError(kind)


def _check_keys(data: dict[str, Any], kind: type[msgspec.Struct], source: str, prefix: str) -> None:
    known = kind.__struct_fields__
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"there are: {', '.join(known)}"
            raise ConfigError(f"{source}: {prefix}{key} is no setting; {hint}")


def _checked(config: Config, source: str, otherwise: Mapping[str, TierConfig] | None) -> Config:
    """`config` with its defaults filled in, its parts checked against each other."""
    tiers = config.tiers or dict(otherwise or default_tiers())
    config = msgspec.structs.replace(config, tiers=tiers, runtime_dir=config.runtime_dir or str(paths.user_dir()))
    if next(iter(tiers.values())).medium == "file":
        raise ConfigError(
            f"{source}: tiers: a file tier cannot stand first, since workers cannot map it; add host before"
        )
    if config.http_port != "off" and not 0 <= config.http_port < 1 << 16:
        raise ConfigError(f'{source}: http_port is {config.http_port}: it must be a port, 0 for a free one, or "off"')
    for name, tier in tiers.items():
        where = f"{source}: tiers.{name}"
        if name == "any":
            raise ConfigError(f'{where}: "any" means every tier in requests; choose another name')
        if tier.medium == "file" and not tier.path:
            raise ConfigError(f'{where}.path is missing: a file tier needs a directory, path = "/var/lib/kvtier"')
        if tier.slab < ALIGNMENT or tier.slab % ALIGNMENT:
            raise ConfigError(f"{where}.slab is {tier.slab}: it must be a positive multiple of {ALIGNMENT}")
        if tier.capacity < tier.slab:
            raise ConfigError(
                f"{where}.capacity {format_size(tier.capacity)} holds no slab of {format_size(tier.slab)}: raise it, or "
                f"lower tiers.{name}.slab"
            )
        if not 1 <= tier.queue_depth <= 256:
            raise ConfigError(f"{where}.queue_depth is {tier.queue_depth}: it must be from 1 to 256")
    places = [tier.path for tier in tiers.values() if tier.medium == "file"]
    if len(set(map(os.path.realpath, places))) < len(places):
        raise ConfigError(f"{source}: tiers: two file tiers share a path; give each its own")
    for name, tenant in config.tenants.items():
        for tier_name in (*tenant.guaranteed, *tenant.limit):
            if tier_name not in tiers:
                raise ConfigError(f"{source}: tenants.{name}: no tier {tier_name!r}; there are: {', '.join(tiers)}")
        for tier_name, limit in tenant.limit.items():
            if limit < tenant.guaranteed.get(tier_name, 0):
                raise ConfigError(
                    f"{source}: tenants.{name}.limit.{tier_name} {format_size(limit)} is below its guarantee of "
                    f"{format_size(tenant.guaranteed[tier_name])}: raise the limit or lower the guarantee"
                )
    for kind in ("uids", "gids"):
        owners: dict[int, str] = {}
        for name, tenant in config.tenants.items():
            for number in getattr(tenant, kind):
                if owners.setdefault(number, name) != name:
                    raise ConfigError(
                        f"{source}: tenants.{name}.{kind}: {number} is of tenant {owners[number]} too: leave it in one"
                    )
    for tier_name, tier in tiers.items():
        promised = sum(tenant.guaranteed.get(tier_name, 0) for tenant in config.tenants.values())
        if promised > tier.capacity:
            raise ConfigError(
                f"{source}: tenants are guaranteed {format_size(promised)} of tiers.{tier_name}, which holds "
                f"{format_size(tier.capacity)}: lower guarantees or raise its capacity"
            )
    return config
