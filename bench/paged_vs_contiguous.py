"""The same model and requests through the paged worker and through a contiguous cache that is allocated ahead.

    python bench/paged_vs_contiguous.py [--kv 90GiB] [--seconds 40] [--requests 1000] [--quick]

The requests' lengths are 1,000 of a real conversation trace (bench/data); all of them wait from the start, and their tokens
are random, so that nothing is shared: only how memory is given out differs. The model has the shape of Llama-3-8B and random
weights: what it says does not matter, and ends at the trace's lengths. A shape of 70B does not fit one GPU with its weights;
the KV a token (128 KiB here, 320 KiB there) sets how many sequences fit, for both ways alike.

The baseline is Transformers' StaticCache with the model's length reserved for each row, as many rows as fit in the same
memory, decode steps in a CUDA graph. Its rows start together and are padded on the left to the longest, as `generate` does,
and a row that is done waits for the others: a contiguous cache of fixed rows has no other way. So its figures are those of
contiguous allocation and static batches together; the share of memory that holds tokens, the longest context and the
requests that do not fit are of allocation alone.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import gc
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from core import say
from transformers import StaticCache
from worker_models import DEVICE, LLAMA_8B, ON_GPU, SMALL, attach, kvtierd, random_llama, token_bytes

from kvtier.sizes import format_size, parse_size
from kvtier_client.transformers import Request, RequestFailed, Sampling, Worker
from kvtier_client.transformers.model import cache_argument

LENGTHS = Path(__file__).parent / "data" / "azure_conversation_1000.csv"
ARTICLE = {
    "tokens/s, all requests waiting": ("1,200", "300"),
    "ms between two tokens of an answer": ("50 (latency)", "200 (latency)"),
    "share of KV memory that holds tokens": ("0.92", "0.45"),
    "longest context, tokens": ("1M", "64k"),
    "share of requests that fail for memory": ("0.001", "0.35"),
}


@dataclass(slots=True)
class Measured:
    tokens_per_second: float
    between_tokens: float
    """Seconds, mean over all tokens after a request's first."""
    in_service: float
    """Seconds from a request's start in the batch to its end, mean."""
    real: float
    """Share of the KV memory in use that holds tokens, mean over time."""
    together: float
    """Sequences that ran at once, mean."""
    rows: int
    """Sequences that it has room for."""
    longest: int
    failed: float
    note: str


def requests(count: int, shrink: int) -> list[tuple[int, int]]:
    """(prompt, answer) lengths."""
    with LENGTHS.open() as file:
        rows = [(int(row["input_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    return [(max(1, prompt // shrink), max(2, answer // shrink)) for prompt, answer in rows[:count]]


def prompt_of(length: int, seed: int, vocabulary: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(2, vocabulary, (length,), generator=generator).tolist()
    return found


def paged(model: Any, lengths: list[tuple[int, int]], kv: int, seconds: float, directory: Path, most: int) -> Measured:
    say(f"kvtierd with {format_size(kv)} for KV")
    host = "8GiB" if ON_GPU else "64MiB"
    with kvtierd(directory, kv, host=host, slab="512MiB" if ON_GPU else "16MiB") as endpoint:
        client = attach(endpoint, "paged")
        worker = Worker(model, client, max_batch=most, step_tokens=2048 if ON_GPU else 512)
        say("warming up")
        # As many as will run, which leave one by one: kernels are compiled and steps captured for every size of batch.
        warm = [
            worker.submit(prompt_of(40 + at % 16, at, worker.description.vocabulary), wish(8 + at // 4))
            for at in range(most)
        ]
        while worker.step():
            pass
        del warm
        say(f"{len(lengths)} requests, for {seconds:.0f} s")
        asked: list[Request] = []
        stamps: dict[int, list[float]] = {}
        for at, (prompt, answer) in enumerate(lengths):
            request = worker.submit(prompt_of(prompt, 1000 + at, worker.description.vocabulary), wish(answer))
            stamps[at] = []
            request.put = functools.partial(stamped, stamps[at])  # type: ignore[method-assign]
            asked.append(request)
        before = worker.counters["tokens"]
        real: list[float] = []
        together: list[int] = []
        admitted: dict[int, float] = {}
        number = {id(request): at for at, request in enumerate(asked)}
        started = said = time.perf_counter()
        while worker.step() and (now := time.perf_counter()) - started < seconds:
            running = worker.roster.running
            together.append(len(running))
            capacity = sum(sequence.capacity for sequence in running)
            if capacity:
                real.append(sum(sequence.computed for sequence in running) / capacity)
            for sequence in running:
                admitted.setdefault(number.get(id(sequence.request), -1), now)
            if now - said > 10:
                said = now
                print(f"    {now - started:4.0f} s: {worker.counters['tokens'] - before:,} tokens", file=sys.stderr)
        took = time.perf_counter() - started
        made = worker.counters["tokens"] - before
        done = [at for at, request in enumerate(asked) if request.finish == ["length"]]
        failed = sum(did_fail(request) for request in asked) / len(asked)
        gaps = [(times[-1] - times[0]) / (len(times) - 1) for times in stamps.values() if len(times) > 1]
        service = [stamps[at][-1] - admitted[at] for at in done if at in admitted]
        note = f"{len(done)} of {len(asked)} done in {took:.0f} s; {worker.counters['preempted']} preempted"
        for request in asked:
            request.cancel()
        while worker.step():
            pass
        worker.close()
        client.close()
    return Measured(
        made / took,
        statistics.mean(gaps),
        statistics.mean(service) if service else 0.0,
        statistics.mean(real),
        statistics.mean(together),
        most,
        kv // token_bytes(model.config),
        failed,
        note,
    )


def wish(answer: int) -> Sampling:
    return Sampling(max_tokens=answer, ignore_eos=True)


def stamped(times: list[float], _: Any) -> None:
    times.append(time.perf_counter())


def did_fail(request: Request) -> bool:
    """Whether it ended in an error; asked of the queue alone, without waiting."""
    with contextlib.suppress(Exception):
        while True:
            if isinstance(request._out.get_nowait(), RequestFailed):
                return True
    return False


class Rows:
    """A StaticCache of `rows` sequences of `length` tokens, and decode steps over it in a CUDA graph where there is one."""

    def __init__(self, model: Any, rows: int, length: int) -> None:
        self.model, self.rows, self.length = model, rows, length
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        self.mask = torch.zeros(rows, 1, 1, length, dtype=torch.bool, device=DEVICE)
        self.ids = torch.zeros(rows, 1, dtype=torch.long, device=DEVICE)
        self.positions = torch.zeros(rows, 1, dtype=torch.long, device=DEVICE)
        self.at = torch.zeros(1, dtype=torch.long, device=DEVICE)
        self.graph: Any = None
        self.argument = cache_argument(model)

    def fill(self, prompts: list[list[int]], chunk: int) -> None:
        """Prefill all rows together, padded on the left, a chunk of columns at a time."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=DEVICE)
        real = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts], device=DEVICE)
        positions = (real.cumsum(1) - 1).clamp(min=0)
        self._rewind(0)
        for start in range(0, width, chunk):
            stop = min(start + chunk, width)
            columns = torch.arange(self.length, device=DEVICE)
            seen = columns[None, :] <= torch.arange(start, stop, device=DEVICE)[:, None]
            shown = torch.zeros(self.rows, self.length, dtype=torch.bool, device=DEVICE)
            shown[:, :width] = real
            mask = (seen[None] & shown[:, None]) | (
                columns[None, None] == torch.arange(start, stop, device=DEVICE)[:, None]
            )
            logits = self._forward(ids[:, start:stop], positions[:, start:stop], mask[:, None])
        self.mask.zero_()
        self.mask[:, 0, 0, :width] = real
        self.ids.copy_(logits.argmax(-1))
        self.positions.copy_(positions[:, -1:] + 1)
        self.at.fill_(width)

    def step(self) -> None:
        if not ON_GPU:
            self._step()
            return
        if self.graph is None:
            before = [x.clone() for x in (self.ids, self.positions, self.at, self.mask)]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._step()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._step()
            for x, was in zip((self.ids, self.positions, self.at, self.mask), before, strict=True):
                x.copy_(was)
            self._rewind(int(before[2]))
        self.graph.replay()

    def _step(self) -> None:
        self.mask.index_fill_(3, self.at, True)
        logits = self._forward(self.ids, self.positions, self.mask)
        self.ids.copy_(logits.argmax(-1))
        self.positions.add_(1)
        self.at.add_(1)

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(
            input_ids=ids, position_ids=positions, attention_mask=mask, logits_to_keep=1, **{self.argument: self.cache}
        ).logits
        return logits

    def _rewind(self, tokens: int) -> None:
        for layer in self.cache.layers:
            if layer.is_initialized:
                with torch.inference_mode():
                    layer.cumulative_length.fill_(tokens)


def contiguous(model: Any, lengths: list[tuple[int, int]], kv: int, seconds: float, most: int) -> Measured:
    length = model.config.max_position_embeddings
    fits = [(prompt, answer) for prompt, answer in lengths if prompt + answer <= length]
    failed = 1 - len(fits) / len(lengths)
    rows = min(kv // (length * token_bytes(model.config)), most)
    while rows:
        say(f"a static cache of {rows} rows of {length} tokens")
        with contextlib.suppress(torch.OutOfMemoryError):
            return _batches(Rows(model, rows, length), fits, seconds, failed, length)
        forget()
        rows = rows * 3 // 4
    raise SystemExit("not one row of the static cache fits beside the model")


def _batches(static: Rows, fits: list[tuple[int, int]], seconds: float, failed: float, length: int) -> Measured:
    """Batches of as many requests as there are rows, each until its longest answer is complete.

    A step costs the same whatever the rows hold, since their shapes are static: when time is up, the batch's other steps
    are counted at the pace of those that were run.
    """
    rows = static.rows
    vocabulary = static.model.config.vocab_size
    chunk = max(1, 16384 // rows)
    made, batches, ran, due, took = 0, 0, 0, 0, 0.0
    real, gaps, service = [], [], []
    started = time.perf_counter()
    while time.perf_counter() - started < seconds and (batches + 1) * rows <= len(fits):
        batch = fits[batches * rows : (batches + 1) * rows]
        begun = time.perf_counter()
        static.fill([prompt_of(prompt, at, vocabulary) for at, (prompt, _) in enumerate(batch)], chunk)
        _wait()
        first = time.perf_counter()
        print(f"    prompts took {first - begun:.1f} s", file=sys.stderr, flush=True)
        static.step()  # which also makes the graph
        _wait()
        paced = time.perf_counter()
        steps = min(max(answer for _, answer in batch), length - max(prompt for prompt, _ in batch))
        done = 0
        while done < max(1, steps - 2):
            static.step()
            done += 1
            if done % 10 == 0:
                _wait()
                if done >= 40 and time.perf_counter() - started > seconds:
                    break
        _wait()
        a_step = (time.perf_counter() - paced) / done
        for step in range(1, steps):
            real.append(sum(prompt + step for prompt, answer in batch if answer > step) / (rows * length))
        took += first - begun + a_step * (steps - 1)
        made += sum(min(answer, steps) for _, answer in batch)
        gaps += [a_step] * sum(answer - 1 for _, answer in batch)
        service += [first - begun + a_step * (answer - 1) for _, answer in batch]
        batches, ran, due = batches + 1, ran + done, due + steps - 1
        print(f"    {took:4.0f} s: {made:,} tokens in {batches} batches", file=sys.stderr, flush=True)
    busy = sum(answer for _, answer in fits[: batches * rows]) / max(1, len(real))
    return Measured(
        made / took,
        statistics.mean(gaps),
        statistics.mean(service),
        statistics.mean(real),
        busy,
        rows,
        length,
        failed,
        f"{batches} batches of {rows} rows in {took:.0f} s; of their {due} steps {ran} were run, the others counted alike",
    )


def forget() -> None:
    """Give memory back to the device."""
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


def _wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def show(ours: Measured, few: Measured, theirs: Measured, lengths: list[tuple[int, int]], kv: int, each: int) -> None:
    def pair(value: Any) -> tuple[str, str, str]:
        return value(ours), value(few), value(theirs)

    rows = {
        "tokens/s, all requests waiting": pair(lambda m: f"{m.tokens_per_second:,.0f}"),
        "ms between two tokens of an answer": pair(lambda m: f"{m.between_tokens * 1e3:.1f}"),
        "share of KV memory that holds tokens": pair(lambda m: f"{m.real:.2f}"),
        "longest context, tokens": pair(lambda m: f"{m.longest:,}"),
        "share of requests that fail for memory": pair(lambda m: f"{m.failed:.3f}"),
        "s from start to end of a request": pair(lambda m: f"{m.in_service:.1f}"),
        "sequences at once": pair(lambda m: f"{m.together:.0f}"),
    }
    print(f"\n{'':40} {'paged':>10} {f'paged, {few.rows}':>12} {'contiguous':>12}   article")
    for name, (a, b, c) in rows.items():
        print(f"{name:40} {a:>10} {b:>12} {c:>12}   {' vs '.join(ARTICLE.get(name, ()))}")
    room = int(kv / max(1.0, ours.together) / each)
    tight = sum(prompt + answer > room for prompt, answer in lengths) / len(lengths)
    print(
        f"paged: {ours.note}\npaged, no more at once than contiguous: {few.note}\ncontiguous: {theirs.note}\n"
        f"To run as many at once as paged did, contiguous rows would have {room:,} tokens, too few for {tight:.3f} of the "
        f"requests.\nThe longest contexts: paged, all frames of the {format_size(kv)}; contiguous, a row."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv", default="", help="memory for KV, the same for both (default: 90GiB; 64MiB on the CPU)")
    parser.add_argument("--seconds", type=float, default=120.0, help="for all requests to be done, paged, at most")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=1 << 20, help="at most so many rows of the static cache")
    parser.add_argument("--quick", action="store_true", help="a small model, and a tenth of the lengths")
    given = parser.parse_args()
    small = given.quick or not ON_GPU
    kv = parse_size(given.kv or ("90GiB" if ON_GPU and not small else "64MiB"))
    lengths = requests(min(given.requests, 60) if small else given.requests, 10 if small else 1)
    shape = {**SMALL, "max_position_embeddings": 1024} if small else LLAMA_8B
    model = random_llama(shape)
    each = token_bytes(model.config)
    print(
        f"{'small model' if small else 'the shape of Llama-3-8B'}, {model.dtype}, KV {each / 1024:.0f} KiB a token, "
        f"{format_size(kv)} for KV, {len(lengths)} requests waiting: "
        f"{statistics.mean(p for p, _ in lengths):.0f} tokens in, {statistics.mean(a for _, a in lengths):.0f} out, mean",
        flush=True,
    )
    seconds = 10.0 if small else given.seconds
    theirs = contiguous(model, lengths, kv, min(seconds, 30.0), given.rows if not small else 8)
    forget()
    with tempfile.TemporaryDirectory(prefix="kvb-") as directory:
        ours = paged(model, lengths, kv, seconds, Path(directory), 512 if ON_GPU else 32)
    forget()
    rows = max(1, round(theirs.rows))
    with tempfile.TemporaryDirectory(prefix="kvb-") as directory:
        few = paged(model, lengths, kv, min(seconds, 30.0) / 2, Path(directory), rows)
    show(ours, few, theirs, lengths, kv, each)
    return 0


if __name__ == "__main__":
    sys.exit(main())
