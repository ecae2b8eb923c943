"""Every error that kvtier raises on purpose.

One small family: each class is one thing a caller can act on, and has a `code`, under which it travels over the wire.
A message says what happened, what it means and what to do; numbers are in it. Anything else that escapes is a bug.
"""

from __future__ import annotations

from typing import ClassVar


class KvtierError(Exception):
    """Base of the family. `code` names the class on the wire and in metrics."""

    code: ClassVar[str] = "internal"
    request_id: int = 0
    """Of the request at fault, where one could be read."""


class ConfigError(KvtierError):
    """A setting cannot be used; the message names the file, the key and the remedy."""

    code = "config"


class LayoutError(KvtierError):
    """A KV layout that no unit can have, or one that daemon and worker read differently."""

    code = "layout"


class ProtocolError(KvtierError):
    """A message that cannot be decoded, is too large, too deep, or of another version."""

    code = "protocol"


class InvalidRequest(KvtierError):
    """A well-formed request that makes no sense: an unknown tier, a key of the wrong length."""

    code = "invalid"


class NotAttached(KvtierError):
    """The sender has no session: it never attached, or the daemon ended the session."""

    code = "not_attached"


class NotOpen(KvtierError):
    """The namespace is not open, or was closed since: the daemon closes those without pages when they become many."""

    code = "not_open"


class AccessDenied(KvtierError):
    """The peer's user may not do this."""

    code = "denied"


class OutOfPages(KvtierError):
    """No frame came free before the deadline: all are leased, reserved or in flight."""

    code = "out_of_pages"


class StaleHandle(KvtierError):
    """A lease or reservation that has ended, or never was this session's. Its pages may be anything by now."""

    code = "stale_handle"


class DeadlineExceeded(KvtierError):
    """Nothing was ready before the deadline, and the verb has no shorter answer."""

    code = "deadline"


class Cancelled(KvtierError):
    """The caller took the request back."""

    code = "cancelled"


class Draining(KvtierError):
    """The daemon is stopping, or the tier is being drained: nothing new is accepted."""

    code = "draining"


class DaemonLost(KvtierError):
    """The daemon is gone or was restarted. Every handle is void; treat all as a miss and attach again."""

    code = "daemon_lost"


class ForkedClient(KvtierError):
    """A client was used in a child of the process that attached. Make a new one after the fork."""

    code = "forked"


class SlabError(KvtierError):
    """A medium could not make, map or release a slab."""

    code = "slab"


def _family(root: type[KvtierError]) -> dict[str, type[KvtierError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _family(child)
    return found


def from_code(code: str, message: str) -> KvtierError:
    """The error that travelled as (`code`, `message`); a code of a later version becomes the base class."""
    return _family(KvtierError).get(code, KvtierError)(message)
