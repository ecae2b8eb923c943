"""Redis over its unix socket: see bench/peers.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import redis
from peers_common import PAGE, SMALL, main, server

BATCH = 16  # pages in flight


class Store:
    def __init__(self, place: str, role: str, variant: str, pages: int) -> None:
        self.redis = redis.Redis(unix_socket_path=f"{place}/redis.sock")
        self.source = np.ones((pages if role == "writer" else 0, PAGE), np.uint8)
        self.small = [f"small-{index}" for index in range(SMALL)]

    def clear(self) -> None:
        self.redis.flushall()

    def put(self, turn: int) -> None:
        for start in range(0, len(self.source), BATCH):
            pipeline = self.redis.pipeline(transaction=False)
            for index, data in enumerate(self.source[start : start + BATCH], start):
                pipeline.set(f"{turn}-{index}", memoryview(data))
            pipeline.execute()

    def prepare(self, turn: int, pages: int) -> None:
        pass

    def get(self, turn: int, pages: int) -> Sequence[np.ndarray]:
        # One page a message: replies of several, by MGET or in a pipeline, are four to nine times slower to parse.
        found = [self.redis.get(f"{turn}-{index}") for index in range(pages)]
        return [np.frombuffer(data, np.uint8) for data in found if data is not None]

    def done(self) -> None:
        pass

    def put_small(self) -> None:
        self.redis.mset(dict.fromkeys(self.small, bytes(4096)))

    def exists(self, count: int) -> int:
        return self.redis.exists(*self.small[:count])


@contextmanager
def servers(place: str, pages: int) -> Iterator[None]:
    path = Path(place) / "redis.sock"
    options = ["--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir", place]
    with server([os.environ["BENCH_DEBIAN"] + "/usr/bin/redis-server", *options], path.exists):
        yield


if __name__ == "__main__":
    sys.exit(main(Store, servers, {"plain": "Redis, unix socket"}))
