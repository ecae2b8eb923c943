"""The HTTP layer over a worker that makes what the test tells it to, in a real server on loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx2
import pytest

from kvtier_client.serve import command
from kvtier_client.serve.app import Service, application
from kvtier_client.serve.bridge import Bridge, Totals
from kvtier_client.serve.prompts import Prompter
from kvtier_client.transformers.requests import Request, Token
from kvtier_client.transformers.sampling import Sampling
from tests.serve.tokens import END, tokenizer

PATIENCE = 20.0
CONTEXT = 512
MODEL = "org/tiny"


class Worker:
    """Has the interface of `kvtier_client.transformers.Worker`. Answers at once with what `says` has for (prompt, sample),
    as bytes or tokens; with `manual`, the test feeds the requests itself,
    after the tokens of `first`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.requests: list[Request] = []
        self.cached = 0
        self.manual = False
        self.first = b""
        self.says: Callable[[bytes, int], bytes | Sequence[int]] = lambda prompt, sample: b"Hello there"
        self.fails: BaseException | None = None
        self.in_step = 0.0

    def submit(self, tokens: Sequence[int], sampling: Sampling, *, salt: str = "") -> Request:
        request = Request(list(tokens), sampling, salt)
        request.cached_tokens = self.cached
        self.requests.append(request)
        if self.fails is not None:
            request.fail(self.fails)
        elif self.manual:
            for token in self.first:
                put(request, token)
        else:
            for sample in range(sampling.n):
                self.answer(request, sample)
        return request

    def answer(self, request: Request, sample: int = 0) -> None:
        wanted = [*self.says(bytes(token for token in request.prompt if token < 256), sample), END]
        for token in wanted[: request.sampling.max_tokens]:
            put(request, token, sample)
        request.end(sample, "stop" if len(wanted) <= request.sampling.max_tokens else "length")

    @property
    def last(self) -> Request:
        return self.requests[-1]

    def wait(self, count: int = 1) -> Request:
        """The request number `count` from 1, once it is here."""
        eventually(lambda: len(self.requests) >= count, "a request reaches the worker")
        return self.requests[count - 1]


def put(request: Request, token: int, sample: int = 0) -> None:
    """With log probabilities that say which token it is."""
    wanted = request.sampling.logprobs
    top = tuple((token + 1 + other, -1.0 - other) for other in range(wanted or 0))
    request.put(Token(sample, token, None if wanted is None else -token / 100, top))


def eventually(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"not within {PATIENCE} s: {what}"
        time.sleep(0.002)


class Served:
    """A running server. `http` asks it."""

    def __init__(self, worker: Worker, service: Service) -> None:
        self.worker = worker
        self.service = service
        self.listener = command.listen("127.0.0.1", 0)
        self.port: int = self.listener.getsockname()[1]
        self.server = command.server(application(service), stop_timeout=2)
        self.thread = threading.Thread(target=self.server.run, args=([self.listener],))
        self.thread.start()
        eventually(lambda: self.server.started, "the server starts")
        self.http = httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE)

    def stop(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        self.listener.close()
        self.service.reader.shutdown()

    def chat(self, text: str = "Hi", /, **fields: Any) -> httpx2.Response:
        messages = fields.pop("messages", [{"role": "user", "content": text}])
        return self.http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, **fields})

    def complete(self, prompt: Any = "Once", /, **fields: Any) -> httpx2.Response:
        return self.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, **fields})


MakeServed = Callable[..., Served]


def _served(limit: int = 16, **fields: Any) -> Served:
    worker = Worker()
    prompter = Prompter(tokenizer(), CONTEXT, 258)
    return Served(worker, Service(Bridge(worker, limit), prompter, MODEL, Sampling, frozenset([END]), **fields))


@pytest.fixture
def make() -> Iterator[MakeServed]:
    """Servers of the test's own."""
    made: list[Served] = []

    def factory(**fields: Any) -> Served:
        made.append(_served(**fields))
        return made[-1]

    yield factory
    for served in made:
        served.stop()


@pytest.fixture(scope="module")
def _shared() -> Iterator[Served]:
    served = _served()
    yield served
    served.stop()


@pytest.fixture
def served(_shared: Served) -> Served:
    """A server that other tests used before, with nothing in flight, and a worker as new."""
    bridge = _shared.service.bridge
    eventually(lambda: not bridge.in_flight, "what the test before asked for has ended")
    _shared.worker.reset()
    bridge.totals = Totals()
    return _shared
