"""What a response looks like: whole, or streamed as server-sent events; of a chat, or of completions.

`parts` turns the events of a run into text by sample; a `Shape` writes it in OpenAI's words. Both ways of answering are
made from the same parts, so they have the same text.
Not here: HTTP (`app`); characters and stop strings (`text`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from kvtier.errors import DaemonLost, Draining, InvalidRequest, KvtierError, OutOfPages
from kvtier_client.serve.bridge import Event, Run
from kvtier_client.serve.schema import Refused
from kvtier_client.serve.text import Piece, Text, token_bytes

DONE = b"data: [DONE]\n\n"
_LEAST = -9999.0
"""Stands for the logarithm of zero, which JSON has no number for."""


class Part(NamedTuple):
    """What is new of one sample. `finish` is "stop" or "length" with the last of it."""

    sample: int
    piece: Piece[Any]
    finish: str | None


@dataclass(slots=True)
class Asked:
    """What the answer must know of the request."""

    id: str
    created: int
    model: str
    tokenizer: Any
    prompts: Sequence[Sequence[int]]
    samples: int
    """Of each prompt."""
    stops: tuple[str, ...] = ()
    silent: frozenset[int] = frozenset()
    top: int | None = None
    """Alternatives reported a token; None: no log probabilities."""
    echoes: Sequence[str] = ()
    """The prompts' texts, where they are part of the answer."""
    generated: int = field(default=0, init=False)
    """Tokens, so far."""

    def usage(self, run: Run) -> dict[str, Any]:
        prompt = sum(map(len, self.prompts))
        cached = sum(request.cached_tokens for request in run.requests)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.generated,
            "total_tokens": prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class Shape(Protocol):
    """One of OpenAI's two kinds of answer."""

    whole_object: str
    chunk_object: str

    def opening(self, asked: Asked, index: int) -> dict[str, Any] | None:
        """The choice that a stream begins with, for each sample."""

    def choice(self, asked: Asked, part: Part) -> dict[str, Any]:
        """What is new of a sample, in a stream."""

    def whole(self, asked: Asked, part: Part) -> dict[str, Any]:
        """A sample, complete."""


class Chat:
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, asked: Asked, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def choice(self, asked: Asked, part: Part) -> dict[str, Any]:
        delta = {"content": part.piece.text} if part.piece.text else {}
        logprobs = _chat_logprobs(asked, part.piece) if part.piece.items else None
        return {"index": part.sample, "delta": delta, "logprobs": logprobs, "finish_reason": part.finish}

    def whole(self, asked: Asked, part: Part) -> dict[str, Any]:
        message = {"role": "assistant", "content": part.piece.text, "refusal": None}
        logprobs = _chat_logprobs(asked, part.piece)
        return {"index": part.sample, "message": message, "logprobs": logprobs, "finish_reason": part.finish}


class Completion:
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, asked: Asked, index: int) -> dict[str, Any] | None:
        if not asked.echoes:
            return None
        return {"index": index, "text": self._echo(asked, index), "logprobs": None, "finish_reason": None}

    def choice(self, asked: Asked, part: Part) -> dict[str, Any]:
        logprobs = _completion_logprobs(asked, part.piece) if part.piece.items else None
        return {"index": part.sample, "text": part.piece.text, "logprobs": logprobs, "finish_reason": part.finish}

    def whole(self, asked: Asked, part: Part) -> dict[str, Any]:
        return {
            "index": part.sample,
            "text": self._echo(asked, part.sample) + part.piece.text,
            "logprobs": _completion_logprobs(asked, part.piece),
            "finish_reason": part.finish,
        }

    def _echo(self, asked: Asked, index: int) -> str:
        return asked.echoes[index // asked.samples] if asked.echoes else ""


async def parts(asked: Asked, run: Run) -> AsyncIterator[list[Part]]:
    """What is new of every sample, as it comes, until all have ended. Raises Refused where the worker failed, and Gone."""
    texts: list[Text[Any]] = [
        Text(asked.tokenizer, prompt, asked.stops, asked.silent)
        for prompt in asked.prompts
        for _ in range(asked.samples)
    ]
    ended: set[int] = set()
    while len(ended) < len(texts):
        news: list[Part] = []
        for events in _by_prompt(await run.events()):
            news += _advance(asked, run, events, texts, ended)
        if news:
            yield news


def _by_prompt(events: list[Event]) -> list[list[Event]]:
    found: dict[int, list[Event]] = {}
    for event in events:
        found.setdefault(event.prompt, []).append(event)
    return list(found.values())


def _advance(
    asked: Asked, run: Run, events: list[Event], texts: Sequence[Text[Any]], ended: set[int]
) -> Iterator[Part]:
    """Take in events of one prompt; what is new of its samples."""
    prompt = events[0].prompt
    samples = range(prompt * asked.samples, (prompt + 1) * asked.samples)
    over = False
    for event in events:
        if event.error is not None:
            raise refusal(event.error)
        if event.token is None:
            over = True
            continue
        index = samples[event.token.sample]
        if index not in ended and not texts[index].stopped:
            asked.generated += 1
            texts[index].add(event.token.token, event.token)
    for index in samples:
        if index in ended:
            continue
        finish = "stop" if texts[index].stopped else None
        if over and finish is None:
            finish = run.requests[prompt].finish[index - samples.start]
            if finish not in ("stop", "length"):
                raise Refused(
                    "the worker ended this request before its answer was complete",
                    status=503,
                    kind="server_error",
                    code="cancelled",
                )
        piece = texts[index].take(all_of_it=finish is not None)
        if finish is not None:
            ended.add(index)
            if not over:
                run.cancel(prompt, index - samples.start)
        if finish is not None or piece.text:
            yield Part(index, piece, finish)
    if not over and ended.issuperset(samples):
        run.cancel(prompt)


async def whole(asked: Asked, shape: Shape, run: Run) -> bytes:
    """The body of an answer that is not streamed."""
    found: dict[int, list[Part]] = {}
    async for news in parts(asked, run):
        for part in news:
            found.setdefault(part.sample, []).append(part)
    choices = [shape.whole(asked, _joined(found[index])) for index in sorted(found)]
    return msgspec.json.encode(_envelope(asked, shape.whole_object) | {"choices": choices, "usage": asked.usage(run)})


class Stream:
    """An answer as server-sent events. `begin` waits for the first token, so that what fails before it has an HTTP
    status of its own; what fails later is the stream's last event but one."""

    def __init__(self, asked: Asked, shape: Shape, run: Run, *, usage: bool) -> None:
        self._asked = asked
        self._shape = shape
        self._run = run
        self._usage = usage
        self._parts = parts(asked, run)
        self._first: list[Part] = []

    async def begin(self) -> None:
        self._first = await anext(self._parts)

    async def events(self) -> AsyncIterator[bytes]:
        asked, shape = self._asked, self._shape
        for index in range(len(asked.prompts) * asked.samples):
            opening = shape.opening(asked, index)
            if opening is not None:
                yield self._event([opening])
        try:
            yield b"".join(self._event([shape.choice(asked, part)]) for part in self._first)
            async for news in self._parts:
                yield b"".join(self._event([shape.choice(asked, part)]) for part in news)
        except Refused as failure:
            yield _event(failure.body()) + DONE
            return
        yield (self._event([], usage=True) if self._usage else b"") + DONE

    def _event(self, choices: list[dict[str, Any]], *, usage: bool = False) -> bytes:
        body = _envelope(self._asked, self._shape.chunk_object) | {"choices": choices}
        if self._usage:
            body["usage"] = self._asked.usage(self._run) if usage else None
        return _event(body)


def refusal(error: BaseException) -> Refused:
    """What a client is told of a failure in the worker."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, InvalidRequest):
        return Refused(str(error), code=error.code)
    if isinstance(error, KvtierError):
        again = isinstance(error, DaemonLost | Draining | OutOfPages)
        return Refused(str(error), status=503 if again else 500, kind="server_error", code=error.code)
    return Refused("the server failed; its log has the cause", status=500, kind="server_error")


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _envelope(asked: Asked, kind: str) -> dict[str, Any]:
    return {"id": asked.id, "object": kind, "created": asked.created, "model": asked.model}


def _joined(found: Sequence[Part]) -> Part:
    pieces = [part.piece for part in found]
    piece = Piece(
        "".join(piece.text for piece in pieces),
        [item for piece in pieces for item in piece.items],
        [offset for piece in pieces for offset in piece.offsets],
    )
    return Part(found[0].sample, piece, found[-1].finish)


def _chat_logprobs(asked: Asked, piece: Piece[Any]) -> dict[str, Any] | None:
    if asked.top is None:
        return None
    content = [
        _logprob(asked, token.token, token.logprob)
        | {"top_logprobs": [_logprob(asked, *alternative) for alternative in token.top[: asked.top]]}
        for token in piece.items
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(asked: Asked, piece: Piece[Any]) -> dict[str, Any] | None:
    if asked.top is None:
        return None
    names = [str(asked.tokenizer.decode([token.token])) for token in piece.items]
    tops = [
        {str(asked.tokenizer.decode([other])): max(logprob, _LEAST) for other, logprob in token.top[: asked.top]}
        | {name: max(token.logprob, _LEAST)}
        for name, token in zip(names, piece.items, strict=True)
    ]
    return {
        "tokens": names,
        "token_logprobs": [max(token.logprob, _LEAST) for token in piece.items],
        "top_logprobs": tops,
        "text_offset": piece.offsets,
    }


def _logprob(asked: Asked, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": str(asked.tokenizer.decode([token])),
        "logprob": max(logprob, _LEAST),
        "bytes": token_bytes(asked.tokenizer, token),
    }
