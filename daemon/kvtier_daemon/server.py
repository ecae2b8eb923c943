"""Verbs over ZeroMQ: a ROUTER that answers every request exactly once.

A client's sockets carry its session's secret token in their routing ids, followed by the channel's number; that is how
a request is known to be of a session, and why nothing else in a message has to say so. Replies that a slow reader does
not take are kept for it, in order, up to a bound; a reader that passes it loses its session. Nothing that arrives can
cost anyone but its sender.
Not here: what the verbs do (`kvtier_daemon.verbs`).
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

import zmq

from kvtier import wire
from kvtier.errors import KvtierError, NotAttached, ProtocolError
from kvtier_daemon import logs
from kvtier_daemon.attach import clear_socket
from kvtier_daemon.counters import Counters
from kvtier_daemon.operations import Operation
from kvtier_daemon.sessions import Session, Sessions
from kvtier_daemon.verbs import Verbs

log = logging.getLogger(__name__)

_HARD_LIMIT = 4 * wire.MAX_MESSAGE
"""Bytes above which libzmq drops a message with its connection, before it takes the memory."""
_MOST_UNREAD = 64 << 20
"""Bytes of replies kept for one session."""
_MOMENT = 100e-6
"""Seconds for which the ROUTER is watched after a reply before the thread sleeps."""
_NOW, _NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK) | int(zmq.SNDMORE)
_EVENTS, _MORE, _READABLE = int(zmq.EVENTS), int(zmq.RCVMORE), int(zmq.POLLIN)
_AT_ONCE = 64
"""Requests served before other events get their turn."""
_PATIENT = ("drain", "resize")
"""Verbs that take as long as the operator who asked is ready to wait."""


class Server:
    """Owns the ROUTER socket, the requests that wait, and their deadlines."""

    def __init__(self, context: zmq.Context[Any], path: Path, epoch: int, sessions: Sessions, verbs: Verbs) -> None:
        self.epoch = epoch
        self.path = path
        self.sessions = sessions
        self.verbs = verbs
        self.counters: Counters = sessions.store.counters
        self.router = context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.setsockopt(zmq.MAXMSGSIZE, _HARD_LIMIT)
        clear_socket(path)
        self.router.bind(f"ipc://{path}")
        os.chmod(path, 0o660)
        self.slow = 1.0
        """Seconds after which a request is worth a line in the log."""
        self.deadlines: list[tuple[float, int, Operation]] = []
        self._order = itertools.count()
        self.unread: dict[bytes, deque[tuple[bytes, Any]]] = {}
        """What a channel did not take yet: messages, each with the result that it tells of."""
        self.unread_bytes: dict[int, int] = {}
        self.overdue: set[int] = set()
        """Sessions that leave too much unread; ended between requests, since ending one changes what a verb works on."""

    def serve(self) -> None:
        """Serve what has arrived, and what arrives just after it."""
        receive, router = self.router.recv, self.router
        for _ in range(_AT_ONCE):
            try:
                frames = [receive(_NOW)]
            except zmq.Again:
                return
            while router.get(_MORE):
                frames.append(receive(_NOW))
            self._request(frames)
            if not self._more():
                return

    def _more(self) -> bool:
        """Whether another request is here, or comes within a moment in which nothing else is to be done: a client that
        asks again at once is then not made to wait for this thread to be woken."""
        get = self.router.get
        until = time.monotonic() + _MOMENT
        while not get(_EVENTS) & _READABLE:
            if self.sessions.store.jobs or time.monotonic() > until:
                return False
        return True

    def expire(self) -> None:
        """End the operations whose deadline has come."""
        now = time.monotonic()
        while self.deadlines and (self.deadlines[0][0] <= now or self.deadlines[0][2].done):
            operation = heapq.heappop(self.deadlines)[2]
            if not operation.done:
                operation.expire()

    def next_deadline(self) -> float | None:
        return self.deadlines[0][0] if self.deadlines else None

    def flush(self) -> None:
        """End the sessions that read far too little; try again to deliver what slow readers did not take."""
        for session_id in self.overdue:
            late = self.sessions.by_id.get(session_id)
            if late is not None:
                log.warning(
                    "session %d (%s) leaves %d bytes of replies unread; it is ended",
                    *(late.id, late.name, self.unread_bytes[late.id]),
                    extra=logs.fields(session=late.id, pid=late.pid, tenant=late.tenant.name),
                )
                self.sessions.end(late, clean=False, alive=True)
            self.unread_bytes.pop(session_id, None)
        self.overdue.clear()
        for identity in list(self.unread):
            queue = self.unread[identity]
            session = self.sessions.by_token.get(identity[: wire.TOKEN_BYTES])
            while queue:
                data, result = queue[0]
                if session is not None:
                    if not self._deliver(identity, data):
                        break
                    self.unread_bytes[session.id] -= len(data)
                    if not self._delivered:
                        self._take_back(session, result)
                queue.popleft()
            if not queue:
                del self.unread[identity]
                if session is not None and not self.unread_bytes[session.id]:
                    del self.unread_bytes[session.id]

    def event(self, session: Session, identity: bytes, body: Any) -> None:
        """Send a subscriber something unasked; one whose channel is gone is a subscriber no more."""
        data = wire.encode_reply(0, self.epoch, session.notices, "event", body)
        if not self._send(session, identity, data, None):
            self.sessions.subscribers.pop(identity, None)

    def close(self) -> None:
        self.router.close(0)
        self.path.unlink(missing_ok=True)

    def _request(self, frames: list[bytes]) -> None:
        started = time.monotonic()
        identity = frames[0]
        session = self.sessions.by_token.get(identity[: wire.TOKEN_BYTES])
        if session is None:
            self._reply(None, identity, 0, NotAttached("no session has this routing id; attach first (or again)"))
            return
        session.requests += 1
        try:
            if len(frames) != 2:
                raise ProtocolError(f"a request is one frame, this one has {len(frames) - 1}")
            request = wire.decode_request(frames[1])
        except KvtierError as error:
            self.counters.protocol_errors += 1
            self._reply(session, identity, error.request_id, error)
            return

        if (identity, request.id) in session.operations:  # two answers to one number, and the first forgotten
            self.counters.protocol_errors += 1
            twice = ProtocolError(f"request {request.id} of this channel is under way; number requests upwards")
            self._reply(session, identity, request.id, twice)
            return

        def answer(result: wire.Body | KvtierError) -> None:
            seconds = time.monotonic() - started
            operation = session.operations.pop((identity, request.id), None)
            self.counters.took(request.verb, seconds)
            if seconds > self.slow and request.verb not in _PATIENT:
                self._slow(session, request, seconds, operation, result)
            elif log.isEnabledFor(logging.DEBUG):
                code = result.code if isinstance(result, KvtierError) else "ok"
                log.debug(
                    "request",
                    extra=logs.fields(session=session.id, verb=request.verb, seconds=seconds, result=code),
                )
            self._reply(session, identity, request.id, result)

        try:
            result = self.verbs.handlers[request.verb](session, identity, request.body, answer)
        except KvtierError as error:
            answer(error)
            return
        except Exception:
            log.exception("%s of session %d failed; this is a bug in kvtierd", request.verb, session.id)
            answer(KvtierError(f"{request.verb} failed inside the daemon; its log says where"))
            return
        if isinstance(result, Operation):
            session.operations[identity, request.id] = result
            result.advance()
            if not result.done:
                heapq.heappush(self.deadlines, (started + request.timeout, next(self._order), result))
        else:
            answer(result)

    def _slow(
        self,
        session: Session,
        request: wire.Request,
        seconds: float,
        operation: Operation | None,
        result: wire.Body | KvtierError,
    ) -> None:
        """Say where the time of a request went."""
        spent = {} if operation is None or operation.spent is None else operation.spent
        spent = {what: took for what, took in spent.items() if took >= 0.001}
        went = ", ".join(f"{took:.2f} s for {what}" for what, took in spent.items())
        log.warning(
            "slow: %s of session %d took %.2f s%s",
            *(request.verb, session.id, seconds, f"; it waited {went}" if went else ", all of it in the daemon's loop"),
            extra=logs.fields(
                session=session.id,
                name=session.name,
                pid=session.pid,
                tenant=session.tenant.name,
                verb=request.verb,
                seconds=round(seconds, 3),
                **{f"waited_{what}": round(took, 3) for what, took in spent.items()},
                result=result.code if isinstance(result, KvtierError) else "ok",
            ),
        )

    def _reply(
        self, session: Session | None, identity: bytes, request_id: int, result: wire.Body | KvtierError
    ) -> None:
        notices = session.notices if session is not None else 0
        if isinstance(result, KvtierError):
            self.counters.failed(result.code)
            data = wire.encode_reply(request_id, self.epoch, notices, result.code, str(result))
        else:
            try:
                data = wire.encode_reply(request_id, self.epoch, notices, "", wire.fields(result))
            except (TypeError, ValueError, NotImplementedError):
                log.exception("a %s cannot be encoded; this is a bug in kvtierd", type(result).__name__)
                self._reply(
                    session, identity, request_id, KvtierError("the answer could not be sent; see kvtierd's log")
                )
                return
        if not self._send(session, identity, data, result) and session is not None and not session.gone:
            self._take_back(session, result)

    def _send(self, session: Session | None, identity: bytes, data: bytes, result: Any) -> bool:
        """False if the channel is gone."""
        if identity not in self.unread and self._deliver(identity, data):
            return self._delivered
        if session is None or session.gone:
            return False
        self.unread.setdefault(identity, deque()).append((data, result))
        kept = self.unread_bytes[session.id] = self.unread_bytes.get(session.id, 0) + len(data)
        if kept > _MOST_UNREAD:
            self.overdue.add(session.id)
        return True

    _delivered = True

    def _deliver(self, identity: bytes, data: bytes) -> bool:
        """Whether nothing is left to do: sent, or the channel is gone (`_delivered` tells which)."""
        try:
            send = self.router.send
            send(identity, _NOW_AND_MORE)
            send(data, _NOW)
            self._delivered = True
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._delivered = False
        return True

    def _take_back(self, session: Session, result: Any) -> None:
        """A reply found its channel closed: what it granted would be held by nobody."""
        if isinstance(result, wire.Borrowed | wire.Committed) and result.lease in session.leases:
            self.sessions.release(session, result.lease)
        elif isinstance(result, wire.Reserved) and result.reservation in session.reservations:
            reservation = session.reservations[result.reservation]
            self.sessions.abandon(session, reservation, reservation.slots)
