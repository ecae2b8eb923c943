"""A process that sees GPUs where there are none: `emulated/cupy.py` in the place of cupy and of the driver's library."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier import device, driver

PATH = str(Path(__file__).parent / "emulated")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process sees two GPUs."""
    monkeypatch.syspath_prepend(PATH)
    monkeypatch.setenv("KVTIER_EMULATED_GPUS", "2")
    real = sys.modules.pop("cupy", None)
    monkeypatch.setattr(driver, "library", driver.library)  # which the stand-in replaces
    device.runtime.cache_clear()
    yield
    device.runtime.cache_clear()
    sys.modules.pop("cupy", None)
    if real is not None:
        sys.modules["cupy"] = real
