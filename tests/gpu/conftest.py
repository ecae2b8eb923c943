"""Real daemons with GPU tiers and real worker processes on them. Without a device nothing here is collected."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.system.conftest import Daemon, MakeDaemon, make, place

__all__ = ["make", "place"]

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
if importlib.util.find_spec("transformers") is None:
    collect_ignore_glob.append("test_worker.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def with_hbm(make: MakeDaemon, *, hbm: str = "256MiB", **others: object) -> Daemon:
    """A daemon, not started, whose first tier is the memory of GPU 0."""
    daemon = make(**{"host": "512MiB", "ssd": "512MiB", "slab": "8MiB", **others})
    daemon.settings = {
        "tiers.hbm.medium": "cuda",
        "tiers.hbm.device": "0",
        "tiers.hbm.capacity": hbm,
        "tiers.hbm.slab": "8MiB",
        **daemon.settings,
    }
    return daemon


@pytest.fixture
def gpu(make: MakeDaemon) -> Iterator[Daemon]:
    """HBM of 256 MiB, pinned host memory of 512 MiB and SSD, running."""
    yield with_hbm(make).start()
