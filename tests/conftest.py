"""Before anything else is imported: without a GPU, kernels are defined for Triton's interpreter, in every test alike. And where
tests run beside each other (`make test`), files that take long begin first, and none takes more than a core."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's, here and in processes that tests start

_LONG = (
    "vllm/test_engines",
    "transformers/test_adversity",
    "vllm/test_engine_caches",
    "serve/test_langchain",
    "vllm/test_versions",
    "sglang/test_with_sglang",
    "vllm/test_engine_kinds",
    "transformers/test_generation",
    "transformers/",
    "deploy/",
    "kernels/test_decode",
    "system/test_disk",
    "system/test_restart",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take long come first, so that the last to run are short and workers end together."""
    if config.getoption("dist", "no") != "no" or "PYTEST_XDIST_WORKER" in os.environ:
        rank = {name: at for at, name in enumerate(_LONG)}
        items.sort(key=lambda item: min((rank[name] for name in _LONG if name in item.nodeid), default=len(_LONG)))
