"""A real model behind `kvtier serve`, a real kvtierd, and LangChain's OpenAI chat model as the client.

Text is compared with what the model says by itself in this process, with no cache of ours.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
from langchain_openai import ChatOpenAI
from openai import BadRequestError, OpenAI

from kvtier_client import Client
from kvtier_client.local import LocalDaemon
from tests.system.conftest import Process, eventually
from tests.transformers.conftest import FOLDER, load

SYSTEM = " ".join(
    f"Shelf {number} of the library holds books about {subject}, in the order of their authors."
    for number, subject in enumerate(("stars", "rivers", "bread", "clocks", "birds", "trains", "maps", "bees"), 1)
)
QUESTION = "What is on shelf 3?"
TOKENS = 24


class Said(NamedTuple):
    text: str
    tokens: int
    finish: str


class Server:
    """A `kvtier serve` process."""

    def __init__(self, endpoint: str, log: Path, *options: str) -> None:
        command = ["kvtier_client.cli", "serve", str(FOLDER), "--endpoint", endpoint, "--port", "0", "--json", *options]
        self.process = Process(*command, errors=log)
        line = self.process.line(within=60)
        assert line, self.process.log()
        self.ready: dict[str, str] = json.loads(line)

    def model(self, **options: Any) -> Any:
        return ChatOpenAI(
            base_url=self.ready["url"],
            api_key="none",
            model=self.ready["model"],
            temperature=0,
            max_tokens=TOKENS,
            max_retries=0,
            stream_usage=True,
            timeout=60,
            **options,
        )

    def stop(self) -> None:
        self.process.process.send_signal(signal.SIGTERM)
        assert self.process.wait() == 0, self.process.log()
        assert "Traceback" not in self.process.log()
        self.process.close()


@pytest.fixture(scope="module")
def said() -> Said:
    """What the model answers by itself."""
    import torch

    model, tokenizer = load()
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
    made = out[0, ids.shape[1] :]
    finish = "stop" if int(made[-1]) == model.generation_config.eos_token_id else "length"
    return Said(str(tokenizer.decode(made, skip_special_tokens=True)), len(made), finish)


class Host:
    """A kvtierd that can be killed, and started again in the same place."""

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)
        self.start()

    def start(self) -> None:
        self.daemon = LocalDaemon(host="512MiB", ssd="1GiB", directory=self._directory)

    def kill(self) -> None:
        self.daemon.process.kill()
        self.daemon.process.wait()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    host = Host(tmp_path_factory.mktemp("kvt"))
    yield host
    host.daemon.stop()


@pytest.fixture(scope="module")
def server(said: Said, host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(host.daemon.endpoint, tmp_path_factory.mktemp("serve") / "log")
    yield server
    server.process.close()


def ask(question: str = QUESTION) -> list[tuple[str, str]]:
    return [("system", SYSTEM), ("user", question)]


def cached(answer: Any) -> int:
    found: int = answer.usage_metadata["input_token_details"]["cache_read"]
    return found


def test_the_second_time_the_prompt_comes_from_kvtierd(server: Server, said: Said) -> None:
    model = server.model()
    first, second = model.invoke(ask()), model.invoke(ask())
    assert first.content == second.content == said.text
    assert cached(first) == 0
    assert cached(second) > 0.9 * second.usage_metadata["input_tokens"]
    assert second.usage_metadata["output_tokens"] == said.tokens
    assert second.response_metadata["finish_reason"] == said.finish


def test_a_stream_has_the_same_text(server: Server, said: Said) -> None:
    chunks = list(server.model().stream(ask()))
    assert "".join(chunk.content for chunk in chunks) == said.text
    assert sum(bool(chunk.content) for chunk in chunks) > said.tokens // 2
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert cached(whole) > 0 and whole.usage_metadata["output_tokens"] == said.tokens


def test_several_at_once_share_the_prefix(server: Server, said: Said) -> None:
    model = server.model()
    questions = [QUESTION, "What is on shelf 5?", "How many shelves are there?"]
    alone = [model.invoke(ask(question)) for question in questions]
    together = model.batch([ask(question) for question in questions])
    assert [answer.content for answer in together] == [answer.content for answer in alone]
    assert together[0].content == said.text and len({answer.content for answer in together}) > 1
    assert all(cached(answer) > 0 for answer in [*alone, *together])


def test_a_stop_string_ends_it(server: Server, said: Said) -> None:
    word = said.text.split()[2]
    answer = server.model().invoke(ask(), stop=[word])
    assert answer.content == said.text[: said.text.index(word)] and answer.response_metadata["finish_reason"] == "stop"


def test_a_context_that_is_too_long_is_an_error_it_knows(server: Server) -> None:
    with pytest.raises(BadRequestError) as caught:
        server.model().invoke("word " * 9000)
    assert caught.value.code == "context_length_exceeded"


def test_what_openai_s_client_asks_for_reaches_the_model(server: Server, said: Said) -> None:
    client = OpenAI(base_url=server.ready["url"], api_key="none", max_retries=0, timeout=60)
    model = server.ready["model"]
    assert [listed.id for listed in client.models.list()] == [model]

    def drawn(seed: int) -> list[str]:
        answer = client.completions.create(
            model=model, prompt="Once upon a", max_tokens=8, n=2, seed=seed, temperature=1
        )
        return [choice.text for choice in answer.choices]

    first = drawn(1)
    assert first == drawn(1) and first != drawn(2) and first[0] != first[1]
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": role, "content": text} for role, text in ask()],
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    (choice,) = answer.choices
    content = choice.logprobs.content
    assert (
        "".join(entry.token for entry in content) == choice.message.content == said.text[: len(choice.message.content)]
    )
    for entry in content:
        best, second = entry.top_logprobs
        assert (best.token, best.logprob) == (entry.token, entry.logprob) and second.logprob < best.logprob <= 0


def test_a_client_that_hangs_up_leaves_nothing_behind(server: Server, host: Host) -> None:
    root = server.ready["url"].removesuffix("/v1")
    body = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx2.Client(timeout=60) as client, host.daemon.client() as operator:

        def in_flight() -> int:
            return int(client.get(f"{root}/health").json()["samples_in_flight"])

        with client.stream("POST", f"{server.ready['url']}/completions", json=body) as response:
            lines = response.iter_lines()  # kept: without it the client hangs up at once
            first = next(lines)
            assert response.status_code == 200, first
            eventually(lambda: in_flight() == 1, f"it runs, and an earlier one has ended: {first}")
        eventually(lambda: in_flight() == 0, "it is cancelled")
        eventually(lambda: held(operator) == (0, 0), "its pages are given back")


def held(operator: Client) -> tuple[int, int]:
    """Leases and reserved pages of the server."""
    (session,) = (one for one in operator.sessions()["sessions"] if one["name"].startswith("serve "))
    return session["leases"], session["reserved_pages"]


def test_it_outlives_kvtierd(server: Server, said: Said, host: Host) -> None:
    """Killed in the middle of an answer, and started again: the answer is complete all the same, and so is the next."""
    model = server.model()
    chunks = iter(model.stream(ask()))
    text = "".join(next(chunks).content for _ in range(3))
    host.kill()
    host.start()
    text += "".join(chunk.content for chunk in chunks)
    assert text == said.text
    assert model.invoke(ask()).content == said.text
    assert cached(model.invoke(ask())) > 0


def test_a_restarted_server_finds_what_the_one_before_stored(
    server: Server, said: Said, host: Host, tmp_path: Path
) -> None:
    server.model().invoke(ask())
    server.stop()
    again = Server(host.daemon.endpoint, tmp_path / "log", "--served-model-name", "library")
    try:
        assert again.ready["model"] == "library"
        answer = again.model().invoke(ask())
        assert answer.content == said.text
        assert cached(answer) > 0.9 * answer.usage_metadata["input_tokens"]
        again.stop()
    finally:
        again.process.close()
