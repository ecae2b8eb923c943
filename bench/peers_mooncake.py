"""Mooncake Store through `mooncake_client` and its shared memory: see bench/peers.py."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import mooncake
import numpy as np
from mooncake.store import MooncakeDistributedStore
from peers_common import PAGE, SMALL, listens, main, server


class Store:
    def __init__(self, place: str, role: str, variant: str, pages: int) -> None:
        self.store = MooncakeDistributedStore()
        size = pages * PAGE
        if self.store.setup_dummy(2 * size, 64 << 20, "127.0.0.1:50052"):
            raise RuntimeError("setup_dummy failed")
        # Memory that the client process maps too, as `batch_put_from` and `batch_get_into` want it.
        self.address = self.store.alloc_from_mem_pool(size)
        if not self.address or self.store.register_buffer(self.address, size):
            raise RuntimeError("no shared memory to put from")
        self.source = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.address)).reshape(pages, PAGE)
        self.source[:] = 1
        self.places = [self.address + index * PAGE for index in range(pages)]
        self.sizes = [PAGE] * pages
        self.small = [f"small-{index}" for index in range(SMALL)]

    def clear(self) -> None:
        self.store.remove_all(True)

    def put(self, turn: int) -> None:
        keys = [f"{turn}-{index}" for index in range(len(self.places))]
        if any(self.store.batch_put_from(keys, self.places, self.sizes)):
            raise RuntimeError("a put failed")

    def prepare(self, turn: int, pages: int) -> None:
        pass

    def get(self, turn: int, pages: int) -> Sequence[np.ndarray]:
        if pages == 1:
            sizes = [self.store.get_into(f"{turn}-0", self.address, PAGE)]
        else:
            keys = [f"{turn}-{index}" for index in range(pages)]
            sizes = self.store.batch_get_into(keys, self.places[:pages], self.sizes[:pages])
        return [self.source[index] for index, size in enumerate(sizes) if size == PAGE]

    def done(self) -> None:
        pass

    def put_small(self) -> None:
        if self.store.put_batch(self.small, [bytes(4096)] * SMALL):
            raise RuntimeError("a small put failed")

    def exists(self, count: int) -> int:
        if count == 1:
            return int(self.store.is_exist(self.small[0]))
        return sum(self.store.batch_is_exist(self.small[:count]))


@contextmanager
def servers(place: str, pages: int) -> Iterator[None]:
    home = Path(mooncake.__file__).parent
    master = [home / "mooncake_master", "--enable_http_metadata_server=true", "--http_metadata_server_host=127.0.0.1"]
    client = [
        home / "mooncake_client",
        "--host=127.0.0.1",
        f"--global_segment_size={2 * pages * PAGE + (256 << 20)}",
        "--metadata_server=http://127.0.0.1:8080/metadata",
        "--master_server_address=127.0.0.1:50051",
    ]
    # Loopback is the only address there is, and it is not used unless named.
    local = {"MC_TCP_BIND_ADDRESS": "127.0.0.1", "MC_FORCE_TCP": "1"}
    for program in (master[0], client[0]):
        Path(program).chmod(0o755)
    with server(master, lambda: listens(50051) and listens(8080)), server(client, lambda: listens(50052), **local):
        yield


if __name__ == "__main__":
    sys.exit(main(Store, servers, {"shm": "Mooncake, shared memory"}))
