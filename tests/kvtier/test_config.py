"""Settings: where they come from, and that every mistake names the file, the key and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier import config
from kvtier.config import Config, load
from kvtier.errors import ConfigError

GOOD = """
runtime_dir = "/run/here"
[tiers.host]
medium = "host"
capacity = "1GiB"
[tiers.ssd]
medium = "file"
capacity = "10 GB"
path = "/data"
[tenants.a]
uids = [1000]
guaranteed = { host = "512MiB" }
"""


def of(text: str, tmp_path: Path, *flags: str, **environment: str) -> Config:
    file = tmp_path / "kvtier.toml"
    file.write_text(text)
    return load(file, environment, flags)


def test_a_file(tmp_path: Path) -> None:
    got = of(GOOD, tmp_path)
    assert list(got.tiers) == ["host", "ssd"], "in the order of the file"
    assert got.tiers["host"].capacity == 1 << 30 and got.tiers["ssd"].capacity == 10 * 10**9
    assert got.tenants["a"].guaranteed == {"host": 512 << 20}
    assert got.runtime_dir == "/run/here"


def test_environment_goes_over_file_and_flags_over_both(tmp_path: Path) -> None:
    variable = {"KVTIER__TIERS__HOST__CAPACITY": "2GiB", "KVTIER__STOP_TIMEOUT": "7", "OTHER": "x"}
    got = of(GOOD, tmp_path, **variable)
    assert (got.tiers["host"].capacity, got.stop_timeout) == (2 << 30, 7)
    got = of(GOOD, tmp_path, "tiers.host.capacity=3GiB", **variable)
    assert (got.tiers["host"].capacity, got.tiers["ssd"].capacity) == (3 << 30, 10 * 10**9)


def test_with_nothing_there_is_host_memory_and_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    got = load(None, {})
    assert {name: tier.medium for name, tier in got.tiers.items()} == {"host": "host", "ssd": "file"}
    assert 64 << 20 <= got.tiers["host"].capacity <= 8 << 30
    assert got.tiers["ssd"].capacity == 10 << 30
    assert got.tiers["ssd"].path == str(tmp_path / "kvtier")
    monkeypatch.setattr(config, "available_memory", lambda: 100 << 20)
    assert load(None, {}).tiers["host"].capacity == 64 << 20
    monkeypatch.setattr(config, "available_memory", lambda: 1 << 40)
    assert load(None, {}).tiers["host"].capacity == 8 << 30


MISTAKES = {
    "unknown key": ("runtimedir = '/x'", ["runtimedir", "did you mean runtime_dir?"]),
    "unknown key of a tier": (GOOD.replace("capacity =", "capcity ="), ["tiers.host.capcity", "tiers.host.capacity?"]),
    "nothing near": ("xyzzy = 1", ["xyzzy", "there are", "runtime_dir"]),
    "no size": (GOOD.replace("1GiB", "1 gigantic"), ["tiers.host.capacity", "4GiB"]),
    "negative size": (GOOD.replace('"1GiB"', "-1"), ["tiers.host.capacity", "-1"]),
    "capacity missing": ("[tiers.host]\nmedium='host'", ["tiers.host", "capacity"]),
    "unknown medium": (GOOD.replace('medium = "host"', 'medium = "tape"'), ["tiers.host.medium", "tape"]),
    "a tier that is no section": ("[tiers]\nhost = 3", ["tiers.host"]),
    "tiers that are no section": ("tiers = 3", ["tiers", "sections"]),
    "a file tier first": ('[tiers.s]\nmedium="file"\ncapacity="1GiB"\npath="/d"', ["file tier cannot stand first"]),
    "no path": (GOOD.replace('path = "/data"', ""), ["tiers.ssd.path", "path = "]),
    "two tiers in one path": (
        GOOD.replace("[tenants.a]", '[tiers.more]\nmedium="file"\ncapacity="1GiB"\npath="/data/"\n[tenants.a]'),
        ["share a path"],
    ),
    "a tier called any": (GOOD.replace("[tiers.ssd]", "[tiers.any]"), ["tiers.any", "choose another name"]),
    "slab of an odd size": (GOOD.replace('path = "/data"', 'path="/data"\nslab=5000'), ["tiers.ssd.slab", "4096"]),
    "no room for a slab": (GOOD.replace('"1GiB"', '"1MiB"'), ["tiers.host.capacity", "lower tiers.host.slab"]),
    "queue depth": (GOOD.replace('path = "/data"', 'path="/data"\nqueue_depth=0'), ["tiers.ssd.queue_depth", "256"]),
    "admission": (GOOD.replace('path = "/data"', 'path="/data"\nadmission="never"'), ["tiers.ssd.admission"]),
    "log level": ("log_level = 'loud'", ["log_level", "loud"]),
    "guarantee in no tier": (GOOD.replace("{ host", "{ hots"), ["tenants.a", "hots", "host, ssd"]),
    "guarantees beyond capacity": (GOOD.replace("512MiB", "2GiB"), ["2.0 GiB", "tiers.host", "1.0 GiB", "lower"]),
    "guarantees that add up beyond": (
        GOOD + '[tenants.b]\nguaranteed = { host = "513MiB" }',
        ["1.0 GiB", "tiers.host", "lower guarantees"],
    ),
    "a limit below the guarantee": (GOOD + 'limit = { host = "1MiB" }', ["tenants.a.limit.host", "512.0 MiB"]),
    "a size in a tenant": (GOOD.replace("512MiB", "512 MuB"), ["tenants.a.guaranteed", "512 MuB"]),
    "one uid of two tenants": (GOOD + "[tenants.b]\nuids = [1000]", ["tenants.b.uids", "1000", "tenant a"]),
    "uids that are names": (GOOD.replace("[1000]", '["alice"]'), ["tenants.a.uids"]),
    "no TOML": ("[tiers", ["not TOML", "at end of document"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_names_file_key_and_remedy(mistake: str, tmp_path: Path) -> None:
    text, parts = MISTAKES[mistake]
    with pytest.raises(ConfigError) as caught:
        of(text, tmp_path)
    for part in [str(tmp_path / "kvtier.toml"), *parts]:
        assert part in str(caught.value), (part, str(caught.value))


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "kvtier.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not TOML"):
        load(tmp_path / "kvtier.toml", {})


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file.*--config"):
        load(tmp_path / "none.toml", {})


@pytest.mark.parametrize("flag", ["tiers.host.capacity", "runtime_dir.x=1", "=", "a.b.c=1"])
def test_bad_flags(flag: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--set"):
        of("runtime_dir='/x'", tmp_path, flag)


def test_a_bad_variable_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="KVTIER__TIERS__HOST__CAPACITY"):
        of(GOOD, tmp_path, KVTIER__TIERS__HOST__CAPACITY="much")


def test_settings_of_a_default_tier_change_that_tier_alone() -> None:
    plain = config.load(environment={})
    changed = config.load(environment={"KVTIER__TIERS__SSD__CAPACITY": "20GiB"}, flags=["tiers.host.capacity=128MiB"])
    assert list(changed.tiers) == ["host", "ssd"]
    assert (changed.tiers["host"].capacity, changed.tiers["ssd"].capacity) == (128 << 20, 20 << 30)
    assert changed.tiers["ssd"].path == plain.tiers["ssd"].path
    with pytest.raises(ConfigError, match=r"tiers\.host\.capcity .*tiers\.host\.capacity"):
        config.load(environment={}, flags=["tiers.host.capcity=1GiB"])
    alone = config.load(environment={}, flags=["tiers.host.medium=host", "tiers.host.capacity=1GiB"])
    assert list(alone.tiers) == ["host"], "a tier of one's own replaces the default ones"
