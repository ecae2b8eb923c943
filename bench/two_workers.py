"""Two worker processes on one GPU, one model: the second serves a long prefix that the first has computed.

    python bench/two_workers.py [--prefix 32768] [--quick]

Each process loads the model and warms up on other tokens. Then the first answers a prompt of `prefix` tokens and a short
question, cold; the second, the same prefix and another question, from the first's pages: no prefill of the prefix, no copy
of it, no KV of its own. Beside it stand copies of the same bytes, as a cache that lends none would have to make: from pinned
host memory, and within the GPU. The shape is Llama-3-8B's, the weights are random.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from core import say
from worker_models import DEVICE, LLAMA_8B, ON_GPU, SMALL, attach, kvtierd, random_llama

from kvtier.sizes import format_size
from kvtier_client import Client
from kvtier_client.transformers import Sampling, Worker

QUESTION = 31


def tokens(seed: int, count: int, vocabulary: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(2, vocabulary, (count,), generator=generator).tolist()
    return found


def answer(worker: Worker, prompt: list[int]) -> tuple[float, int]:
    """(seconds to the first token, cached tokens)."""
    before = worker.counters["tokens"]
    started = time.perf_counter()
    request = worker.submit(prompt, Sampling(max_tokens=4))
    first = 0.0
    while worker.step():
        if not first and worker.counters["tokens"] > before:
            first = time.perf_counter() - started
    list(request)
    return first, request.cached_tokens


def work(given: argparse.Namespace) -> int:
    """One worker process: told to go by a line of its input, it prints a line of what it measured."""
    shape = {**(SMALL if given.quick else LLAMA_8B), "max_position_embeddings": given.prefix + 1024}
    model = random_llama(shape)
    client = attach(given.endpoint, given.work)
    worker = Worker(model, client, max_batch=4, step_tokens=8192 if ON_GPU else 512)
    for turn in range(2):  # kernels are compiled, a decode step is captured; from nothing and then from pages
        answer(worker, tokens(99, given.prefix // 8, shape["vocab_size"]) + tokens(turn, QUESTION, shape["vocab_size"]))
    print(json.dumps({"ready": True}), flush=True)
    sys.stdin.readline()
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if ON_GPU else 0
    prompt = tokens(1, given.prefix, shape["vocab_size"]) + tokens(2 + len(given.work), QUESTION, shape["vocab_size"])
    first, cached = answer(worker, prompt)
    peak = torch.cuda.max_memory_allocated() - before if ON_GPU else 0
    print(json.dumps({"first": first, "cached": cached, "peak": peak}), flush=True)
    sys.stdin.readline()
    worker.close()
    client.close()
    return 0


class Process:
    def __init__(self, name: str, endpoint: str, given: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--work", name, "--endpoint", endpoint, "--prefix", str(given.prefix)]
        self.process = subprocess.Popen(
            command + ["--quick"] * given.quick, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def heard(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with status {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()


def copies(nbytes: int) -> dict[str, float]:
    """Seconds that the prefix's bytes take to be copied to where a worker could read them."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=ON_GPU)
    target = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    source = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    found = {}
    for name, given in (("from pinned host memory", host), ("within the GPU", source)):
        best = float("inf")
        for _ in range(4):
            _wait()
            started = time.perf_counter()
            target.copy_(given, non_blocking=True)
            _wait()
            best = min(best, time.perf_counter() - started)
        found[name] = best
    return found


def _wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def used(client: Client) -> int:
    """Bytes of the fastest tier that hold pages."""
    return int(client.stats()["tiers"][0]["ready_bytes"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=int, default=0, help="tokens (default 32768; 2048 on the CPU)")
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.quick = given.quick or not ON_GPU
    given.prefix = given.prefix or (32768 if ON_GPU else 2048)
    if given.work:
        return work(given)
    shape = SMALL if given.quick else LLAMA_8B
    each = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * (2 if ON_GPU else 4)
    nbytes = given.prefix * each
    kv = max(4 * nbytes, 64 << 20)
    with (
        tempfile.TemporaryDirectory(prefix="kvb-") as directory,
        kvtierd(Path(directory), kv, host=str(2 * kv), slab="512MiB" if nbytes > 1 << 30 else "16MiB") as endpoint,
        attach(endpoint, "watch") as client,
    ):
        say("two worker processes load the model and warm up")
        both = [Process(name, endpoint, given) for name in ("first", "second")]
        for process in both:
            process.heard()
        results, held = [], [used(client)]
        for process in both:
            process.go()
            results.append(process.heard())
            held.append(used(client))
            print(f"{'first' if process is both[0] else 'second'}: {results[-1]}", file=sys.stderr, flush=True)
        for process in both:
            process.go()
            process.process.wait(60)
    cold, warm = results
    print(
        f"{'small model' if given.quick else 'Llama-3-8B shape'}, a prefix of {given.prefix:,} tokens: {format_size(nbytes)}"
    )
    print(f"{'':46} {'ms':>10} {'share of cold':>14}")
    rows = [
        ("time to first token, cold (first process)", cold["first"]),
        ("from its pages (second process)", warm["first"]),
    ]
    if ON_GPU:
        rows += [(f"a copy of the bytes {name}", seconds) for name, seconds in copies(nbytes).items()]
    for name, seconds in rows:
        print(f"{name:46} {seconds * 1e3:10.1f} {seconds / cold['first']:14.4f}")
    print(
        f"tokens of the prefix that the second computed: {given.prefix - min(given.prefix, warm['cached'])}\n"
        f"GPU memory that held pages, first process and then second: +{format_size(held[1] - held[0])}, "
        f"+{format_size(held[2] - held[1])}\n"
        f"the second's own memory at most, beyond its weights: {format_size(warm['peak'])} "
        f"(a cache of its own would add {format_size(nbytes)})"
    )
    return 0 if warm["cached"] >= given.prefix * 15 // 16 else 1


if __name__ == "__main__":
    sys.exit(main())
