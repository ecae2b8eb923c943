"""What inference workers import: borrow KV pages from kvtierd by content, and store new ones.

    client = Client()
    space = client.namespace(AttentionLayout(layers=32, kv_heads=8, head_dim=128), model="org/model", revision="...")
    keys = space.keys(token_ids)
    with space.borrow(keys) as lease:
        ...                           # lease.pages: where the KV of the first lease.tokens tokens lies
        with space.reserve(keys, start=len(lease)) as reservation:
            ...                       # write into reservation.pages
            reservation.commit()

Errors are those of `kvtier.errors`; a worker treats `DaemonLost` and `OutOfPages` as a miss and goes on.
"""

from kvtier.errors import DaemonLost, KvtierError, OutOfPages, StaleHandle
from kvtier.keys import Namespace
from kvtier.layout import AttentionLayout, EngineLayout, LatentLayout
from kvtier.wire import BUSY, EXISTS, GRANTED, ORPHAN
from kvtier_client.client import Client, Pending
from kvtier_client.local import local
from kvtier_client.namespace import NamespaceClient
from kvtier_client.pages import Lease, PageView, Reservation

__version__ = "0.1.0"

__all__ = [
    "BUSY",
    "EXISTS",
    "GRANTED",
    "ORPHAN",
    "AttentionLayout",
    "Client",
    "DaemonLost",
    "EngineLayout",
    "KvtierError",
    "LatentLayout",
    "Lease",
    "Namespace",
    "NamespaceClient",
    "OutOfPages",
    "PageView",
    "Pending",
    "Reservation",
    "StaleHandle",
    "local",
]
