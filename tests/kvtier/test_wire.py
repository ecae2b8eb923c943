"""Messages: what is sent arrives, and whatever else arrives is a KvtierError and nothing worse."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier import wire
from kvtier.errors import InvalidRequest, KvtierError, ProtocolError, from_code
from kvtier.keys import Namespace
from kvtier.layout import AttentionLayout, LatentLayout

SPACE = Namespace(layout=AttentionLayout(layers=2, kv_heads=3, head_dim=64), model="m", extra={"b": "1", "a": "2"})
KEY = bytes(range(16))
BODIES: list[wire.Body] = [
    wire.Open(SPACE, SPACE.digest(), SPACE.layout.fingerprint(), True),
    wire.Open(Namespace(layout=LatentLayout(layers=2), model="mla"), KEY, KEY),
    wire.Lookup(KEY * 3, True),
    wire.Borrow(KEY, "host"),
    wire.Release(wire.pack_u64([1, 2**64 - 1])),
    wire.Reserve(1, "host", 2, 3, KEY, KEY * 3),
    wire.Commit(7, wire.pack_u32([0, 2]), KEY * 2, True),
    wire.Abort(7),
    wire.Prefetch(KEY, "host"),
    wire.Pin(KEY, "host"),
    wire.Unpin(4),
    wire.Evict(KEY, b"", False),
    wire.Migrate(KEY, "ssd", True),
    wire.Resize("host", 1 << 40),
    wire.Drain("host"),
    wire.Stats(),
    wire.Sessions(),
    wire.Inventory(KEY, 5),
    wire.LogLevel("debug"),
    wire.Subscribe(),
    wire.Cancel(3, 9),
    wire.Ping(),
    wire.Detach(),
]


def test_every_verb_is_tried_here() -> None:
    assert {type(body).__name__.lower() for body in BODIES} == set(wire.REQUESTS)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_requests_arrive_as_sent(body: wire.Body) -> None:
    verb = type(body).__name__.lower()
    data = wire.encode_request(42, verb, 1.5, body)
    assert wire.decode_request(data) == wire.Request(42, verb, 1.5, body)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_every_cut_and_every_wrong_byte_is_an_error_or_a_request(body: wire.Body) -> None:
    data = wire.encode_request(42, type(body).__name__.lower(), 1.5, body)
    for length in range(len(data)):
        with pytest.raises(ProtocolError):
            wire.decode_request(data[:length])
    for at in range(len(data)):
        for other in (0x00, 0x7F, 0x80, 0xC0, 0xC1, 0xD9, 0xDF, 0xFF):
            _decode(data[:at] + bytes([other]) + data[at + 1 :])


def _decode(data: bytes) -> wire.Request | KvtierError:
    try:
        return wire.decode_request(data)
    except KvtierError as error:
        assert len(str(error)) < 2000, "an error must not send back what was sent"
        return error


def nested(depth: int) -> Any:
    return msgpack.packb(None) if not depth else b"\x91" * depth + b"\xc0"


def request(*parts: Any) -> bytes:
    return bytes(msgpack.packb(parts))


MALFORMED = {
    "empty": b"",
    "not msgpack": b"\xc1",
    "text": b"GET / HTTP/1.1\r\n",
    "2,000 deep": nested(2000),
    "1,010 deep": nested(1010),
    "1,010 deep for a version": b"\x95" + nested(1010) + request(1, "ping", 1.0, [])[1:],
    "1,010 deep for a verb": b"\x95\x01\x01" + nested(1010) + b"\x01\x90",
    "1,010 deep for an id": b"\x95\x01" + nested(1010) + b"\xa4ping\x01\x90",
    "1,010 deep for a timeout": b"\x95\x01\x01\xa4ping" + nested(1010) + b"\x90",
    "1,010 deep for a body": b"\x95\x01\x01\xa4ping\x01" + nested(1010),
    "array of 2**32-1": b"\xdd\xff\xff\xff\xff",
    "map of 2**32-1": b"\xdf\xff\xff\xff\xff",
    "bytes of 2**32-1": b"\xc6\xff\xff\xff\xff",
    "text of 2**32-1": b"\xdb\xff\xff\xff\xff",
    "extension": msgpack.packb(msgpack.ExtType(5, b"x" * 64)),
    "empty extension": b"\xc7\x00\x05",
    "timestamp": msgpack.packb(msgpack.Timestamp(1, 2)),
    "bad utf-8": b"\xa2\xff\xfe",
    "map": msgpack.packb({"verb": "ping"}),
    "map with a list for a key": b"\x81\x91\x01\x01",
    "number": b"\x01",
    "trailing": request(1, 1, "ping", 1.0, []) + b"\x00",
    "wrong version": request(2, 1, "ping", 1.0, []),
    "version true": request(True, 1, "ping", 1.0, []),
    "version 1.0": request(1.0, 1, "ping", 1.0, []),
    "too few parts": request(1, 1, "ping", 1.0),
    "too many parts": request(1, 1, "ping", 1.0, [], 0),
    "negative id": request(1, -1, "ping", 1.0, []),
    "id of 2**63": request(1, 1 << 63, "ping", 1.0, []),
    "id true": request(1, True, "ping", 1.0, []),
    "unknown verb": request(1, 1, "pickle", 1.0, []),
    "dunder verb": request(1, 1, "__class__", 1.0, []),
    "negative timeout": request(1, 1, "ping", -1.0, []),
    "timeout nan": request(1, 1, "ping", float("nan"), []),
    "timeout inf": request(1, 1, "ping", float("inf"), []),
    "a day's timeout": request(1, 1, "ping", 86400.0, []),
    "surplus field": request(1, 1, "ping", 1.0, [1]),
    "missing field": request(1, 1, "lookup", 1.0, []),
    "wrong type": request(1, 1, "lookup", 1.0, [["a"]]),
    "text for bytes": request(1, 1, "lookup", 1.0, ["x" * 16]),
    "body a map": request(1, 1, "lookup", 1.0, {"keys": b""}),
    "layout unknown": request(1, 1, "open", 1.0, [{"layout": {"type": "os.system"}, "model": "m"}, b"", b""]),
    "layout impossible": request(
        *(1, 1, "open", 1.0),
        [{"layout": {"type": "attention", "layers": -1, "kv_heads": 1, "head_dim": 1}, "model": "m"}, b"", b""],
    ),
    "rank above size": request(
        *(1, 1, "open", 1.0),
        [
            {
                "layout": {"type": "attention", "layers": 1, "kv_heads": 1, "head_dim": 64},
                "model": "m",
                "tp_rank": 3,
            },
            *(b"", b""),
        ],
    ),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_requests(what: str) -> None:
    with pytest.raises(KvtierError) as caught:
        wire.decode_request(MALFORMED[what])
    assert 0 < len(str(caught.value)) < 1000


def test_an_oversized_message_is_refused_by_its_length() -> None:
    with pytest.raises(ProtocolError, match="send fewer keys at once"):
        wire.decode_request(bytes(wire.MAX_MESSAGE + 1))


def test_an_error_carries_the_request_id_where_one_was_read() -> None:
    for data, wanted in [(request(1, 77, "nothing", 1, []), 77), (request(1, "x", "ping", 1, []), 0)]:
        with pytest.raises(ProtocolError) as caught:
            wire.decode_request(data)
        assert caught.value.request_id == wanted


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "owned"),))

    bomb = pickle.dumps(Bomb())
    for data in (bomb, request(1, 1, "lookup", 1.0, [bomb]), request(1, 1, "ping", 1.0, bomb)):
        _decode(data)
    with pytest.raises(KvtierError):
        wire.decode_attach(bomb)
    assert not list(tmp_path.iterdir())


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=20) | st.binary(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.binary(max_size=200))
def test_random_bytes_are_no_worse_than_an_error(data: bytes) -> None:
    _decode(data)
    for decode in (wire.decode_reply, wire.decode_attach):
        try:
            decode(data)
        except KvtierError:
            pass


@given(st.lists(values, max_size=7))
@example([1, 1, "open", 1.0, [{"layout": {}}, b"", b""]])
def test_random_values_are_no_worse_than_an_error(parts: list[Any]) -> None:
    _decode(msgpack.packb(parts))


@given(st.sampled_from(sorted(wire.REQUESTS)), st.lists(values, max_size=7))
def test_random_bodies_are_no_worse_than_an_error(verb: str, body: list[Any]) -> None:
    _decode(request(1, 5, verb, 1.0, body))


@given(st.dictionaries(st.sampled_from(["layout", "model", "tp_rank", "cap_tokens", "extra"]), values), values)
def test_random_namespaces_are_no_worse_than_an_error(fields: dict[str, Any], layout: Any) -> None:
    full = {"layout": {"type": "attention", "layers": 1, "kv_heads": 1, "head_dim": 64}, "model": "m"} | fields
    _decode(request(1, 5, "open", 1.0, [full, b"", b""]))
    _decode(request(1, 5, "open", 1.0, [full | {"layout": layout}, b"", b""]))


def test_replies_arrive_as_sent() -> None:
    reply = wire.decode_reply(wire.encode_reply(3, 2**62, 4, "", wire.fields(wire.Borrowed(9, b"xy"))))
    assert reply[:4] == (3, 2**62, 4, "")
    assert wire.convert(reply.body, wire.Borrowed) == wire.Borrowed(9, b"xy")


@pytest.mark.parametrize(
    "body",
    [
        *(wire.Hello(1, "n", True), wire.Welcome(1, b"t", 2, "/r", "uid:0", [("host", "host", "")]), wire.WantSlab(4)),
        *(wire.SlabIs(4, 0, 1 << 30), wire.WantProbe(4096), wire.ProbeIs(KEY), wire.Retire(2), wire.Dropped(2)),
        wire.Refused("invalid", "no"),
    ],
    ids=lambda body: type(body).__name__,
)
def test_attach_messages_arrive_as_sent(body: wire.Body) -> None:
    data = wire.encode_attach(body)
    (size,) = wire.ATTACH_HEADER.unpack_from(data)
    assert size == len(data) - wire.ATTACH_HEADER.size
    assert wire.decode_attach(data[wire.ATTACH_HEADER.size :]) == body


@given(st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 2, *[st.integers(0, 2**64 - 1)] * 2)))
def test_packed_handles(handles: list[tuple[int, int, int, int]]) -> None:
    assert wire.unpack_handles(b"".join(wire.pack_handle(*handle) for handle in handles)) == handles


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_packed_numbers(numbers: list[int]) -> None:
    assert wire.unpack_u32(wire.pack_u32(numbers)) == numbers == wire.unpack_u64(wire.pack_u64(numbers))


@pytest.mark.parametrize("unpack", [wire.unpack_u32, wire.unpack_u64])
def test_packed_numbers_cut_short(unpack: Any) -> None:
    with pytest.raises(InvalidRequest, match="not a multiple"):
        unpack(struct.pack("<QQ", 1, 2)[:-1])


def test_errors_travel_by_code() -> None:
    classes = {KvtierError} | set(KvtierError.__subclasses__())
    own = {one for one in classes if one.__module__ == "kvtier.errors"}
    assert len({one.code for one in own}) == len(own)
    for one in own:
        assert type(from_code(one.code, "text")) is one
    assert type(from_code("of a later version", "text")) is KvtierError
