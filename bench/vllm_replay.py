"""Time to the first token and throughput of real vLLM on the CPU, without kvtier, with it, and with vLLM's own offloading.

    python bench/vllm_replay.py [--only replay overhead] [--requests N] [--json FILE]

replay     conversations of a public trace (bench/data), scaled to the model: a block of 512 tokens becomes one of 32, and
           answers are 1/128 of theirs, since a CPU decodes slowly and nothing here changes that. vLLM's own KV cache holds a
           fifth of what the requests have, as GPUs hold a part of a day's; at most two requests at once, in the order of
           the trace. Then once more in a new process: a restart.
overhead   prompts that never repeat, so that nothing is ever found: with kvtier, with kvtier but no kvtierd, and without, a
           round of each in turn. Processor time of the engine's process is compared, since that of a shared machine's clock
           differs more from round to round than what is sought.

Needs what `.ci/vllm` installs; the model is SmolLM2-135M in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TRACE = ROOT / "bench" / "data" / "conversation_65.json"
HOME = Path(
    os.environ.get("KVTIER_VLLM")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier-ci" / "vllm"
)
SCALE = 16
ANSWER_SCALE = 128
BLOCK = 32
AT_ONCE = 2
ROUNDS = 7


class Engine:
    """A vLLM in a process of its own that is asked one thing after another."""

    def __init__(self, log: Path, transfer: dict[str, Any] | None, **options: Any) -> None:
        chosen: dict[str, Any] = {"model": str(HOME / "model"), "dtype": "bfloat16", "enforce_eager": True, "seed": 0}
        chosen |= {"block_size": BLOCK, "max_model_len": 2048, "kv_transfer_config": transfer, **options}
        paths = os.pathsep.join(str(ROOT / part) for part in (".", "client", "daemon", "kernels"))
        environment = {
            **os.environ,
            "PYTHONPATH": paths,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        command = [str(HOME / "venv" / "bin" / "python"), str(Path(__file__).resolve()), "--engine", json.dumps(chosen)]
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                cwd=ROOT,
            )
        self._log = log
        self.ask(None)

    def ask(self, requests: list[dict[str, Any]] | None) -> dict[str, Any]:
        """Serve `requests`; their times. None: only say that it is there."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if requests is not None:
            self._process.stdin.write(json.dumps(requests) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the engine ended:\n{self._log.read_text()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)


def serve(options: dict[str, Any]) -> None:
    """In vLLM's environment: serve each line's requests, `AT_ONCE` at a time, and say how long they took."""
    say = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    llm = LLM(**{name: value for name, value in options.items() if value is not None})
    engine: Any = llm.llm_engine
    print("{}", file=say)
    number = 0
    for line in sys.stdin:
        waiting = json.loads(line)
        asked: dict[str, float] = {}
        first: list[float] = []
        cached = computed = 0
        usage, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        while waiting or asked:
            while waiting and len(asked) < AT_ONCE:
                request = waiting.pop(0)
                number += 1
                how = SamplingParams(temperature=0, max_tokens=request["answer"], ignore_eos=True)
                engine.add_request(str(number), {"prompt_token_ids": request["prompt"]}, how)
                asked[str(number)] = time.perf_counter()
            for output in engine.step():
                since = asked.get(output.request_id, 0.0)
                if since > 0:
                    first.append(time.perf_counter() - since)
                    asked[output.request_id] = -1.0
                if output.finished:
                    del asked[output.request_id]
                    cached += output.num_cached_tokens or 0
                    computed += len(output.prompt_token_ids)
        seconds = time.perf_counter() - started
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu = used.ru_utime + used.ru_stime - usage.ru_utime - usage.ru_stime
        print(
            json.dumps({"first": first, "seconds": seconds, "cpu": cpu, "cached": cached, "prompt": computed}), file=say
        )


def trace(count: int) -> list[dict[str, Any]]:
    """The requests of the trace, each block as many tokens that follow from its id."""
    made = []
    for _, in_len, out_len, blocks in json.loads(TRACE.read_text())["requests"][:count]:
        tokens: list[int] = []
        for block in blocks:
            draw = random.Random(block)
            tokens += [draw.randrange(100, 40_000) for _ in range(512 // SCALE)]
        made.append({"prompt": tokens[: max(1, in_len // SCALE)], "answer": max(1, out_len // ANSWER_SCALE)})
    return made


def kvtier(endpoint: str) -> dict[str, Any]:
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier_client.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"endpoint": endpoint},
    }


OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 2 << 30},
}


def replay(place: Path, endpoint: str, count: int) -> list[dict[str, Any]]:
    requests = trace(count)
    distinct = len({tuple(one["prompt"][: n + BLOCK]) for one in requests for n in range(0, len(one["prompt"]), BLOCK)})
    small = {"num_gpu_blocks_override": max(140, distinct // 5)}
    print(
        f"\nreplay: {len(requests)} requests, {sum(len(one['prompt']) for one in requests):,} prompt tokens, ", end=""
    )
    print(f"{distinct} distinct blocks of {BLOCK}; vLLM's cache: {small['num_gpu_blocks_override']} blocks")
    print(f"{'':34} {'first token, s':>24} {'':>9} {'tokens/s':>9} {'cached':>7}")
    print(f"{'':34} {'p50':>8} {'mean':>7} {'p90':>7} {'':>9}")
    rows = []
    systems: list[tuple[str, dict[str, Any] | None]] = [
        ("vLLM", None),
        ("vLLM, own offloading", OFFLOADING),
        ("vLLM, kvtier", kvtier(endpoint)),
    ]
    for name, transfer in systems:
        for restart in (False, True):
            log = place / f"replay-{len(rows)}.log"
            try:
                engine = Engine(log, transfer, **small)
            except SystemExit:
                reason = next(
                    (line for line in reversed(log.read_text().splitlines()) if "Error" in line), "see its log"
                )
                print(f"{name:34} does not run here: {reason.strip()[:120]}")
                break
            warm_up(engine)
            answer = engine.ask(requests)
            engine.close()
            row = {"system": name + (", restarted" if restart else ""), **answer}
            rows.append(row)
            print(line(row), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    first = sorted(row["first"])
    p90 = first[int(0.9 * (len(first) - 1))]
    share = row["cached"] / row["prompt"]
    speed = row["prompt"] / row["seconds"]
    mean = statistics.mean(first)
    return f"{row['system']:34} {statistics.median(first):8.2f} {mean:7.2f} {p90:7.2f} {'':9} {speed:9.0f} {share:7.1%}"


def warm_up(engine: Engine) -> None:
    """What an engine does once: its first steps are slower."""
    engine.ask(unique(random.Random(time.time_ns()), 2))


def unique(draw: random.Random, count: int) -> list[dict[str, Any]]:
    return [{"prompt": [draw.randrange(100, 40_000) for _ in range(400)], "answer": 16} for _ in range(count)]


def overhead(place: Path, endpoint: str, _: int) -> list[dict[str, Any]]:
    ways: list[tuple[str, dict[str, Any] | None]] = [
        ("without", None),
        ("kvtier", kvtier(endpoint)),
        ("kvtier, no kvtierd", kvtier(str(place / "nowhere"))),
    ]
    engines = [Engine(place / f"overhead-{n}.log", transfer) for n, (_, transfer) in enumerate(ways)]
    draw = random.Random(5)
    for engine in engines:
        warm_up(engine)
    times: list[list[dict[str, Any]]] = [[] for _ in ways]
    for _ in range(ROUNDS):
        for n in random.Random(len(times[0])).sample(range(len(ways)), len(ways)):
            times[n].append(engines[n].ask(unique(draw, 8)))
    for engine in engines:
        engine.close()
    print(f"\noverhead: {ROUNDS} rounds of 8 prompts of 400 tokens that never repeat, 16 tokens each")
    print(f"{'':34} {'cpu, s':>8} {'ratio':>7} {'wall, s':>8} {'ratio':>7}   (medians; ratios round by round)")
    rows = []
    for (name, _), taken in zip(ways, times, strict=True):
        row: dict[str, Any] = {"way": name}
        for what in ("cpu", "seconds"):
            row[what] = statistics.median(one[what] for one in taken)
            pairs = zip(taken, times[0], strict=True)
            row[f"{what}_ratio"] = statistics.median(one[what] / other[what] for one, other in pairs)
        rows.append(row)
        print(
            f"{name:34} {row['cpu']:8.2f} {row['cpu_ratio']:7.3f} {row['seconds']:8.2f} {row['seconds_ratio']:7.3f}",
            flush=True,
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", choices=("replay", "overhead"), default=("replay", "overhead"))
    parser.add_argument("--requests", type=int, default=65, help="how many of the trace (default: all 65)")
    parser.add_argument("--json", help="write the figures to this file")
    given = parser.parse_args()
    if given.engine:
        serve(json.loads(given.engine))
        return 0
    if not (HOME / "complete").exists():
        print(f"no vLLM in {HOME}: .ci/vllm puts one there", file=sys.stderr)
        return 1
    from kvtier_client.local import LocalDaemon

    does: dict[str, Callable[[Path, str, int], list[dict[str, Any]]]] = {"replay": replay, "overhead": overhead}
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as name, LocalDaemon(host="3GiB") as daemon:
        figures = {what: does[what](Path(name), daemon.endpoint, given.requests) for what in given.only}
    if given.json:
        Path(given.json).write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
