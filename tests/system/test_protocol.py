"""What arrives that should not: it costs its sender alone, and everyone else is answered as if nothing had been."""

from __future__ import annotations

import os
import pickle
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvtier import wire
from kvtier_client import Client
from tests.kvtier.test_wire import MALFORMED
from tests.system.conftest import PATIENCE, Daemon, MakeDaemon, eventually
from tests.system.pages import chain, put, read


@pytest.fixture
def raw(daemon: Daemon) -> Iterator[zmq.Socket[bytes]]:
    """A socket of a session of its own, on which a test can say what it likes."""
    context: zmq.Context[Any] = zmq.Context()
    dealer = dealer_of(context, daemon.client())
    yield dealer
    dealer.close(0)
    context.term()


def dealer_of(context: zmq.Context[Any], client: Client, number: int = 9999) -> zmq.Socket[bytes]:
    attachment = client.current()
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, attachment.token + number.to_bytes(4, "little"))
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
    dealer.setsockopt(zmq.SNDHWM, 0)
    dealer.setsockopt(zmq.RCVHWM, 1)  # so that little hides in libzmq's own queues
    dealer.connect(f"ipc://{attachment.router}")
    return dealer


def ping(dealer: zmq.Socket[bytes], number: int = 7) -> wire.Reply:
    dealer.send(wire.encode_request(number, "ping", 1.0, wire.Ping()))
    return wire.decode_reply(dealer.recv())


def test_malformed_requests_get_an_error_and_the_next_valid_one_its_answer(
    daemon: Daemon, raw: zmq.Socket[bytes]
) -> None:
    for what, data in MALFORMED.items():
        raw.send(data)
        assert wire.decode_reply(raw.recv()).code in ("protocol", "invalid", "layout"), what
        assert ping(raw).code == ""
    raw.send_multipart([b"a", b"b", wire.encode_request(1, "ping", 1.0, wire.Ping())])
    assert wire.decode_reply(raw.recv()).code == "protocol"
    raw.send(bytes(wire.MAX_MESSAGE + 1))
    assert wire.decode_reply(raw.recv()).code == "protocol"
    assert ping(raw).code == ""
    assert daemon.client().stats()["counters"]["protocol_errors"] >= len(MALFORMED) + 2


def test_requests_that_make_no_sense(raw: zmq.Socket[bytes]) -> None:
    key = bytes(16)
    bodies: list[tuple[str, list[Any]]] = [
        ("lookup", [b"x" * 17, False]),
        ("borrow", [key, "nowhere"]),
        ("release", [b"123"]),
        ("release", [struct.pack("<Q", 5)]),
        ("reserve", [12345, "host", 0, 1, key, b""]),
        ("commit", [12345, b"", b"", False]),
        ("abort", [12345, b""]),
        ("prefetch", [key, "nowhere"]),
        ("unpin", [-1]),
        ("evict", [b"", key, False]),
        ("resize", ["host", -1]),
        ("inventory", [b"", -1]),
        ("cancel", [-1, 1]),
        ("cancel", [1 << 40, 1]),
    ]
    for number, (verb, body) in enumerate(bodies, 100):
        raw.send(wire.pack((wire.VERSION, number, verb, 0.1, body)))
        reply = wire.decode_reply(raw.recv())
        assert reply.id == number and reply.code in ("invalid", "stale_handle", "not_open"), (verb, body, reply)


def test_random_messages_disturb_nobody(daemon: Daemon, raw: zmq.Socket[bytes]) -> None:
    space = daemon.space()
    keys = chain(space, 1, 20)
    put(space, keys)
    dice = random.Random(5)
    valid = [wire.encode_request(3, verb, 0.01, body) for verb, body in _bodies()]
    for turn in range(1500):
        data = bytearray(dice.choice(valid))
        for _ in range(dice.randrange(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        raw.send(dice.randbytes(dice.randrange(64)) if turn % 7 == 0 else bytes(data))
        if turn % 100 == 0:
            assert read(space, keys) == 20
    eventually(lambda: ping_until(raw, 424242), "the daemon still answers this very socket")
    assert read(space, keys) == 20


def ping_until(dealer: zmq.Socket[bytes], number: int) -> bool:
    dealer.send(wire.encode_request(number, "ping", 1.0, wire.Ping()))
    while True:
        if wire.decode_reply(dealer.recv()).id == number:
            return True


def _bodies() -> list[tuple[str, wire.Body]]:
    key = bytes(range(16))
    return [
        ("lookup", wire.Lookup(key * 4, True)),
        ("borrow", wire.Borrow(key * 2)),
        ("reserve", wire.Reserve(1, "host", 0, 2, key, key * 2)),
        ("commit", wire.Commit(7, b"", key, True)),
        ("stats", wire.Stats()),
        ("subscribe", wire.Subscribe()),
        ("cancel", wire.Cancel(3, 9)),
    ]


def test_a_stranger_without_a_token_is_told_to_attach(daemon: Daemon) -> None:
    context: zmq.Context[Any] = zmq.Context()
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
    dealer.connect(f"ipc://{daemon.runtime}/verbs.sock")
    try:
        assert ping(dealer).code == "not_attached"
    finally:
        dealer.close(0)
        context.term()


def test_bad_attach_messages_cost_their_connection(daemon: Daemon) -> None:
    client = daemon.client()
    hello = wire.encode_attach(wire.Hello(wire.VERSION))
    for data in (
        *(
            b"\xff" * 64,
            struct.pack("<I", 5) + b"\xc1" * 5,
            struct.pack("<I", 2000) + b"\x91" * 2000,
            b"GET / HTTP/1.1\r\n",
        ),
        *(hello * 2, wire.encode_attach(wire.Hello(99)), wire.encode_attach(wire.WantSlab(1)), pickle.dumps(hello)),
        *(
            hello + wire.encode_attach(wire.WantProbe(1 << 60)),
            hello + wire.encode_attach(wire.Welcome(1, b"", 1, "", "", [])),
        ),
        *(struct.pack("<I", 100) + b"cut", b""),
    ):
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(daemon.runtime / "attach.sock"))
            peer.sendall(data)
            if data[:4] != struct.pack("<I", 100) and data:
                peer.settimeout(PATIENCE)
                while peer.recv(4096):
                    pass
        assert client.ping() < PATIENCE
    eventually(lambda: client.stats()["daemon"]["sessions"] == 1, "none of them left a session")
    with socket.socket(socket.AF_UNIX) as peer:  # one byte at a time is as good as all at once
        peer.connect(str(daemon.runtime / "attach.sock"))
        for byte in hello:
            peer.send(bytes([byte]))
        (size,) = struct.unpack("<I", peer.recv(4, socket.MSG_WAITALL))
        assert isinstance(wire.decode_attach(peer.recv(size, socket.MSG_WAITALL)), wire.Welcome)


def test_nobody_takes_a_slab_away_from_under_the_daemon(daemon: Daemon) -> None:
    space = daemon.space()
    keys = chain(space, 1, 8)
    put(space, keys)
    attachment = space.client.current()
    with attachment.lock:
        attachment._ask(wire.WantSlab(next(iter(attachment.slabs))), wire.SlabIs)
        fd = attachment._fds.pop()
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)
    assert read(daemon.space(), keys) == 8


def test_a_pickle_runs_nothing(daemon: Daemon, raw: zmq.Socket[bytes], place: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(place / "owned"),))

    bomb = pickle.dumps(Bomb())
    raw.send(bomb)
    assert wire.decode_reply(raw.recv()).code == "protocol"
    raw.send(wire.pack((wire.VERSION, 1, "evict", 1.0, [bomb[: len(bomb) // 16 * 16], b"", False])))
    raw.recv()
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(daemon.runtime / "attach.sock"))
        peer.sendall(struct.pack("<I", len(bomb)) + bomb)
        peer.settimeout(PATIENCE)
        while peer.recv(4096):
            pass
    assert ping(raw).code == ""
    assert not (place / "owned").exists()


def test_no_listener_beyond_this_machine(daemon: Daemon) -> None:
    assert daemon.process is not None
    inodes = set()
    for entry in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        target = os.readlink(entry)
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[9] in inodes:
                assert words[1].startswith("0100007F:") or words[1].startswith("00000000000000000000000001000000:"), (
                    line
                )


def test_a_late_reader_gets_every_reply(daemon: Daemon, raw: zmq.Socket[bytes]) -> None:
    for number in range(5000):
        raw.send(wire.encode_request(number, "stats", 5.0, wire.Stats()))  # some KiB each
    other = daemon.client()
    eventually(  # meanwhile others are served
        lambda: max(session["requests"] for session in other.sessions()["sessions"]) == 5000, "all are answered"
    )
    assert [wire.decode_reply(raw.recv()).id for _ in range(5000)] == list(range(5000))


def test_a_reader_that_never_reads_loses_its_session_and_nothing_else(make: MakeDaemon) -> None:
    daemon = make().start(most_unread=1 << 16)
    space = daemon.space()
    keys = chain(space, 1, 40)
    put(space, keys)
    client = daemon.client()
    context: zmq.Context[Any] = zmq.Context()
    dealer = dealer_of(context, client)
    listener = dealer_of(context, client, 5)
    try:
        listener.send(wire.encode_request(1, "subscribe", 5.0, wire.Subscribe()))
        for number in range(1, 40000):
            dealer.send(wire.encode_request(number, "lookup", 5.0, wire.Lookup(b"".join(keys), True)))
        eventually(lambda: space.client.stats()["daemon"]["sessions"] == 1, "the session is ended")
    finally:
        dealer.close(0)
        listener.close(0)
        context.term()
    assert "unread" in daemon.log
    space.evict()
    put(space, keys)
    assert read(space, keys) == 40


def test_a_subscriber_that_never_reads_stops_no_commit(make: MakeDaemon) -> None:
    daemon = make(host="16MiB").start(most_unread=1 << 12)
    space = daemon.space()
    context: zmq.Context[Any] = zmq.Context()
    listeners = [dealer_of(context, daemon.client()) for _ in range(3)]
    try:
        for listener in listeners:
            listener.send(wire.encode_request(1, "subscribe", 5.0, wire.Subscribe()))
            listener.recv()
        for seed in range(150):
            keys = chain(space, seed, 40)
            put(space, keys)
            assert read(space, keys) == 40
            if seed % 10 == 9:
                space.evict()
    finally:
        for listener in listeners:
            listener.close(0)
        context.term()


def test_one_number_for_two_requests_under_way(make: MakeDaemon) -> None:
    """The first must not be forgotten: what it is granted later would be held by nobody."""
    daemon = make(host="1MiB").start()
    space = daemon.space()
    context: zmq.Context[Any] = zmq.Context()
    client = daemon.client()
    dealer = dealer_of(context, client)
    full = [space.reserve_ahead(0, 30, timeout=0.2) for _ in range(9)]  # more than there is
    try:
        opened = client.namespace(space.spec.layout, model="model")
        body = wire.Reserve(opened._open(client.current()), "host", 0, 4, opened.seed)
        for _ in range(2):
            dealer.send(wire.encode_request(1, "reserve", 20.0, body))
        assert wire.decode_reply(dealer.recv()).code == "protocol"
        client.close()
        eventually(lambda: space.client.stats()["daemon"]["sessions"] == 1, "the session ended")
    finally:
        dealer.close(0)
        context.term()
    for reservation in full:
        reservation.abort()
    tier = space.client.stats()["tiers"][0]
    assert tier["reserved_bytes"] == 0, "a request of an ended session was granted"


def test_a_client_leaves_at_once_when_the_daemon_is_gone(daemon: Daemon) -> None:
    code = f"""
import os, sys, time
from kvtier_client import Client
from tests.system.pages import *
client = Client({daemon.endpoint!r})
space = open_space(client)
keys = chain(space, 1, 4)
put(space, keys)
os.kill(int(sys.argv[1]), 9)
pending = [space.submit_borrow(keys, timeout=60) for _ in range(10)]
print(time.time(), flush=True)
"""
    assert daemon.process is not None
    done = subprocess.run(
        [sys.executable, "-c", code, str(daemon.process.pid)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([".", "daemon", "client", "kernels"])},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert time.time() - float(done.stdout) < 1.0
    assert not done.stderr, done.stderr
    daemon.process.wait()
