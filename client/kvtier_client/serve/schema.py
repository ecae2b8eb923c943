"""What a request may say, and how one is refused.

Fields of OpenAI's API and those of the field's other servers that the worker can do. Unknown fields are accepted and
mean nothing; fields that would change the answer, and that this server does not do, are refused by name (`REFUSED`)
unless they hold the value that means "as if it were not there".
Not here: what needs the tokenizer or the model (`prompts`, `app`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Meta, Struct

MAX_SAMPLES = 128
MAX_TOP = 20
"""Alternatives reported a token."""
_COMPLETION_TOKENS = 16
"""What OpenAI's API generates where a completion says no max_tokens."""
_TEXT: dict[str, Any] = {"type": "text"}

_Count = Annotated[int, Meta(ge=1, le=MAX_SAMPLES)]
_Tokens = Annotated[int, Meta(ge=1)]
_Top = Annotated[int, Meta(ge=0, le=MAX_TOP)]
_Stop = Annotated[str, Meta(min_length=1, max_length=1024)]

RequestT = TypeVar("RequestT", bound="Common")

REFUSED: dict[str, tuple[Sequence[Any], str]] = {
    "tools": (([],), "describe the tools in the messages, and read the calls out of the text"),
    "functions": (([],), "describe the functions in the messages, and read the calls out of the text"),
    "tool_choice": (("none", "auto"), "there are no tools to choose from"),
    "function_call": (("none", "auto"), "there are no functions to call"),
    "response_format": ((_TEXT,), "only text is generated; ask for the format in the messages"),
    "frequency_penalty": ((0,), "use repetition_penalty"),
    "presence_penalty": ((0,), "use repetition_penalty"),
    "logit_bias": (({},), "leave it out"),
    "best_of": ((1,), "ask for n answers and choose"),
    "suffix": (("",), "leave it out"),
    "modalities": ((["text"],), "only text is generated"),
    "audio": ((), "only text is generated"),
    "reasoning_effort": ((), "leave it out"),
    "verbosity": ((), "leave it out"),
    "web_search_options": ((), "leave it out"),
    "chat_template": ((), "the model's own template is used"),
    "chat_template_kwargs": (({},), "the model's own template is used as it is"),
    "continue_final_message": ((False,), "use /v1/completions"),
    "add_generation_prompt": ((True,), "use /v1/completions"),
    "use_beam_search": ((False,), "leave it out"),
    "length_penalty": ((1,), "leave it out"),
    "min_tokens": ((0,), "leave it out"),
    "prompt_logprobs": ((), "leave it out"),
    "skip_special_tokens": ((True,), "leave it out"),
    "include_stop_str_in_output": ((False,), "leave it out"),
    "truncate_prompt_tokens": ((), "shorten the prompt"),
    "structured_outputs": ((), "ask for the format in the prompt"),
    "guided_json": ((), "ask for the format in the prompt"),
    "guided_regex": ((), "ask for the format in the prompt"),
    "guided_choice": ((), "ask for the format in the prompt"),
    "guided_grammar": ((), "ask for the format in the prompt"),
}
"""Field: (values that mean nothing, what to do instead)."""


class Refused(Exception):
    """A request that gets an error, in OpenAI's words: the HTTP status, and the body's `type`, `param` and `code`."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class StreamOptions(Struct, frozen=True):
    include_usage: bool = False


class Common(Struct, frozen=True, kw_only=True):
    """What both kinds of request share. None stands for the default, as it does in OpenAI's API."""

    model: str | None = None
    max_tokens: _Tokens | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    n: _Count | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=16)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, lt=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def streamed(self) -> bool:
        return bool(self.stream)

    @property
    def usage_streamed(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class Message(Struct, frozen=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    function_call: dict[str, Any] | None = None


class ChatRequest(Common, frozen=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: _Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: _Top | None = None

    @property
    def limit(self) -> int | None:
        """Tokens at most; None: what the context has room for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int | None:
        """How many alternatives are reported a token; None: no log probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Common, frozen=True, kw_only=True):
    prompt: str | Annotated[list[int | str | list[int]], Meta(min_length=1)]
    echo: bool | None = None
    logprobs: _Top | None = None

    @property
    def limit(self) -> int:
        return self.max_tokens or _COMPLETION_TOKENS

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or more, all texts or all tokens."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        kinds = {type(one) for one in given}
        if kinds == {int}:
            return [cast(list[int], given)]
        if kinds == {str} or kinds == {list}:
            return cast("list[str] | list[list[int]]", given)
        raise Refused("prompt mixes texts, tokens and lists of tokens: send one kind", param="prompt")


def decode(body: bytes, kind: type[RequestT]) -> RequestT:
    """The request in `body`. Raises Refused, and nothing else, whatever the bytes are."""
    try:
        given = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Refused(f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise Refused("the body must be a JSON object")
    for name in given.keys() & REFUSED.keys():
        harmless, remedy = REFUSED[name]
        if given[name] is not None and given[name] not in harmless:
            raise Refused(f"{name} is not supported here: {remedy}", param=name, code="unsupported_parameter")
    try:
        request = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        told = str(error)
        where = re.search(r"`\$\.([\w.\[\]]+)`", told) or re.search(r"field `(\w+)`", told)
        raise Refused(told.replace("`$.", "`"), param=where[1] if where else None) from None
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise Refused("top_logprobs needs logprobs: true", param="top_logprobs")
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        raise Refused(
            "echo together with logprobs is not supported: the prompt's own log probabilities are not computed",
            param="echo",
            code="unsupported_parameter",
        )
    return request
