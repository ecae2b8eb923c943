"""A sequence's pages, apart from who runs it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from kvtier.layout import AttentionLayout
from kvtier.schedule import Schedule
from kvtier_client.transformers.chain import Chain
from kvtier_client.transformers.errands import Answer
from kvtier_client.transformers.paging import Leftovers, in_own_memory

LAYOUT = AttentionLayout(layers=2, kv_heads=1, head_dim=64, dtype="float32")


def test_pages_that_come_again_elsewhere_are_looked_for_there() -> None:
    """As many as before, after the daemon was lost: kernels that got the old addresses would read what is there now."""
    space: Any = SimpleNamespace(schedule=Schedule(), spec=SimpleNamespace(layout=LAYOUT))
    chain = Chain(space, list(range(40)))
    kept = []
    for _ in range(2):
        pages = in_own_memory(LAYOUT, space.schedule, 0, 3, torch.device("cpu"))
        kept += pages
        chain.begin(Answer([], pages))
        assert chain.addresses().tolist() == [page.address for page in pages]
        chain.check()
        chain.clear(Leftovers())
    assert len({page.address for page in kept}) == 6
