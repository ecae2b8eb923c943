"""SGLang's own pools, controller and factory, on the CPU. Collected only where SGLang is; see `tests.sglang.place`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.sglang.real import stand_in

stand_in.install()

from tests.sglang.real.server import Server
from tests.system.conftest import Daemon

MakeServer = Callable[..., Server]


@pytest.fixture
def server(daemon: Daemon) -> Iterator[MakeServer]:
    """HiCache as a server of SGLang has it, each with pools and a session of its own, at `daemon`."""
    made: list[Server] = []

    def factory(**options: object) -> Server:
        made.append(Server(daemon.endpoint, **options))  # type: ignore[arg-type]
        return made[-1]

    yield factory
    for one in made:
        one.close()
