"""CUDA's edges without CUDA: a runtime that counts what it is asked, and fails where it is told to."""

from __future__ import annotations

import types
from typing import Any

import pytest

from kvtier import device
from kvtier.device import CudaUnavailable


class Runtime:
    """Registers host memory until call number `fails`."""

    class CUDARuntimeError(RuntimeError):
        status = 2

    def __init__(self, fails: int = 0) -> None:
        self.fails = fails
        self.calls = 0
        self.registered: dict[int, int] = {}
        self.flags: set[int] = set()

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        self.calls += 1
        if self.calls == self.fails:
            raise self.CUDARuntimeError("out of memory")
        self.registered[address] = nbytes
        self.flags.add(flags)

    def hostUnregister(self, address: int) -> None:
        del self.registered[address]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    fake = Runtime()
    monkeypatch.setattr(device, "runtime", lambda: fake)
    return fake


def test_a_registration_that_fails_half_way_is_rolled_back(runtime: Runtime) -> None:
    runtime.fails = 3
    with pytest.raises(CudaUnavailable, match="memlock"):
        device.pin(4096, 40, chunk=10)
    assert runtime.calls == 3 and not runtime.registered


def test_memory_is_pinned_in_chunks_and_unpinned_in_the_same(runtime: Runtime) -> None:
    device.pin(4096, 25, chunk=10)
    assert runtime.registered == {4096: 10, 4106: 10, 4116: 5}
    device.unpin(4096, 25, chunk=10)
    assert not runtime.registered


def test_read_only_mappings_are_registered_as_such(runtime: Runtime) -> None:
    device.pin(4096, 10)
    device.pin(8192, 10, read_only=True)
    assert len(runtime.flags) == 2


def test_a_host_tier_that_cannot_be_pinned_goes_on_unpinned(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvtier_daemon.media import HostMedium

    runtime.fails = 2
    medium = HostMedium("host", device.Device(0, "GPU-x", "fake", 1 << 30, -1))
    backings = [medium.grow(number, 1 << 16) for number in range(4)]
    assert [backing.pinned for backing in backings] == [True, False, False, False]
    assert sum("not pinned" in record.message for record in caplog.records) == 1
    for number, backing in enumerate(backings):
        medium.shrink(number, backing)
    assert not runtime.registered


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(device, "importlib", types.SimpleNamespace(import_module=missing))
    device.runtime.cache_clear()
    try:
        with pytest.raises(CudaUnavailable, match=r"kvtier\[cuda13\]"):
            device.devices()
    finally:
        device.runtime.cache_clear()


def test_memory_can_be_asked_of_a_node_that_every_machine_has() -> None:
    from kvtier_daemon.media import prefer_node

    with prefer_node(-1), prefer_node(0):
        bytearray(1 << 16)
