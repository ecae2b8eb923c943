"""What client and daemon say to each other: one schema for every message, packed with msgpack and checked on arrival.

    request  [version, request id, verb, timeout in seconds, body]
    reply    [version, request id, boot epoch, notices, code, body]

`code` is "" for a result, the code of a `kvtier.errors` class for an error (then the body is its message), or "event"
for what a subscriber is sent unasked. `notices` counts what waits for the session on its attach socket. Bodies are
arrays, in the order of the fields below; lists of keys, leases and handles travel packed as bytes.

Decoding is strict: sizes, depth, types and version are all bounded, and whatever fails is a `ProtocolError`.
Not here: sockets (`kvtier_client.channel`, `kvtier_daemon.server`) and the attach socket's own messages, which are at
the end of this file since they share its rules. The prose version is docs/protocol.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import msgpack
import msgspec

from kvtier.errors import InvalidRequest, KvtierError, ProtocolError
from kvtier.keys import Namespace

VERSION = 1
MAX_MESSAGE = 16 << 20
"""Bytes. A million keys; a context of 1M tokens is about 4,000."""
MAX_TIMEOUT = 3600.0
TOKEN_BYTES = 16
"""Of the secret that a session's sockets carry in their routing ids."""

GRANTED, EXISTS, BUSY, ORPHAN = 0, 1, 2, 3
"""What became of each page of a `reserve` or a `commit`: granted (published); there already; being written by another
session (`reserve` only); its prefix is held no more, so that nothing could find it (`commit` only)."""


def _plain(value: Any) -> Any:
    if isinstance(value, int):  # a size of the configuration, say
        return int(value)
    raise NotImplementedError(f"{type(value).__name__} does not go on the wire")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)  # msgpack, and faster at it than the package of that name
_HANDLE = struct.Struct("<IIQQ")
HANDLE_BYTES = _HANDLE.size
HANDLE_FIELDS = [("slab", "<u4"), ("generation", "<u4"), ("offset", "<u8"), ("length", "<u8")]
"""Of a `Handle`, packed: how long it is, and its fields as numpy takes them."""
_U64 = struct.Struct("<Q")
_LIMITS: dict[str, Any] = {
    "max_str_len": 1 << 16,
    "max_bin_len": MAX_MESSAGE,
    "max_array_len": 1 << 16,
    "max_map_len": 1 << 12,
    "max_ext_len": 0,
}


class Handle(NamedTuple):
    """Where a borrowed or reserved page lies: `length` bytes at `offset` of slab `slab`. `generation` counts the
    frame's tenants, so that two pages that stood in one frame are told apart."""

    slab: int
    generation: int
    offset: int
    length: int


class Body(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Base of all bodies."""


class Open(Body):
    """Use a namespace. `probed` says that the session wrote the layout's probes into its probe memory."""

    namespace: Namespace
    digest: bytes
    fingerprint: bytes
    probed: bool = False


class Opened(Body):
    namespace: int


class Lookup(Body):
    """How long a leading run of `keys` is held. Pins nothing, refreshes nothing."""

    keys: bytes
    detail: bool = False


class Found(Body):
    """`pages` of the keys are held somewhere; with `detail`, `tiers` is the fastest tier of each, one byte a page."""

    pages: int
    tiers: bytes = b""


class Borrow(Body):
    """Lease the longest leading run of `keys` that can be had in `tier` before the deadline."""

    keys: bytes
    tier: str = "any"


class Borrowed(Body):
    """`origins` has a byte a page: index of the tier that the borrow found it in, before it brought it anywhere."""

    lease: int
    handles: bytes
    origins: bytes = b""


class Release(Body):
    """End leases (packed u64)."""

    leases: bytes


class Reserve(Body):
    """Frames for pages number `first` and on, of which `parent` is the key before; `keys` may be given at commit, and
    then, if it is not known yet (b""), `parent` too."""

    namespace: int
    tier: str
    first: int
    count: int
    parent: bytes
    keys: bytes = b""


class Reserved(Body):
    """`status` has a byte a page; `handles` one handle for each that is GRANTED. Shorter than asked: frames ran out."""

    reservation: int
    status: bytes
    handles: bytes


class Commit(Body):
    """Seal and publish reserved pages (`slots`, packed u32, counted among the granted; empty is all)."""

    reservation: int
    slots: bytes = b""
    keys: bytes = b""
    lease: bool = False
    parent: bytes = b""


class Committed(Body):
    status: bytes
    lease: int = 0


class Abort(Body):
    """Give reserved frames back unpublished."""

    reservation: int
    slots: bytes = b""


class Prefetch(Body):
    """Start bringing a leading run to `tier`; answered at once."""

    keys: bytes
    tier: str


class Pin(Body):
    """Hold a leading run in `tier` until `Unpin`, beyond the session."""

    keys: bytes
    tier: str


class Pinned(Body):
    pin: int
    pages: int


class Unpin(Body):
    pin: int


class Evict(Body):
    """Forget pages in every tier: those of `keys` and all that follow them, or all of a namespace, or all."""

    keys: bytes = b""
    namespace: bytes = b""
    everything: bool = False


class Migrate(Body):
    """Copy a leading run to `tier`, and with `move` leave it nowhere faster than that."""

    keys: bytes
    tier: str
    move: bool = False


class Resize(Body):
    tier: str
    capacity: int


class Resized(Body):
    """`allocated` may still be above `capacity` while leases hold slabs."""

    capacity: int
    allocated: int


class Drain(Body):
    """Write down what only `tier` holds and empty it; without a tier, flush all and refuse new pages."""

    tier: str = ""


class Count(Body):
    """How many pages, leases or the like the verb dealt with."""

    count: int


class Stats(Body):
    pass


class Sessions(Body):
    pass


class Inventory(Body):
    """The tenant's namespaces; with a digest, that namespace's pages from number `skip` on."""

    namespace: bytes = b""
    skip: int = 0


class Report(Body):
    """An answer for people and dashboards; its keys are documented in docs/protocol.md."""

    report: dict[str, Any]


class LogLevel(Body):
    """Log from `level` on, until the daemon ends or reloads; "" only asks."""

    level: str = ""


class LoggedAt(Body):
    """The level before."""

    level: str


class Subscribe(Body):
    """Send this channel an event for every page published or lost to the tenant."""


class Cancel(Body):
    """Take back request `request` of this session's channel `channel`."""

    channel: int
    request: int


class Ping(Body):
    pass


class Detach(Body):
    """End the session in order: all leases released, all reservations aborted."""


class Done(Body):
    pass


REQUESTS: dict[str, type[Body]] = {
    kind.__name__.lower(): kind
    for kind in (
        *(Open, Lookup, Borrow, Release, Reserve, Commit, Abort, Prefetch, Pin, Unpin, Evict, Migrate),
        *(Resize, Drain, Stats, Sessions, Inventory, LogLevel, Subscribe, Cancel, Ping, Detach),
    )
}


class Request(NamedTuple):
    """A request as it arrived, its body checked."""

    id: int
    verb: str
    timeout: float
    body: Body


class Reply(NamedTuple):
    """A reply as it arrived. `code` is "", an error's code, or "event"."""

    id: int
    epoch: int
    notices: int
    code: str
    body: Any


BodyT = TypeVar("BodyT", bound=msgspec.Struct)


def pack(value: Any) -> bytes:
    return _ENCODER.encode(value)


def fields(body: msgspec.Struct) -> tuple[Any, ...]:
    """What of `body` goes on the wire."""
    return msgspec.structs.astuple(body)


def encode_request(request_id: int, verb: str, timeout: float, body: Body) -> bytes:
    if verb == "open":
        return pack((VERSION, request_id, verb, timeout, msgspec.to_builtins(body, builtin_types=(bytes,))))
    return pack((VERSION, request_id, verb, timeout, fields(body)))


def decode_request(data: bytes) -> Request:
    """Raises ProtocolError; its `request_id` attribute is the id if that much could be read, else 0."""
    parts = unpack(data)
    request_id = 0
    try:
        if not isinstance(parts, list) or not parts:
            raise ProtocolError("a request is a non-empty array")
        if type(parts[0]) is not int or parts[0] != VERSION:
            raise ProtocolError(
                f"this daemon speaks version {VERSION} and was sent {_brief(parts[0])}; use a client of the same release"
            )
        if len(parts) != 5:
            raise ProtocolError(f"a request has 5 parts, this one {len(parts)}")
        _, number, verb, timeout, body = parts
        if type(number) is int and 0 <= number < 1 << 63:
            request_id = number
        else:
            raise ProtocolError("the request id must be an integer from 0 to 2**63 - 1")
        if type(timeout) not in (int, float) or not 0 <= timeout <= MAX_TIMEOUT:
            raise ProtocolError(f"the timeout must be a number of seconds from 0 to {MAX_TIMEOUT:.0f}")
        kind = REQUESTS.get(verb) if isinstance(verb, str) else None
        if kind is None:
            raise ProtocolError(f"no verb {_brief(verb)}; there are {', '.join(REQUESTS)}")
        return Request(request_id, verb, timeout, convert(body, kind))
    except KvtierError as error:
        error.request_id = request_id
        raise


def encode_reply(request_id: int, epoch: int, notices: int, code: str, body: Any) -> bytes:
    return pack((VERSION, request_id, epoch, notices, code, body))


def decode_reply(data: bytes) -> Reply:
    """Of the daemon, which is trusted: faster than `unpack`, without its limits. Raises ProtocolError."""
    try:
        parts = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"a reply that cannot be decoded: {error!s:.200}") from error
    if not isinstance(parts, list) or len(parts) != 6 or type(parts[0]) is not int or parts[0] != VERSION:
        raise ProtocolError(f"a reply of another version than {VERSION}; use a client of the daemon's release")
    return Reply(*parts[1:])


def unpack(data: bytes) -> Any:
    """Any message. Raises ProtocolError for one that is too large, too deep, cut short or no msgpack."""
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(f"a message of {len(data)} bytes; the limit is {MAX_MESSAGE}: send fewer keys at once")
    try:
        return msgpack.unpackb(data, **_LIMITS)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise ProtocolError(f"a message that cannot be decoded: {reason:.200}") from error


def convert(value: Any, kind: type[BodyT]) -> BodyT:
    """`value` as a `kind`. Raises ProtocolError naming the field that is wrong."""
    try:
        return msgspec.convert(value, kind, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise ProtocolError(f"{kind.__name__.lower()}: {error}") from error


def _brief(value: Any) -> str:
    """For an error message: what was sent, or only its type where it is nested (its repr might not end well)."""
    return f"{value!r:.40}" if isinstance(value, (str, int, float, bytes, bool, type(None))) else type(value).__name__


pack_handle: Callable[[int, int, int, int], bytes] = _HANDLE.pack
"""Of a `Handle`'s fields. Those of a run are joined."""


def unpack_handles(packed: bytes) -> list[Handle]:
    return [Handle(*handle) for handle in _HANDLE.iter_unpack(packed)]


def pack_u64(numbers: Iterable[int]) -> bytes:
    return b"".join([_U64.pack(number) for number in numbers])


def unpack_u64(packed: bytes) -> list[int]:
    if len(packed) % 8:
        raise InvalidRequest(f"a packed list of 64-bit numbers has {len(packed)} bytes: not a multiple of 8")
    return [number for (number,) in _U64.iter_unpack(packed)]


def pack_u32(numbers: Iterable[int]) -> bytes:
    numbers = list(numbers)
    return struct.pack(f"<{len(numbers)}I", *numbers)


def unpack_u32(packed: bytes) -> list[int]:
    if len(packed) % 4:
        raise InvalidRequest(f"a packed list of 32-bit numbers has {len(packed)} bytes: not a multiple of 4")
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


# The attach socket: a unix stream; each message is a 4-byte little-endian length and a msgpack array
# [kind, *fields], with file descriptors beside it (SCM_RIGHTS) where said.

MAX_ATTACH_MESSAGE = 1 << 16
ATTACH_HEADER = struct.Struct("<I")


class Hello(Body):
    """Client: open a session. `read_only` sessions get slabs that cannot be mapped for writing. `device` is the UUID
    of the GPU that it works on; without, it is lent no GPU memory."""

    version: int
    name: str = ""
    read_only: bool = False
    device: str = ""


class Welcome(Body):
    """Daemon: the session is open. `token` goes into routing ids; `router` is the path to speak verbs at; of each tier,
    its name, its medium and, if that is a GPU, the UUID."""

    session: int
    token: bytes
    epoch: int
    router: str
    tenant: str
    tiers: list[tuple[str, str, str]]


class WantSlab(Body):
    """Client: the descriptor of a slab of this tenant, please."""

    slab: int


class SlabIs(Body):
    """Daemon: a slab of `nbytes` in `tier`: with a descriptor beside it (a memfd to map), or a CUDA IPC handle in it."""

    slab: int
    tier: int
    nbytes: int
    handle: bytes = b""


class WantPresence(Body):
    """Client: the presence table of this tenant, please: when it has none, and when the one it has was replaced."""


class PresenceIs(Body):
    """Daemon: the table (`kvtier.presence`) is `nbytes` of memory, whose descriptor is beside it. 0, and none beside it:
    there is none just now, ask with `lookup`."""

    nbytes: int


class WantProbe(Body):
    """Client: a memory of `nbytes` to write a layout's probes into."""

    nbytes: int


class ProbeIs(Body):
    """Daemon: `nonce` is to be written at each probe of the layout; one descriptor beside it."""

    nonce: bytes


class Retire(Body):
    """Daemon: unmap this slab when nothing uses it, and say so."""

    slab: int


class Dropped(Body):
    """Client: that slab is unmapped."""

    slab: int


class Refused(Body):
    """Daemon: an error; after a failed hello the socket is closed."""

    code: str
    message: str


ATTACH: dict[str, type[Body]] = {
    kind.__name__.lower(): kind
    for kind in (
        *(Hello, Welcome, WantSlab, SlabIs, WantPresence, PresenceIs, WantProbe, ProbeIs, Retire, Dropped, Refused),
    )
}


def encode_attach(body: Body) -> bytes:
    """With its length before it."""
    data = pack((type(body).__name__.lower(), *fields(body)))
    return ATTACH_HEADER.pack(len(data)) + data


def decode_attach(data: bytes) -> Body:
    """Of one message without its length. Raises ProtocolError."""
    parts = unpack(data)
    if not isinstance(parts, list) or not parts or not isinstance(parts[0], str) or parts[0] not in ATTACH:
        raise ProtocolError("an attach message is an array that starts with its kind")
    return convert(parts[1:], ATTACH[parts[0]])
