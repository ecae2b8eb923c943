"""What clients are answered: shapes, streams, limits, errors, and what becomes of requests nobody waits for."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from typing import Any

import httpx2
import pytest

from kvtier.errors import DaemonLost, KvtierError
from kvtier_client.serve import app
from kvtier_client.serve.schema import MAX_SAMPLES, REFUSED
from tests.serve.conftest import CONTEXT, MODEL, MakeServed, Served, eventually, put
from tests.serve.tokens import END, tokenizer


def events(response: httpx2.Response) -> list[dict[str, Any]]:
    """The chunks of a stream that ended well."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def error(response: httpx2.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    found: dict[str, Any] = body["error"]
    return found


# Chat


def test_a_chat_is_answered(served: Served) -> None:
    served.worker.cached = 7
    response = served.chat(
        "Hi", messages=[{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    )
    body = response.json()
    assert body["id"] == f"chatcmpl-{response.headers['x-request-id']}"
    assert abs(body["created"] - time.time()) < 60
    prompt = b"system:Be briefuser:Hiassistant:"
    assert bytes(token for token in served.worker.last.prompt if token < 256) == prompt
    assert body == {
        "id": body["id"],
        "object": "chat.completion",
        "created": body["created"],
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello there", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": len(served.worker.last.prompt),
            "completion_tokens": 12,
            "total_tokens": len(served.worker.last.prompt) + 12,
            "prompt_tokens_details": {"cached_tokens": 7},
        },
    }


def test_a_chat_is_streamed_with_the_same_text(served: Served) -> None:
    text = "Café 🙂, and more"
    served.worker.says = lambda prompt, sample: text.encode()
    chunks = events(served.chat(stream=True))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    assert not any("usage" in chunk for chunk in chunks)
    assert served.chat().json()["choices"][0]["message"]["content"] == text


def test_tokens_are_streamed_when_they_are_made(served: Served) -> None:
    """Each is here before the next is made."""
    served.worker.manual, served.worker.first = True, b"a"
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
        request = served.worker.wait()
        lines = (line for line in response.iter_lines() if line)
        assert '"role":"assistant"' in next(lines)
        assert '"content":"a"' in next(lines)
        for letter in "bcd":
            put(request, ord(letter))
            assert f'"content":"{letter}"' in next(lines)
        request.end(0, "length")
        last, done = lines
    assert '"finish_reason":"length"' in last and done == "data: [DONE]"


def test_usage_is_streamed_where_it_is_wanted(served: Served) -> None:
    served.worker.cached = 3
    chunks = events(served.chat(stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_several_answers(served: Served) -> None:
    served.worker.says = lambda prompt, sample: f"answer {sample}".encode()
    choices = served.chat(n=3).json()["choices"]
    assert [(choice["index"], choice["message"]["content"]) for choice in choices] == [
        (number, f"answer {number}") for number in range(3)
    ]
    texts = ["", "", ""]
    ends = []
    for chunk in events(served.chat(n=3, stream=True)):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        ends += [choice["index"]] if choice["finish_reason"] == "stop" else []
    assert texts == ["answer 0", "answer 1", "answer 2"] and sorted(ends) == [0, 1, 2]


def test_the_length_ends_it(served: Served) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        body = served.chat(**{name: 5}).json()
        assert body["choices"][0]["message"]["content"] == "Hello"
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 5
    served.chat()
    request = served.worker.last
    assert request.sampling.max_tokens == CONTEXT - len(request.prompt)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_it_and_the_worker_is_told(served: Served, stream: bool) -> None:
    served.worker.manual = True
    answers: list[httpx2.Response] = []
    asking = threading.Thread(target=lambda: answers.append(served.chat(stop=["\nUser:"], stream=stream)))
    asking.start()
    request = served.worker.wait()
    for token in b"fine\nUser: and more":
        put(request, token)
    eventually(request.cancelled.is_set, "the worker is told")
    asking.join()
    request.end(0, "cancelled")
    if stream:
        choices = [chunk["choices"][0] for chunk in events(answers[0])]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "fine"
        assert choices[-1]["finish_reason"] == "stop"
    else:
        choice = answers[0].json()["choices"][0]
        assert choice["message"]["content"] == "fine" and choice["finish_reason"] == "stop"
    eventually(lambda: served.service.bridge.in_flight == 0, "its place is free")
    assert served.service.bridge.totals.cancelled == 0  # it was answered


def test_a_stop_string_ends_one_of_several_answers(served: Served) -> None:
    served.worker.says = lambda prompt, sample: [b"one. two. three", b"four", b". five"][sample]
    choices = served.chat(n=3, stop=". ").json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["one", "four", ""]


def test_the_worker_need_not_go_on_with_a_sample_that_stopped(served: Served) -> None:
    served.worker.manual = True
    answers: list[httpx2.Response] = []
    asking = threading.Thread(target=lambda: answers.append(served.chat(n=2, stop=".")))
    asking.start()
    request = served.worker.wait()
    for token in b"one. two":
        put(request, token, sample=1)
    eventually(lambda: not request.wants(1), "the worker is told")
    assert request.wants(0) and not request.cancelled.is_set()
    request.end(1, "cancelled")
    for token in (*b"none", END):
        put(request, token)
    request.end(0, "stop")
    asking.join()
    assert [choice["message"]["content"] for choice in answers[0].json()["choices"]] == ["none", "one"]
    eventually(lambda: served.service.bridge.in_flight == 0, "their places are free")


def test_a_worker_that_hangs_is_not_healthy(served: Served) -> None:
    served.worker.in_step = app.HUNG + 1
    response = served.http.get("/health")
    assert response.status_code == 503 and response.json()["status"] == "hung"
    served.worker.in_step = 0.0
    assert served.http.get("/health").status_code == 200


def test_what_is_said_reaches_the_worker(served: Served) -> None:
    said = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 7, "n": 2}
    served.chat(**said, ignore_eos=True, stop_token_ids=[65], max_tokens=9, cache_salt="mine")
    request = served.worker.last
    for name, value in said.items():
        assert getattr(request.sampling, name) == value
    assert request.sampling.ignore_eos and request.sampling.stop_tokens == {65} and request.salt == "mine"
    assert request.sampling.logprobs is None
    served.chat(temperature=None, top_p=None, n=None, stop=None, seed=None, top_k=-1)
    request = served.worker.last
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (1.0, 1.0, 0)
    assert request.sampling.seed is None and request.salt == ""


def test_a_token_that_stops_has_no_text(served: Served) -> None:
    served.worker.says = lambda prompt, sample: b"abc"
    assert served.chat(stop_token_ids=[ord("c")]).json()["choices"][0]["message"]["content"] == "ab"


def test_with_a_seed_of_the_server_each_request_has_its_own(make: MakeServed) -> None:
    served = make(seed=100)
    for wanted in (100, 101, 102):
        served.chat()
        assert served.worker.last.sampling.seed == wanted
    served.chat(seed=5)
    assert served.worker.last.sampling.seed == 5


def test_log_probabilities_of_a_chat(served: Served) -> None:
    served.worker.says = lambda prompt, sample: "é!".encode()
    content = served.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [0x21]]
    assert content[2]["token"] == "!" and content[2]["logprob"] == -0.33
    assert content[2]["top_logprobs"] == [
        {"token": '"', "logprob": -1.0, "bytes": [34]},
        {"token": "#", "logprob": -2.0, "bytes": [35]},
    ]
    chunks = events(served.chat(logprobs=True, top_logprobs=2, stream=True))
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content
    bare = served.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert bare[2]["top_logprobs"] == [] and served.worker.last.sampling.logprobs == 0


def test_content_in_parts_and_a_developer(served: Served) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    served.chat(messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": parts}])
    assert b"system:xuser:Hello" in bytes(token for token in served.worker.last.prompt if token < 256)


# Completions


def test_a_prompt_is_completed(served: Served) -> None:
    body = served.complete("Once", max_tokens=5).json()
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"]["prompt_tokens"] == 4
    served.complete("Once")
    assert served.worker.last.sampling.max_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_each_with_several_answers(served: Served, stream: bool) -> None:
    served.worker.says = lambda prompt, sample: prompt + f"-{sample}".encode()
    served.worker.cached = 1
    for prompts in (["ab", "c"], [[97, 98], [99]]):
        response = served.complete(prompts, n=2, stream=stream, stream_options={"include_usage": True})
        texts = [""] * 4
        chunks = events(response) if stream else [response.json()]
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == ["ab-0", "ab-1", "c-0", "c-1"]
        usage = chunks[-1]["usage"]
        assert usage["prompt_tokens"] == 3 and usage["prompt_tokens_details"]["cached_tokens"] == 2
        assert usage["completion_tokens"] == 5 + 5 + 4 + 4


@pytest.mark.parametrize("prompt", ["Once", list(b"Once")], ids=["text", "tokens"])
def test_the_prompt_is_echoed(served: Served, prompt: Any) -> None:
    assert served.complete(prompt, echo=True).json()["choices"][0]["text"] == "OnceHello there"
    chunks = events(served.complete(prompt, echo=True, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "OnceHello there"


def test_log_probabilities_of_a_completion(served: Served) -> None:
    served.worker.says = lambda prompt, sample: b"ab"
    logprobs = served.complete(logprobs=1).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.97, -0.98],
        "top_logprobs": [{"b": -1.0, "a": -0.97}, {"c": -1.0, "b": -0.98}],
        "text_offset": [0, 1],
    }


# What is refused


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_supported_is_refused_by_name(served: Served, field: str) -> None:
    refused = error(served.chat(**{field: 0.5}), 400)
    assert refused["param"] == field and field in refused["message"] and refused["code"] == "unsupported_parameter"
    for harmless in [*REFUSED[field][0], None]:
        assert served.chat(**{field: harmless}).status_code == 200
    assert len(served.worker.requests) == len(REFUSED[field][0]) + 1


def test_unknown_fields_are_accepted(served: Served) -> None:
    assert (
        served.chat(user="me", store=True, metadata={"a": "b"}, prompt_cache_key="k", whatever=[1]).status_code == 200
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": MAX_SAMPLES + 1}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"content": "Hi"}]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}, "messages"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(served: Served, fields: dict[str, Any], param: str) -> None:
    refused = error(served.chat(**fields), 400)
    assert refused["param"] == param and refused["type"] == "invalid_request_error"
    assert not served.worker.requests


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", [1]], [1, "a"], [-1], [258], [1.5], None, ["a", ""]], ids=str)
def test_prompts_that_are_none(served: Served, prompt: Any) -> None:
    assert error(served.complete(prompt), 400)["param"].startswith("prompt")
    assert not served.worker.requests


def test_echo_with_log_probabilities_is_refused(served: Served) -> None:
    assert error(served.complete(echo=True, logprobs=1), 400)["param"] == "echo"


def test_a_context_that_is_too_long(served: Served) -> None:
    refused = error(served.complete("x" * CONTEXT), 400)
    assert refused["code"] == "context_length_exceeded" and refused["param"] == "prompt"
    assert f"maximum context length is {CONTEXT} tokens" in refused["message"]
    refused = error(served.chat(max_tokens=CONTEXT), 400)
    assert refused["code"] == "context_length_exceeded" and refused["param"] == "messages"
    assert served.complete("x" * (CONTEXT - 16)).status_code == 200


def test_a_model_without_a_chat_template(make: MakeServed) -> None:
    served = make()
    served.service.prompter = type(served.service.prompter)(tokenizer(None), CONTEXT, 258)
    assert "/v1/completions" in error(served.chat(), 400)["message"]
    assert served.complete().status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"\xff", b'{"messages": NaN}', b"[" * 100_000, b'{"model": "\\ud800"}'],
    ids=lambda body: repr(body[:12]),
)
def test_bodies_that_are_no_request(served: Served, body: bytes) -> None:
    response = served.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    error(response, 400)
    assert served.chat().status_code == 200


def test_only_json_by_that_name_is_read(served: Served) -> None:
    for headers in ({}, {"Content-Type": "text/plain"}):
        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]})
        error(served.http.post("/v1/chat/completions", content=body, headers=headers), 415)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large(served: Served, chunked: bool) -> None:
    body = b" " * (served.service.largest_body + 1)
    content = iter([body]) if chunked else body
    response = served.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert str(served.service.largest_body) in error(response, 413)["message"]


def test_other_models_and_places(served: Served) -> None:
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "Hi"}]}
    refused = error(served.http.post("/v1/chat/completions", json=body), 404)
    assert refused["code"] == "model_not_found" and MODEL in refused["message"]
    del body["model"]
    assert served.http.post("/v1/chat/completions", json=body).status_code == 200
    assert "/v1/responses" in error(served.http.post("/v1/responses", json=body), 404)["message"]
    response = served.http.get("/v1/chat/completions")
    error(response, 405)
    assert response.headers["allow"] == "POST"
    error(served.http.get("/v1/models/other"), 404)


def test_models_are_listed(served: Served) -> None:
    listed = served.http.get("/v1/models").json()
    assert listed["object"] == "list"
    (one,) = listed["data"]
    assert one["id"] == MODEL and one["object"] == "model" and one["max_model_len"] == CONTEXT
    assert served.http.get(f"/v1/models/{MODEL}").json() == one


# Keys, ids, health


def test_without_the_key_nothing_is_served(make: MakeServed) -> None:
    served = make(api_key="secret")
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "secret"},
        {"Authorization": "Basic secret"},
    ):
        refused = error(served.http.get("/v1/models", headers=headers), 401)
        assert refused["code"] == "invalid_api_key"
    assert served.http.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
    assert served.http.get("/health").status_code == 200
    assert error(served.chat(), 401) and not served.worker.requests


def test_requests_have_ids_and_a_line_in_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    served.worker.cached = 2
    with caplog.at_level(logging.INFO, logger="kvtier_client.serve.app"):
        body = {"prompt": "Once"}
        response = served.http.post("/v1/completions", json=body, headers={"X-Request-Id": "trace-1"})
        assert response.headers["x-request-id"] == "trace-1" and response.json()["id"] == "cmpl-trace-1"
        strange = served.http.post("/v1/completions", json=body, headers={"X-Request-Id": "a b\tc"})
        assert len(strange.headers["x-request-id"]) == 32
        served.http.get("/v1/no%1bthing")
        eventually(lambda: len(caplog.records) >= 3, "three lines")
    first, _, third = (record.getMessage() for record in caplog.records)
    assert first.startswith("trace-1 POST /v1/completions 200 ") and first.endswith(" prompt=4 cached=2 generated=12")
    assert " GET /v1/no%1Bthing 404 " in third


def test_health_counts(served: Served) -> None:
    served.worker.cached = 2
    served.complete(["ab", "cd"], n=2)
    health = served.http.get("/health").json()
    assert health["status"] == "ok" and health["samples_in_flight"] == 0
    assert health["totals"] == {
        "requests": 1,
        "refused": 0,
        "cancelled": 0,
        "prompt_tokens": 4,
        "cached_tokens": 4,
        "generated_tokens": 48,
    }


# Too many, gone, failed, stopping


def test_what_waits_is_bounded(make: MakeServed) -> None:
    served = make(limit=2)
    served.worker.manual = True
    answers: list[httpx2.Response] = []
    asking = [threading.Thread(target=lambda: answers.append(served.chat())) for _ in range(2)]
    for thread in asking:
        thread.start()
    served.worker.wait(2)
    response = served.chat()
    refused = error(response, 429)
    assert refused["type"] == "rate_limit_error" and response.headers["retry-after"] == "1"
    assert served.http.get("/health").json()["totals"]["refused"] == 1
    for request in list(served.worker.requests):
        request.end(0, "length")
    for thread in asking:
        thread.join()
    assert [answer.status_code for answer in answers] == [200, 200]
    served.worker.manual = False
    assert served.chat(n=2).status_code == 200
    error(served.chat(n=3), 400)


def test_a_request_that_is_being_read_has_a_place(make: MakeServed) -> None:
    served = make(limit=1)
    with _ask(served, send=10) as slow:
        eventually(lambda: served.service.bridge.being_read == 1, "it is being read")
        assert error(served.chat(), 429)["code"] == "queue_full"
        slow.close()
        eventually(lambda: served.service.bridge.being_read == 0, "its place is free")
    assert served.chat().status_code == 200


def test_a_body_that_does_not_come(make: MakeServed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_BODY_SECONDS", 0.1)
    served = make()
    with _ask(served, send=10) as slow:
        assert b"408 " in slow.recv(15)
    assert served.chat().status_code == 200


def _ask(served: Served, *, send: int | None = None, **fields: Any) -> socket.socket:
    """A request whose answer nobody has read yet; `send`: only so many bytes of its body."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection = socket.create_connection(("127.0.0.1", served.port))
    connection.sendall(head.encode() + b"\r\n\r\n" + body[:send])
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 3])
def test_a_client_that_goes_away_cancels_its_request(served: Served, stream: bool, tokens: int) -> None:
    served.worker.manual = True
    connection = _ask(served, stream=stream)
    request = served.worker.wait()
    for token in b"abc"[:tokens]:
        put(request, token)
    if stream and tokens:
        assert b"200 OK" in connection.recv(15)
    assert not request.cancelled.is_set()
    connection.close()
    eventually(request.cancelled.is_set, "the worker is told")
    request.end(0, "cancelled")
    eventually(lambda: served.service.bridge.in_flight == 0, "its place is free")
    assert served.service.bridge.totals.cancelled == 1
    served.worker.manual = False
    assert served.chat().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_before_the_first_token_has_a_status(served: Served, stream: bool) -> None:
    served.worker.fails = DaemonLost("kvtierd is gone")
    response = served.chat(stream=stream)
    refused = error(response, 503)
    assert refused["type"] == "server_error" and refused["code"] == "daemon_lost"
    assert refused["message"] == "kvtierd is gone" and response.headers["retry-after"] == "1"
    served.worker.fails = KvtierError("no idea")
    assert error(served.chat(stream=stream), 500)["code"] == "internal"
    served.worker.fails = ZeroDivisionError("secret")
    assert "secret" not in error(served.chat(stream=stream), 500)["message"]
    served.worker.fails = None
    assert served.chat(stream=stream).status_code == 200


def test_what_fails_later_is_told_in_the_stream(served: Served) -> None:
    served.worker.manual, served.worker.first = True, b"a"
    with served.http.stream("POST", "/v1/completions", json={"prompt": "Once", "stream": True}) as response:
        request = served.worker.wait()
        lines = (line for line in response.iter_lines() if line)
        assert '"text":"a"' in next(lines)
        request.fail(DaemonLost("kvtierd is gone"))
        last, done = lines
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "daemon_lost"
    assert done == "data: [DONE]"


def test_a_request_that_the_worker_ends_early_is_no_answer(served: Served) -> None:
    served.worker.manual = True
    answers: list[httpx2.Response] = []
    asking = threading.Thread(target=lambda: answers.append(served.chat()))
    asking.start()
    served.worker.wait().end(0, "cancelled")
    asking.join()
    assert error(answers[0], 503)["code"] == "cancelled"


def test_a_stop_waits_for_what_is_being_answered(make: MakeServed) -> None:
    served = make()
    served.worker.manual = True
    answers: list[httpx2.Response] = []
    asking = threading.Thread(target=lambda: answers.append(served.chat()))
    asking.start()
    request = served.worker.wait()
    served.server.should_exit = True
    eventually(lambda: _refused(served.port), "the port is closed")
    for token in [*b"done", END]:
        put(request, token)
    request.end(0, "stop")
    asking.join()
    assert answers[0].json()["choices"][0]["message"]["content"] == "done"
    eventually(lambda: not served.thread.is_alive(), "the server ends")
    assert not request.cancelled.is_set()


def test_a_stop_waits_no_longer_than_it_was_told(make: MakeServed) -> None:
    served = make()
    served.worker.manual = True
    connection = _ask(served, stream=True)
    request = served.worker.wait()
    put(request, ord("a"))
    assert connection.recv(15)
    served.server.should_exit = True
    started = time.monotonic()
    eventually(request.cancelled.is_set, "the worker is told")
    request.end(0, "cancelled")
    eventually(lambda: not served.thread.is_alive(), "the server ends")
    assert 1.5 < time.monotonic() - started < 10
    connection.close()


def _refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return True
    return False


def test_a_slow_body_and_a_long_prompt_hold_nobody_up(served: Served) -> None:
    """Another client is answered while one sends its body bit by bit, and while the tokenizer works."""
    body = json.dumps({"prompt": "Once"}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", served.port)) as slow:
        slow.sendall(head.encode() + b"\r\n\r\n" + body[:3])
        busy = threading.Event()
        waiting = served.service.reader.submit(busy.wait)
        assert served.http.get("/health").json()["status"] == "ok"
        busy.set()
        waiting.result()
        assert served.complete().status_code == 200
        slow.sendall(body[3:])
        assert b"200 OK" in slow.recv(15)
