"""Real daemons for the SGLang backend's tests. What needs SGLang itself is in `real`, and runs in an environment of its own
(`test_with_sglang`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import pytest

from kvtier.keys import Namespace
from kvtier.layout import EngineLayout
from kvtier_client.sglang.pages import PageStore
from tests.sglang.memory import PAGE_BYTES
from tests.system.conftest import Daemon, daemon, make, place

__all__ = ["daemon", "make", "place"]

collect_ignore = [] if importlib.util.find_spec("sglang") else ["real"]

MakeStore = Callable[..., PageStore]


@pytest.fixture
def store(daemon: Daemon) -> Iterator[MakeStore]:
    """Stores of pages at `daemon`, each with a session of its own, as two servers have; `fields` are the namespace's."""
    made: list[PageStore] = []

    def factory(*, timeout: float = 10.0, threads: int = 2, **fields: object) -> PageStore:
        layout = EngineLayout(PAGE_BYTES, "a test's", 16)
        spec = Namespace(**{"layout": layout, "model": "model", "cap_tokens": 16, **fields})  # type: ignore[arg-type]
        made.append(PageStore(spec, endpoint=daemon.endpoint, timeout=timeout, threads=threads))
        return made[-1]

    yield factory
    for one in made:
        one.close()
