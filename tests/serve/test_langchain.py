"""A real model behind `kvtier serve`, a real kvtierd, and LangChain's OpenAI chat model as the client.

Text is compared with what the model says by itself in this process, with no cache of ours.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from langchain_openai import ChatOpenAI
from openai import BadRequestError

from bench.demo import smollm
from kvtier_client.local import LocalDaemon
from tests.system.conftest import _ENVIRONMENT, ROOT, Process

FOLDER = ROOT / ".cache" / "demo" / "smollm2-135m"
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

    if not smollm.is_unpacked(FOLDER):
        FOLDER.mkdir(parents=True, exist_ok=True)
        smollm.unpack(FOLDER)
    model, tokenizer = smollm.load(FOLDER)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
    made = out[0, ids.shape[1] :]
    finish = "stop" if int(made[-1]) == model.generation_config.eos_token_id else "length"
    return Said(str(tokenizer.decode(made, skip_special_tokens=True)), len(made), finish)


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(host="512MiB") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def server(said: Said, daemon: LocalDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(daemon.endpoint, tmp_path_factory.mktemp("serve") / "log")
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


def test_a_restarted_server_finds_what_the_one_before_stored(
    server: Server, said: Said, daemon: LocalDaemon, tmp_path: Path
) -> None:
    server.model().invoke(ask())
    server.stop()
    again = Server(daemon.endpoint, tmp_path / "log", "--served-model-name", "library")
    try:
        assert again.ready["model"] == "library"
        answer = again.model().invoke(ask())
        assert answer.content == said.text
        assert cached(answer) > 0.9 * answer.usage_metadata["input_tokens"]
        again.stop()
    finally:
        again.process.close()


def test_without_a_daemon_it_says_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvtier_client.cli", "serve", str(FOLDER), "--endpoint", str(tmp_path), "--port", "0"],
        env=_ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3 and not done.stdout
    assert "Start a daemon with `kvtierd`" in done.stderr and "Traceback" not in done.stderr
