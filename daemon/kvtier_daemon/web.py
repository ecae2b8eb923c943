"""What the daemon serves on loopback: metrics, health, and a status page.

    HTTP thread ── question, eventfd ──► state thread answers it in its next turn ──► HTTP thread writes text

The state thread owns all numbers, so it is asked for them: it copies what was asked for, of one moment, and whoever
asked makes text of it. It waits for nobody, nothing is copied while nobody asks, and what is served is never older than
`_FRESH`. Health is the same question: a loop that does not turn does not answer.
Not here: the metrics (`kvtier_daemon.metrics`), the page's look (`status.html`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import socketserver
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

from kvtier_daemon.metrics import Metrics
from kvtier_daemon.reports import Reports
from kvtier_daemon.slabs import State

log = logging.getLogger(__name__)

T = TypeVar("T")

PERIOD = 10.0
"""Seconds between two samples of the history."""
_SAMPLES = 361
"""An hour of them."""
_FRESH = 0.05
"""Seconds for which an answer serves others who ask the same: a bound on what a flood of requests costs the loop."""
_PATIENCE = 2.0
"""Seconds in which the state thread must answer."""
_IDLE = 10.0
"""Seconds after which a connection that sends no request is closed."""
_AT_ONCE = 16
"""Connections served at a time; others are closed."""
_LISTED = 500
"""Sessions, and namespaces, on the page at most."""
_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class NoAnswer(Exception):
    """The state thread did not answer in time, or could not."""


class _Question:
    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = read
        self.answered = threading.Event()
        self.answer: Any = None
        self.failed = False


class Desk:
    """Where other threads ask the state thread. `wakeup` (an eventfd) tells its poller of questions."""

    def __init__(self) -> None:
        self.wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._asked: deque[_Question] = deque()
        self._recent: dict[Callable[[], Any], tuple[float, Any]] = {}

    def ask(self, read: Callable[[], T], patience: float = _PATIENCE) -> T:
        """What `read()` returns in the state thread. Raises NoAnswer."""
        question = _Question(read)
        self._asked.append(question)
        os.eventfd_write(self.wakeup, 1)
        if not question.answered.wait(patience):
            raise NoAnswer(f"the daemon's loop did not turn for {patience:.0f} s")
        if question.failed:
            raise NoAnswer("reading the numbers failed; the log says why")
        answer: T = question.answer
        return answer

    def serve(self) -> None:
        """Answer. Called by the state thread alone; never raises."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wakeup)
        now = time.monotonic()
        while self._asked:
            question = self._asked.popleft()
            taken, question.answer = self._recent.get(question.read, (float("-inf"), None))
            if now - taken > _FRESH:
                try:
                    question.answer = question.read()
                    self._recent[question.read] = (now, question.answer)
                except Exception:
                    log.exception("numbers could not be read; this is a bug in kvtierd")
                    question.failed = True
            question.answered.set()


class Web:
    """Metrics and status page on `port` of loopback (0: a free one, "off": none); `port` is then the real one, 0 for
    none. `unready` says why workers should not be sent here, "" if they may. A port that is taken costs no more than
    this page."""

    def __init__(self, port: int | str, reports: Reports, unready: Callable[[], str]) -> None:
        self.reports = reports
        self.metrics = Metrics(reports)
        self.unready = unready
        self.desk = Desk()
        self.history: deque[dict[str, Any]] = deque(maxlen=_SAMPLES)
        self.page = (Path(__file__).parent / "status.html").read_bytes()
        self.port = 0
        self._next = 0.0
        self._server: _Server | None = None
        if isinstance(port, str):
            return
        try:
            self._server = _Server(port, self)
        except OSError as error:
            log.warning("no metrics and no status page: port %d of 127.0.0.1: %s; set http_port", port, error.strerror)
            return
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve, name="http", daemon=True).start()
        log.info("metrics and status page at http://127.0.0.1:%d/", self.port)

    def beat(self, now: float) -> None:
        """Now and then, in the state thread: keep a sample for the plots when one is due."""
        if self._server is None or now < self._next:
            return
        self._next = now + PERIOD if now - self._next > PERIOD else self._next + PERIOD
        store = self.reports.store
        counters = store.counters
        names = [tier.name for tier in store.tiers]
        self.history.append(
            {
                "time": time.time(),
                "ready": [tier.bytes_in(State.READY) for tier in store.tiers],
                "capacity": [tier.capacity for tier in store.tiers],
                "requested": counters.requested,
                "hits": list(counters.hits),
                "hit_tokens": list(counters.hit_tokens),
                "committed_tokens": counters.committed_tokens,
                "requests": sum(latency.count for latency in counters.latency.values()),
                "moved": {
                    f"{names[source]} → {names[target]}": moves.bytes
                    for (source, target), moves in counters.paths().items()
                },
            }
        )

    def status(self) -> dict[str, Any]:
        """What the page shows. For the state thread."""
        return {
            "stats": self.reports.stats(),
            **self.reports.sessions(None),
            "namespaces": self.reports.inventory(None, b"", 0)["namespaces"],
            "history": list(self.history),
            "now": time.time(),
            "unready": self.unready(),
        }

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
        self.desk.serve()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = _AT_ONCE

    def __init__(self, port: int, web: Web) -> None:
        self.web = web
        self._slots = threading.BoundedSemaphore(_AT_ONCE)
        self._stopping = False
        super().__init__(("127.0.0.1", port), _Handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's own asks the name service for this host's name
        self.server_name, self.server_port = "localhost", self.server_address[1]

    def serve(self) -> None:
        """Until `stop`. Asleep while nobody comes, unlike `serve_forever`, which looks twice a second."""
        while not self._stopping:
            with contextlib.suppress(OSError, ValueError):
                self.handle_request()

    def stop(self) -> None:
        self._stopping = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # which wakes `serve`
        self.socket.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a client of the status page went away: %r", sys.exception())


class _Handler(BaseHTTPRequestHandler):
    server: HTTPServer
    timeout = _IDLE
    server_version = "kvtierd"
    sys_version = ""
    routes: ClassVar[dict[str, Callable[[_Handler, Web], tuple[int, str, bytes]]]] = {}

    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        try:
            host = urlsplit(f"//{self.headers.get('Host', 'localhost')}").hostname
        except ValueError:
            host = None
        route = self.routes.get(self.path.partition("?")[0])
        if host not in _NAMES:
            status, kind, body = 403, "text/plain", b"ask for localhost or 127.0.0.1\n"
        elif route is None:
            status, kind, body = 404, "text/plain", f"there are: {' '.join(self.routes)}\n".encode()
        else:
            try:
                status, kind, body = route(self, self.server.web)
            except NoAnswer as error:
                status, kind, body = 503, "text/plain", f"{error}\n".encode()
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), *_HEADERS.items()):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("status page: " + format, *args)

    def _page(self, web: Web) -> tuple[int, str, bytes]:
        return 200, "text/html; charset=utf-8", web.page

    def _metrics(self, web: Web) -> tuple[int, str, bytes]:
        return 200, *web.metrics.expose(web.desk.ask(web.metrics.take), self.headers.get("Accept", ""))

    def _status(self, web: Web) -> tuple[int, str, bytes]:
        status = dict(web.desk.ask(web.status))
        status["sessions"] = sorted(status["sessions"], key=lambda one: -one["requests"])[:_LISTED]
        status["namespaces"] = sorted(status["namespaces"], key=lambda one: -one["pages"])[:_LISTED]
        return 200, "application/json", json.dumps(status).encode()

    def _health(self, web: Web) -> tuple[int, str, bytes]:
        web.desk.ask(web.unready)
        return 200, "text/plain", b"ok\n"

    def _ready(self, web: Web) -> tuple[int, str, bytes]:
        reason = web.desk.ask(web.unready)
        return (503, "text/plain", f"{reason}\n".encode()) if reason else (200, "text/plain", b"ready\n")


_Handler.routes = {
    "/": _Handler._page,
    "/metrics": _Handler._metrics,
    "/healthz": _Handler._health,
    "/readyz": _Handler._ready,
    "/status.json": _Handler._status,
}
