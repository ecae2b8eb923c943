"""The main job of kvtier, on a real model: `make demo`.

KV pages computed by one process answer for another, and then for a third after kvtierd was stopped and started again.
Worker processes, one after the other, are asked about a long document (docs/handbook.md):

    no kvtier   two of them, for two questions: what the others must say, token for token, in float32 and greedy
    worker 1    finds nothing, prefills, answers, stores its pages
    worker 2    asks another question: borrows the document's pages from host memory, prefills the last tokens only
    worker 3    the same, after kvtierd was stopped (SIGTERM) and started again: its pages come from SSD

Exit status 0 only if all of that came true. See also: bench/demo/worker.py, the part that an engine would do.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.demo import smollm

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "handbook.md"
CACHE = ROOT / ".cache" / "demo"
QUESTION = "What are the five verbs?"
OTHER_QUESTION = "What is a lease?"
SLOW = 2.0
"""Seconds after which a step says that it is still under way; after that, every `AGAIN` seconds."""
AGAIN = 5.0
WORKER_TIMEOUT = 600.0
DAEMON_TIMEOUT = 60.0

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


class Failed(Exception):
    """The demo cannot go on; the message says why."""


class Progress:
    """Says what is going on when it takes longer than `SLOW` seconds."""

    def __init__(self, who: str) -> None:
        self.who = who
        self.step = "starting"
        self.since = self.started = time.monotonic()
        self.say_at = self.since + SLOW

    def begin(self, step: str) -> None:
        self.step = step
        self.since = time.monotonic()
        self.say_at = self.since + SLOW

    def tick(self) -> None:
        now = time.monotonic()
        if now >= self.say_at:
            self.say_at = now + AGAIN
            console.print(f"  [dim]{self.who}: {self.step} ({now - self.since:.0f} s)[/]")


def run_worker(who: str, *arguments: str) -> dict[str, Any]:
    """Run one worker process to its end; its result. Raises Failed with its errors."""
    progress = Progress(who)
    command = [sys.executable, "-m", "bench.demo.worker", *arguments]
    deadline = time.monotonic() + WORKER_TIMEOUT
    result: dict[str, Any] = {}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1)
        assert process.stdout is not None
        try:
            while True:
                if not select.select([process.stdout], [], [], 0.5)[0]:
                    progress.tick()
                    if time.monotonic() > deadline:
                        raise Failed(f"{who} did not end within {WORKER_TIMEOUT:.0f} s: {progress.step}")
                    continue
                line = process.stdout.readline()
                if not line:
                    break
                message = json.loads(line)
                if "step" in message:
                    progress.begin(message["step"])
                else:
                    result = message
            if process.wait(30):
                errors.seek(0)
                raise Failed(f"{who} failed (status {process.returncode}):\n{errors.read().decode(errors='replace')}")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    result["wall_seconds"] = time.monotonic() - progress.started
    return result


@contextmanager
def kvtierd(runtime: Path, ssd: Path) -> Iterator[None]:
    """The daemon, as its command starts it, until SIGTERM. Raises Failed where it does not come up or stop in order."""
    command = [
        *(shutil.which("kvtierd", path=os.path.dirname(sys.executable)) or "kvtierd", "--end-with-parent"),
        *("--config", str(ROOT / "bench" / "demo" / "kvtierd.toml"), "--runtime-dir", str(runtime)),
        *("--set", f"tiers.ssd.path={ssd}"),
    ]
    progress = Progress("kvtierd")
    with (runtime.parent / "kvtierd.log").open("ab+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not (runtime / "verbs.sock").exists():
                if process.poll() is not None or progress.since + DAEMON_TIMEOUT < time.monotonic():
                    log.seek(0)
                    raise Failed(f"kvtierd did not come up:\n{log.read().decode(errors='replace')}")
                time.sleep(0.02)
                progress.tick()
            console.print(f"kvtierd up in {time.monotonic() - progress.since:.2f} s (pid {process.pid})")
            yield
            progress.begin("stopping: writing to SSD what only memory holds")
            process.send_signal(signal.SIGTERM)
            while process.poll() is None:
                if progress.since + DAEMON_TIMEOUT < time.monotonic():
                    raise Failed(f"kvtierd did not stop within {DAEMON_TIMEOUT:.0f} s of SIGTERM")
                time.sleep(0.02)
                progress.tick()
            console.print(f"kvtierd stopped by SIGTERM in {time.monotonic() - progress.since:.2f} s")
            if process.returncode:
                log.seek(0)
                raise Failed(f"kvtierd ended with status {process.returncode}:\n{log.read().decode(errors='replace')}")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def table(rows: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> Table:
    shown = Table(title="SmolLM2-135M-Instruct, float32 on the CPU, greedy")
    shown.add_column("process", no_wrap=True)
    shown.add_column("served by", no_wrap=True)
    for column in ("prompt", "reused", "borrow", "first token", "speed-up"):
        shown.add_column(column, justify="right", no_wrap=True)
    shown.add_column("same tokens", no_wrap=True)
    shown.add_column("model load", justify="right", no_wrap=True)
    for who, result, reference in rows:
        alone = result is reference
        speedup = reference["first_token_seconds"] / result["first_token_seconds"]
        same = "yes" if result["generated"] == reference["generated"] else "[bold red]no[/]"
        shown.add_row(
            who,
            ", ".join(result["tiers"]) or "prefill",
            f"{result['prompt_tokens']:,}",
            f"{result['reused_tokens']:,}",
            "-" if alone else f"{result['borrow_seconds']:.2f} s",
            f"{result['first_token_seconds']:.2f} s",
            "-" if alone else f"{speedup:.1f}x",
            "-" if alone else same,
            f"{result['model_seconds']:.1f} s",
        )
    return shown


def wrong(first: dict[str, Any], second: dict[str, Any], third: dict[str, Any], references: list[Any]) -> list[str]:
    """What did not come true."""
    said = []
    if first["prompt_tokens"] < 4000:
        said.append(f"the prompt has {first['prompt_tokens']} tokens, not 4,000")
    if first["reused_tokens"]:
        said.append(f"worker 1 found {first['reused_tokens']} tokens in a daemon that should have been empty")
    if not first["stored_pages"]:
        said.append("worker 1 stored no pages")
    for who, result, tier in (("worker 2", second, "host"), ("worker 3", third, "ssd")):
        if result["reused_tokens"] < 0.9 * result["prompt_tokens"]:
            said.append(f"{who} reused {result['reused_tokens']} of {result['prompt_tokens']} tokens")
        if set(result["tiers"]) != {tier}:
            said.append(f"{who} was served by {result['tiers'] or 'nobody'}, not by {tier}")
        if result["first_token_seconds"] >= references[1]["first_token_seconds"]:
            said.append(f"{who} was no faster than without kvtier")
    for who, result, reference in zip(
        ("worker 1", "worker 2", "worker 3"), (first, second, third), (references[0], *[references[1]] * 2), strict=True
    ):
        if result["generated"] != reference["generated"]:
            said.append(f"{who} did not generate the tokens that it does without kvtier")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="the long prompt (default: docs/handbook.md)")
    parser.add_argument("--tokens", type=int, default=32, help="how many to generate (default: 32)")
    given = parser.parse_args()
    folder = CACHE / "smollm2-135m"
    try:
        return demo(given.document, given.tokens, folder)
    except Failed as error:
        console.print(f"[bold red]the demo failed:[/] {error}", markup=True, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130


def demo(document: Path, tokens: int, folder: Path) -> int:
    if not smollm.is_unpacked(folder):
        console.print("unpacking the model, once")
        shutil.rmtree(folder, ignore_errors=True)
        run_worker("model", "--model", str(folder), "--unpack")
    ssd = CACHE / "ssd"
    shutil.rmtree(ssd, ignore_errors=True)
    common = ["--model", str(folder), "--document", str(document), "--tokens", str(tokens)]
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as temporary:
        runtime = Path(temporary) / "run"

        def worker(who: str, question: str, *more: str) -> dict[str, Any]:
            result = run_worker(who, *common, "--question", question, "--name", who.replace(" ", "-"), *more)
            console.print(
                f"{who} (pid {result['pid']}) took {result['wall_seconds']:.1f} s: "
                f"{result['reused_tokens']:,} of {result['prompt_tokens']:,} tokens reused, "
                f"{result['stored_pages']} pages stored"
            )
            return result

        try:
            references = [worker("no kvtier", question) for question in (QUESTION, OTHER_QUESTION)]
            attach = ("--endpoint", str(runtime))
            with kvtierd(runtime, ssd):
                first = worker("worker 1", QUESTION, *attach)
                second = worker("worker 2", OTHER_QUESTION, *attach)
            with kvtierd(runtime, ssd):
                third = worker("worker 3", OTHER_QUESTION, *attach)
        finally:
            shutil.rmtree(ssd, ignore_errors=True)
    rows = [
        ("no kvtier", references[0], references[0]),
        ("worker 1", first, references[0]),
        ("no kvtier", references[1], references[1]),
        ("worker 2", second, references[1]),
        ("worker 3", third, references[1]),
    ]
    console.print()
    console.print(table(rows))
    for question, result in ((QUESTION, first), (OTHER_QUESTION, third)):
        console.print(f"[dim]{question}[/] {' '.join(result['text'].split())}", soft_wrap=True)
    mistakes = wrong(first, second, third, references)
    for mistake in mistakes:
        console.print(f"[bold red]not true:[/] {mistake}")
    if not mistakes:
        console.print("[bold green]all true:[/] pages crossed processes, tiers and a restart, and the tokens are equal")
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
