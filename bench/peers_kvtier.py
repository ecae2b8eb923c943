"""kvtier beside its peers: see bench/peers.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from core import PAGE as LAYOUT
from core import TINY, daemon
from peers_common import PAGE, SMALL, Path, main

from kvtier_client import Client, Lease


class Store:
    def __init__(self, place: str, role: str, variant: str, pages: int) -> None:
        self.client = Client(f"{place}/run")
        self.space = self.client.namespace(LAYOUT, model="bench", cap_tokens=16)
        self.tiny = self.client.namespace(TINY, model="bench", cap_tokens=16)
        self.chains = {turn: self.space.keys([turn] * 16 * pages) for turn in range(20)}
        self.small = self.tiny.keys(range(16 * SMALL))
        self.source = np.ones((pages if role == "writer" or variant == "copy" else 0, PAGE), np.uint8)
        self.copies = variant == "copy"
        self.lease: Lease | None = None

    def clear(self) -> None:
        self.space.evict()

    def put(self, turn: int) -> None:
        with self.space.reserve(self.chains[turn], timeout=60) as reservation:
            for page, data in zip(reservation, self.source, strict=True):
                np.copyto(np.frombuffer(page.view, np.uint8), data)
            reservation.commit()

    def prepare(self, turn: int, pages: int) -> None:
        pass

    def get(self, turn: int, pages: int) -> Sequence[np.ndarray]:
        self.lease = self.space.borrow(self.chains[turn][:pages])
        views = [np.frombuffer(page.view, np.uint8) for page in self.lease]
        if not self.copies:
            return views
        for target, view in zip(self.source, views, strict=False):
            np.copyto(target, view)
        return list(self.source[: len(views)])

    def done(self) -> None:
        assert self.lease
        self.lease.release()

    def put_small(self) -> None:
        if self.tiny.lookup(self.small) == SMALL:
            return
        for start in range(0, SMALL, 100):
            with self.tiny.reserve(self.small[: start + 100], start=start, timeout=60) as reservation:
                for page in reservation:
                    page.view[:] = bytes(4096)
                reservation.commit()

    def exists(self, count: int) -> int:
        return self.tiny.lookup(self.small[:count])


@contextmanager
def servers(place: str, pages: int) -> Iterator[None]:
    with daemon(Path(place), host=str(2 * pages * PAGE + (256 << 20))):
        yield


if __name__ == "__main__":
    sys.exit(main(Store, servers, {"borrow": "kvtier, borrowed", "copy": "kvtier, borrowed and copied out"}))
