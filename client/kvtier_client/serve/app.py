"""The routes: what HTTP asks, and what it is answered.

    POST /v1/chat/completions, /v1/completions     GET /v1/models, /v1/models/{id}, /health

Every error has OpenAI's body. A client that goes away cancels what it asked for. Bodies are bounded by the model's
context, waiting requests by the bridge. Only JSON by that name is read, so that no web page can use a server on
loopback behind its user's back.
Not here: the process and its signals (`command`).
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtier.errors import KvtierError
from kvtier_client.serve.answers import Asked, Chat, Completion, Shape, Stream, refusal, whole
from kvtier_client.serve.bridge import Bridge, Gone, Run
from kvtier_client.serve.prompts import Prompter
from kvtier_client.serve.schema import ChatRequest, CompletionRequest, Refused, decode

log = logging.getLogger(__name__)

_BODY, _BODY_A_TOKEN, _LARGEST_BODY = 1 << 20, 64, 1 << 28
"""Bytes of a body: so many, and so many more for each token of the context, up to the last."""
_BODY_SECONDS = 60.0
_HEALTH = "/health"
"""Asked often, by who holds no key: not logged, and open."""
HUNG = 300.0
"""Seconds in one step of the worker after which it is not healthy: kernels that are compiled first take a minute or two."""
_GONE = 499
"""What the access log says of a client that did not wait; nobody receives it."""
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)

Answering = Callable[[Request], Any]


@dataclass(slots=True)
class Service:
    """All that the routes need."""

    bridge: Bridge
    prompter: Prompter
    name: str
    """Of the model, as clients call it."""
    sampling: Callable[..., Any]
    """Makes what the worker is told from what the client said: `kvtier_client.transformers.Sampling`."""
    ends: frozenset[int] = frozenset()
    """Tokens that end a sequence."""
    api_key: str = ""
    seed: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    reader: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "kvtier-serve-read"))
    """One thread makes requests of bodies and tokens of texts: both can take long."""
    numbers: int = 0
    """Requests so far; with `seed`, what tells their samples apart."""

    @property
    def largest_body(self) -> int:
        return min(_BODY + _BODY_A_TOKEN * self.prompter.context, _LARGEST_BODY)


def application(service: Service) -> ASGIApp:
    routes = [
        Route("/v1/chat/completions", _chat(service), methods=["POST"]),
        Route("/v1/completions", _completions(service), methods=["POST"]),
        Route("/v1/models", _models(service)),
        Route("/v1/models/{name:path}", _model(service)),
        Route(_HEALTH, _health(service)),
    ]
    handlers: dict[Any, Any] = {
        Refused: _refuse,
        KvtierError: lambda request, error: _refuse(request, refusal(error)),
        HTTPException: _not_here,
        Gone: lambda request, error: Response(status_code=_GONE),
        ClientDisconnect: lambda request, error: Response(status_code=_GONE),
        Exception: lambda request, error: _refuse(request, refusal(error)),
    }
    return Door(Starlette(routes=routes, exception_handlers=handlers), service.api_key)


class Door:
    """What every request passes: its id, the key, and a line in the access log when it is answered."""

    def __init__(self, inner: ASGIApp, api_key: str) -> None:
        self._inner = inner
        self._key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        started = time.perf_counter()
        request = Request(scope)
        given = request.headers.get("x-request-id", "")
        identity = given if _ID.fullmatch(given) else uuid.uuid4().hex
        request.state.id, request.state.usage = identity, dict
        status = _GONE

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", identity.encode())]
            await send(message)

        try:
            if self._may(request):
                await self._inner(scope, receive, tagged)
            else:
                await _refuse(request, _WRONG_KEY)(scope, receive, tagged)
        finally:
            seconds = time.perf_counter() - started
            usage = "".join(f" {name}={count}" for name, count in request.state.usage().items())
            level = logging.DEBUG if request.url.path == _HEALTH else logging.INFO
            path = quote(request.url.path)
            log.log(level, "%s %s %s %d %.3f s%s", identity, request.method, path, status, seconds, usage)

    def _may(self, request: Request) -> bool:
        if not self._key or request.url.path == _HEALTH:
            return True
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self._key.encode())


_WRONG_KEY = Refused("the API key is missing or wrong", status=401, code="invalid_api_key")


class EventStream(StreamingResponse):
    """Ends the run however the response ends, also where it never began."""

    def __init__(self, stream: Stream, run: Run) -> None:
        # Caches and nginx are told to pass each event on at once.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(stream.events(), media_type="text/event-stream", headers=headers)
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except Gone:
            pass
        finally:
            self._run.close()


def _chat(service: Service) -> Answering:
    def prepare(body: bytes) -> tuple[ChatRequest, list[list[int]], list[str]]:
        asked = decode(body, ChatRequest)
        _check_model(service, asked.model)
        return asked, [service.prompter.chat(asked)], []

    async def answer(request: Request) -> Response:
        return await _answer(service, request, prepare, Chat(), "chatcmpl")

    return answer


def _completions(service: Service) -> Answering:
    def prepare(body: bytes) -> tuple[CompletionRequest, list[list[int]], list[str]]:
        asked = decode(body, CompletionRequest)
        _check_model(service, asked.model)
        tokens = service.prompter.completion(asked)
        return asked, tokens, [service.prompter.text(prompt) for prompt in asked.prompts] if asked.echo else []

    async def answer(request: Request) -> Response:
        return await _answer(service, request, prepare, Completion(), "cmpl")

    return answer


async def _answer(
    service: Service, request: Request, prepare: Callable[[bytes], Any], shape: Shape, prefix: str
) -> Response:
    with service.bridge.reading():
        body = await _body(request, service.largest_body)
        loop = asyncio.get_running_loop()
        said, prompts, echoes = await loop.run_in_executor(service.reader, prepare, body)
    asked = Asked(
        id=f"{prefix}-{request.state.id}",
        created=int(time.time()),
        model=service.name,
        tokenizer=service.prompter.tokenizer,
        prompts=prompts,
        samples=said.n or 1,
        stops=said.stops,
        silent=frozenset(said.stop_token_ids or ()) | (frozenset() if said.ignore_eos else service.ends),
        top=said.top,
        echoes=echoes,
    )
    samplings = [_sampling(service, said, prompt) for prompt in prompts]
    run = service.bridge.submit(prompts, samplings, salt=said.cache_salt or "")
    request.state.usage = lambda: _counts(asked, run)
    left_open = False
    try:
        run.watch(request.receive)
        if not said.streamed:
            return Response(await whole(asked, shape, run), media_type="application/json")
        stream = Stream(asked, shape, run, usage=said.usage_streamed)
        await stream.begin()
        left_open = True
        return EventStream(stream, run)
    finally:
        if not left_open:
            run.close()


def _counts(asked: Asked, run: Run) -> dict[str, int]:
    """For the access log."""
    usage = asked.usage(run)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"prompt": usage["prompt_tokens"], "cached": cached, "generated": usage["completion_tokens"]}


def _sampling(service: Service, said: ChatRequest | CompletionRequest, prompt: list[int]) -> Any:
    seed = said.seed
    if seed is None and service.seed is not None:
        seed = service.seed + service.numbers
        service.numbers += 1
    return service.sampling(
        max_tokens=service.prompter.room(prompt, said.limit),
        temperature=1.0 if said.temperature is None else said.temperature,
        top_p=said.top_p or 1.0,
        top_k=max(said.top_k or 0, 0),
        min_p=said.min_p or 0.0,
        repetition_penalty=said.repetition_penalty or 1.0,
        seed=seed,
        n=said.n or 1,
        stop_tokens=frozenset(said.stop_token_ids or ()),
        ignore_eos=bool(said.ignore_eos),
        logprobs=said.top,
    )


def _check_model(service: Service, name: str | None) -> None:
    if name is not None and name != service.name:
        raise Refused(
            f"there is no model {name!r} here: this server has {service.name!r}",
            status=404,
            param="model",
            code="model_not_found",
        )


async def _body(request: Request, most: int) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(f"the content type is {kind or 'missing'}: send application/json", status=415)
    too_large = Refused(f"the body is larger than {most} bytes, the most for this model's context", status=413)
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise Refused(f"the body did not come within {_BODY_SECONDS:g} s", status=408) from None
    return bytes(body)


def _models(service: Service) -> Answering:
    async def answer(request: Request) -> Response:
        return _json({"object": "list", "data": [_described(service)]})

    return answer


def _model(service: Service) -> Answering:
    async def answer(request: Request) -> Response:
        _check_model(service, request.path_params["name"])
        return _json(_described(service))

    return answer


def _described(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "kvtier",
        "max_model_len": service.prompter.context,
    }


def _health(service: Service) -> Answering:
    async def answer(request: Request) -> Response:
        bridge = service.bridge
        hung = bridge.in_step > HUNG
        return _json(
            {
                "status": "hung" if hung else "ok",
                "model": service.name,
                "samples_in_flight": bridge.in_flight,
                "samples_at_most": bridge.limit,
                "totals": asdict(bridge.totals),
            },
            503 if hung else 200,
        )

    return answer


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


def _not_here(request: Request, error: HTTPException) -> Response:
    refused = Refused(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)
    response = _refuse(request, refused)
    response.headers.update(error.headers or {})
    return response


def _refuse(request: Request, refused: Refused) -> Response:
    headers = {"Retry-After": "1"} if refused.status in (429, 503) else None
    body = msgspec.json.encode(refused.body())
    return Response(body, status_code=refused.status, headers=headers, media_type="application/json")
