"""The client's way to the daemon's verbs: DEALER sockets, each carrying one request at a time.

A client has a pool of channels. A call takes one, sends, waits, and puts it back; so threads never wait for each other
and a late answer can only meet its own question.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import zmq

from kvtier import wire
from kvtier.errors import DaemonLost, DeadlineExceeded, from_code

_SLICE = 100
"""Milliseconds between two looks at whether the daemon still lives."""
_GRACE = 2.0
"""Seconds past a request's deadline after which its answer is given up; the daemon answers by the deadline."""


class Channel:
    """One DEALER socket; its routing id is the session's token and the channel's number."""

    def __init__(self, context: zmq.Context[Any], router: str, token: bytes, number: int, epoch: int) -> None:
        self.number = number
        self.token = token
        self.epoch = epoch
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, token + number.to_bytes(4, "little"))
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"ipc://{router}")
        self.request = 0
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self.received: list[bytes] = []
        """What answered the last request, once it is here: a call may be interrupted just then."""

    def send(self, verb: str, timeout: float, body: wire.Body) -> int:
        """Send a request; its number."""
        self.request += 1
        self.received.clear()
        self.socket.send(wire.encode_request(self.request, verb, timeout, body))
        return self.request

    def receive(self, timeout: float, alive: Callable[[], bool]) -> wire.Reply:
        """The answer to the last request. Raises the error that it is, DaemonLost when the daemon is gone or another,
        DeadlineExceeded when nothing came though it lives (the channel is of no more use then)."""
        give_up = time.monotonic() + timeout + _GRACE
        while True:
            try:
                # Waited for apart: a signal often comes with the answer, and a receive that is interrupted loses it.
                self._poller.poll(_SLICE)
                self.received.append(self.socket.recv(zmq.NOBLOCK))
                reply = wire.decode_reply(self.received[-1])
            except zmq.Again:
                if not alive():
                    raise DaemonLost("kvtierd hung up: every handle is void, treat all as a miss") from None
                if time.monotonic() > give_up:
                    raise DeadlineExceeded(f"kvtierd lives but did not answer within {timeout:.1f} s") from None
                continue
            if reply.epoch != self.epoch:
                raise DaemonLost("kvtierd was restarted: every handle is void, treat all as a miss")
            if reply.id not in (0, self.request) or reply.code == "event":
                self.received.clear()
                continue
            if reply.code:
                raise from_code(reply.code, str(reply.body))
            return reply

    def close(self) -> None:
        self.socket.close(0)
