"""As `tests.system.pages`, for pages in GPU memory: bytes that follow from the key, written and checked by the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.layout import AttentionLayout
from kvtier_client import Client, NamespaceClient
from kvtier_client.pages import Lease, PageView

LAYOUT = AttentionLayout(layers=8, kv_heads=4, head_dim=64, dtype="float16")
"""Its unit is 128 KiB."""


def open_space(client: Client, model: str = "gpu", **fields: object) -> NamespaceClient:
    return client.namespace(LAYOUT, model=model, **fields)


def pattern(key: bytes, nbytes: int, where: torch.device) -> torch.Tensor:
    """float16 values that stand for `key`: exact in every copy, and no two keys' alike."""
    words = torch.frombuffer(bytearray(key), dtype=torch.int16).to(where)
    step = torch.arange(nbytes // 16, device=where, dtype=torch.int16).repeat_interleave(8)
    return (words.repeat(nbytes // 16) ^ step).view(torch.float16)


def gfill(page: PageView, key: bytes) -> None:
    tensor = page.torch()
    tensor.copy_(pattern(key, page.handle.length, tensor.device).view(tensor.shape))


def gholds(page: PageView, key: bytes) -> bool:
    tensor = page.torch()
    wanted = pattern(key, page.handle.length, tensor.device).view(tensor.shape)
    return bool(torch.equal(tensor.view(torch.int16), wanted.view(torch.int16)))


def gput(space: NamespaceClient, keys: Sequence[bytes], *, tier: str | None = None, timeout: float = 20.0) -> None:
    """Store the whole chain, in `tier` (None: the GPU's memory); published when the stream has written it."""
    start = space.lookup(keys)
    while start < len(keys):
        with space.reserve(keys, start=start, tier=tier, timeout=timeout) as reservation:
            for number, page in zip(reservation.numbers, reservation.pages, strict=True):
                gfill(page, keys[number])
            reservation.commit(after=torch.cuda.current_stream())
        start += len(reservation.status)


def gwrong(lease: Lease, keys: Sequence[bytes]) -> list[int]:
    return [number for number, page in enumerate(lease) if not gholds(page, keys[number])]


def gread(space: NamespaceClient, keys: Sequence[bytes], *, tier: str = "cuda", timeout: float = 20.0) -> int:
    """How many pages are served in `tier`; each must have its bytes."""
    with space.borrow(keys, tier=tier, timeout=timeout) as lease:
        bad = gwrong(lease, keys)
        assert not bad, f"pages {bad} have the wrong bytes in {tier}"
        return len(lease)


def chain(space: NamespaceClient, seed: int, pages: int) -> list[bytes]:
    return space.keys([seed % 65536, seed // 65536] * (space.schedule.span(pages - 1).stop // 2))


__all__ = ["LAYOUT", "chain", "gfill", "gholds", "gput", "gread", "gwrong", "open_space", "pattern"]
