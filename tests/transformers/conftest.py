"""The demo's model, real and small, with what plain `generate` says; and daemons of the system tests to run it on."""

from __future__ import annotations

import fcntl
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.demo import smollm
from kvtier_client.transformers import Request, Worker
from tests.system.conftest import Daemon, daemon, make, place

__all__ = ["daemon", "make", "place"]

FOLDER = Path(__file__).parents[2] / ".cache" / "demo" / "smollm2-135m"


@functools.cache
def load() -> tuple[Any, Any]:
    """(model, tokenizer), unpacked first if `make demo` has not done so: by one process, while others that want it wait."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not smollm.is_unpacked(FOLDER):
            smollm.unpack(FOLDER)
    return smollm.load(FOLDER)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of PyTorch that wait for each other, beside other work on two cores, take many times as long as one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Plain:
    """A model and what it says by itself, with no cache of ours: token for token what a worker must say."""

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._said: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def tokens(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text)["input_ids"]
        return found

    def says(self, prompt: Sequence[int], count: int) -> list[int]:
        """Greedily, at most `count` tokens, an end-of-sequence token included."""
        key = (tuple(prompt), count)
        if key not in self._said:
            ids = torch.tensor([list(prompt)])
            with torch.inference_mode():
                out = self.model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
                )
            self._said[key] = out[0, len(prompt) :].tolist()
        return self._said[key]

    def agrees(self, prompt: Sequence[int], answer: Sequence[int], count: int) -> bool:
        """Whether it would have said `answer`, greedily, up to `count` tokens: asked in one pass over all of it."""
        ids = torch.tensor([[*prompt, *answer[:-1]]])
        with torch.inference_mode():
            logits = self.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
        stops = self.model.generation_config.eos_token_id
        complete = len(answer) == count or answer[-1] in (stops if isinstance(stops, list) else [stops])
        return complete and logits.argmax(-1).tolist() == list(answer)


@pytest.fixture(scope="session")
def smol() -> Plain:
    return Plain(*load())


@pytest.fixture
def served(make: Any) -> Daemon:
    """A daemon with room for some thousand tokens of the model (45 KiB each), and SSD below."""
    started: Daemon = make(host="512MiB", ssd="1GiB", slab="16MiB").start()
    return started


@pytest.fixture
def worker(smol: Plain, served: Daemon) -> Iterator[Worker]:
    """Stepped by hand, so that a test can act between any two steps. At the end it must hold nothing."""
    client = served.client(name="worker")
    made = Worker(smol.model, client, patience=20)
    yield made
    made.close()
    assert_holds_nothing(served, client)


def assert_holds_nothing(daemon: Daemon, client: Any) -> None:
    if daemon.process is not None and daemon.process.process.poll() is None:
        client.ping()
        mine = [session for session in client.sessions()["sessions"] if session["name"] == "worker"]
        held = [(session["leases"], session["reserved_pages"]) for session in mine]
        assert all(pair == (0, 0) for pair in held), f"(leases, reserved pages) left: {held}"


def run(worker: Worker, most: int = 20_000) -> None:
    """Step until nothing is left to do, and check between steps."""
    for _ in range(most):
        if not worker.step():
            return
        worker.check()
    raise AssertionError(f"not done after {most} steps")


def said(request: Request) -> list[list[int]]:
    """Tokens by sample."""
    samples: list[list[int]] = [[] for _ in request.finish]
    for token in request:
        samples[token.sample].append(token.token)
    return samples
