"""SGLang's HiCache on kvtierd: a storage backend that it loads by name, with no patch. docs/sglang.md says how.

    storage     the backend, as SGLang calls it
    identity    what must match for two servers to share, and the options
    pages       pages in kvtierd by the engine's own keys and addresses; knows nothing of SGLang

`storage` needs SGLang, so it is imported when the class is asked for, as SGLang's factory does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier_client.sglang.storage import KVTierStorage

__all__ = ["KVTierStorage"]


def __getattr__(name: str) -> Any:
    if name == "KVTierStorage":
        from kvtier_client.sglang.storage import KVTierStorage

        return KVTierStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
