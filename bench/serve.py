"""What `kvtier serve` gives over HTTP, beside the worker asked directly, on this machine and in this run.

    python bench/serve.py [--model DIR] [--device cpu] [--json FILE]

Time to the first token, cold and with the prompt in kvtierd; tokens a second at several concurrencies. The model is the
demo's (unpacked under .cache/ on first use) unless another is named. The limit of each figure is the same model and the
same requests in the same kind of worker, asked in this process with no HTTP between; a cold prompt there is another text
of the same length. The two take turns, and never run at once. The last rows have a worker that costs nothing, so that they
show HTTP alone: its limit is the rate at which that worker hands over tokens when nobody listens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import torch

from bench.core import Row, run
from bench.demo import smollm
from kvtier_client.local import LocalDaemon, _environment
from kvtier_client.serve import command, models
from kvtier_client.serve.app import Service, application
from kvtier_client.serve.bridge import Bridge
from kvtier_client.serve.prompts import Prompter
from kvtier_client.transformers import Request, Sampling, Token, Worker

FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "demo" / "smollm2-135m"
PROMPTS = (512, 2048, 4096)
CONCURRENT = (1, 4, 8)
ROUNDS = 3
MADE = 64
"""Tokens of each answer where throughput is measured."""
SHORT = 64
STREAMS = (8, 64, 256)
_STEPS, _STEP = 300, 0.001
_numbers = itertools.count(1)


def tokens(count: int) -> list[int]:
    """A prompt that nobody had before."""
    number = next(_numbers)
    return [1000 + (number * 7919 + at * 31) % 40_000 for at in range(count)]


class Http:
    """The server in a process of its own, and one client."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        self._http = httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=64))
        self._loop = asyncio.new_event_loop()

    def at_once(self, prompts: list[list[int]], made: int) -> list[list[float]]:
        """When each answer's tokens came, in seconds from the start."""
        return self._loop.run_until_complete(self._ask(prompts, made))

    async def _ask(self, prompts: list[list[int]], made: int) -> list[list[float]]:
        started = time.perf_counter()
        return await asyncio.gather(*(self._one(prompt, made, started) for prompt in prompts))

    async def _one(self, prompt: list[int], made: int, started: float) -> list[float]:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": made,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        times: list[float] = []
        async with self._http.stream("POST", f"{self._url}/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter() - started)
        return times


class Direct:
    """The worker in this process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def at_once(self, prompts: list[list[int]], made: int) -> list[list[float]]:
        started = time.perf_counter()
        times: list[list[float]] = [[] for _ in prompts]

        def follow(number: int) -> None:
            request = self._worker.submit(prompts[number], Sampling(max_tokens=made, ignore_eos=True))
            for _ in request:
                times[number].append(time.perf_counter() - started)

        threads = [threading.Thread(target=follow, args=(number,)) for number in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return times


def first_token(asked: Http | Direct, count: int) -> tuple[float, float]:
    """Milliseconds, cold and warm."""
    prompt = tokens(count)
    cold = asked.at_once([prompt], 1)[0][0]
    time.sleep(0.2)  # what it stored is published after its answer
    warm = asked.at_once([prompt], 1)[0][0]
    return cold * 1e3, warm * 1e3


def throughput(asked: Http | Direct, concurrent: int) -> float:
    """Tokens a second, over all answers, from their start to the last token."""
    times = asked.at_once([tokens(SHORT) for _ in range(concurrent)], MADE)
    return concurrent * MADE / max(one[-1] for one in times)


def measured(served: Http, direct: Direct, tokenizer: Any, rounds: int) -> Iterator[Callable[[], list[Row]]]:
    for asked in (served, direct):
        asked.at_once([tokens(SHORT)], 8)

    def firsts(count: int) -> list[Row]:
        here, there = zip(
            *((first_token(served, count), first_token(direct, count)) for _ in range(rounds)), strict=True
        )
        rows = []
        for way, name in enumerate(("cold", "warm")):
            value, limit = (statistics.median(one[way] for one in found) for found in (here, there))
            rows.append(Row(f"first token, {count} tokens, {name}", value, limit, "ms", "", met=True))
        return rows

    def rate(concurrent: int) -> list[Row]:
        here, there = zip(
            *((throughput(served, concurrent), throughput(direct, concurrent)) for _ in range(rounds)), strict=True
        )
        value, limit = statistics.median(here), statistics.median(there)
        return [Row(f"{concurrent} at once, {MADE} tokens each", value, limit, "tokens/s", "", met=True)]

    for count in PROMPTS:
        yield lambda count=count: firsts(count)  # type: ignore[misc]
    for concurrent in CONCURRENT:
        yield lambda concurrent=concurrent: rate(concurrent)  # type: ignore[misc]
    for streams in STREAMS:
        yield lambda streams=streams: layer(tokenizer, streams, rounds)  # type: ignore[misc]


class Free:
    """A worker whose steps cost a millisecond, whatever is in the batch: that is some graphics card's."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._requests: list[Request] = []
        self.seconds = 0.0

    def submit(self, prompt: list[int], sampling: Sampling, *, salt: str = "") -> Request:
        self._requests.append(Request(prompt, sampling, salt))
        if len(self._requests) == self._streams:
            threading.Timer(0.2, self.run).start()  # when all have begun to listen
        return self._requests[-1]

    def run(self) -> None:
        started = time.perf_counter()
        for step in range(_STEPS):
            for request in self._requests:
                request.put(Token(0, 1000 + step))
            time.sleep(_STEP)
        self.seconds = time.perf_counter() - started
        for request in self._requests:
            request.end(0, "length")
        self._requests = []


def layer(tokenizer: Any, streams: int, rounds: int) -> list[Row]:
    """HTTP alone."""
    alone = Free(streams)
    for _ in range(streams):
        alone.submit([1], Sampling(max_tokens=_STEPS)).listen(lambda _: None)
    while not alone.seconds:
        time.sleep(0.1)
    tokens = streams * _STEPS
    rate = statistics.median(tokens / streamed(tokenizer, streams) for _ in range(rounds))
    return [Row(f"HTTP alone, {streams} streams", rate, tokens / alone.seconds, "tokens/s", "", met=True)]


def streamed(tokenizer: Any, streams: int) -> float:
    """Seconds from the first token of all streams to the last, at a client in a process of its own."""
    free = Free(streams)
    service = Service(Bridge(free, 2 * streams), Prompter(tokenizer, 8192, 49_152), "free", Sampling)
    listener = command.listen("127.0.0.1", 0)
    web = command.server(application(service), 1)
    serving = threading.Thread(target=web.run, args=([listener],))
    serving.start()
    while not web.started:
        time.sleep(0.01)
    port = listener.getsockname()[1]
    client = [sys.executable, str(Path(__file__).with_name("serve_client.py")), str(port), str(streams), str(_STEPS)]
    seconds = float(subprocess.run(client, stdout=subprocess.PIPE, check=True).stdout)
    web.should_exit = True
    serving.join()
    return seconds


@contextmanager
def server(model: Path, endpoint: str, device: str) -> Iterator[Http]:
    command = [sys.executable, "-m", "kvtier_client.cli", "serve", str(model), "--endpoint", endpoint, "--json"]
    process = subprocess.Popen(
        [*command, "--port", "0", "--device", device],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=_environment(),
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline() or "{}")
        if not ready:
            raise SystemExit(f"kvtier serve did not start: {' '.join(command)}")
        yield Http(ready["url"], ready["model"])
    finally:
        process.terminate()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=FOLDER, help="a directory")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--host", default="4GiB", help="kvtierd's host memory")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", metavar="FILE", help="write exact numbers")
    given = parser.parse_args()
    if given.model == FOLDER and not smollm.is_unpacked(FOLDER):
        FOLDER.mkdir(parents=True, exist_ok=True)
        smollm.unpack(FOLDER)
    device = models.find_device(given.device)
    with LocalDaemon(host=given.host) as daemon, server(given.model, daemon.endpoint, given.device) as served:
        model, tokenizer = models.load(str(given.model), device=device)
        with daemon.client(name="bench") as client, torch.inference_mode(), models.worker(model, client) as worker:
            return run(measured(served, Direct(worker), tokenizer, given.rounds), given.json)


if __name__ == "__main__":
    sys.exit(main())
