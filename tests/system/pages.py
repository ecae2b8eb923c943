"""Pages whose bytes follow from their keys, so that whoever reads one can tell whether it is the right one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier.layout import AttentionLayout
from kvtier_client import Client, NamespaceClient
from kvtier_client.pages import Lease, Reservation

LAYOUT = AttentionLayout(layers=1, kv_heads=1, head_dim=64, dtype="float16")
"""Its unit is 4 KiB."""
UNIT = LAYOUT.unit_stride
BIG = AttentionLayout(layers=4, kv_heads=4, head_dim=64, dtype="float16")
"""Its unit is 64 KiB."""


def open_space(client: Client, model: str = "model", *, big: bool = False, **fields: object) -> NamespaceClient:
    return client.namespace(BIG if big else LAYOUT, model=model, **fields)


def chain(space: NamespaceClient, seed: int, pages: int) -> list[bytes]:
    """The keys of a sequence that is another for every seed."""
    return space.keys([seed % 65536, seed // 65536] * (space.schedule.span(pages - 1).stop // 2))


def fill(view: memoryview, key: bytes) -> None:
    view[:] = key * (len(view) // len(key))


def holds(view: memoryview, key: bytes) -> bool:
    return bytes(view) == key * (len(view) // len(key))


def write(reservation: Reservation, keys: Sequence[bytes]) -> None:
    """Fill each granted page from its key; `keys` is the chain from page 0."""
    for number, page in zip(reservation.numbers, reservation.pages, strict=True):
        fill(page.view, keys[number])


def put(space: NamespaceClient, keys: Sequence[bytes], *, timeout: float = 20.0) -> None:
    """Store the whole chain as an engine does: what is there already is borrowed, and so stays, meanwhile."""
    with space.borrow(keys, timeout=timeout) as prefix:
        start = len(prefix)
        while start < len(keys):
            with space.reserve(keys, start=start, timeout=timeout) as reservation:
                write(reservation, keys)
                reservation.commit()
            start += len(reservation.status)


def wrong(lease: Lease, keys: Sequence[bytes]) -> list[int]:
    """Numbers of the leased pages whose bytes are not those of their keys."""
    return [number for number, page in enumerate(lease) if not holds(page.view, keys[number])]


def read(space: NamespaceClient, keys: Sequence[bytes], *, tier: str = "any", timeout: float = 20.0) -> int:
    """How many pages of the chain are served; each must have its bytes."""
    with space.borrow(keys, tier=tier, timeout=timeout) as lease:
        assert not wrong(lease, keys), f"pages {wrong(lease, keys)} have the wrong bytes"
        return len(lease)


def read_all(space: NamespaceClient, chains: Iterable[Sequence[bytes]]) -> list[int]:
    return [read(space, keys) for keys in chains]


__all__ = ["BIG", "LAYOUT", "UNIT", "chain", "fill", "holds", "open_space", "put", "read", "read_all", "write", "wrong"]
