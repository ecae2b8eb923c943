"""Time to the first token and throughput of real vLLM on the CPU, without kvtier and with it, side by side in one run.

    python bench/vllm_replay.py [--only replay overhead] [--requests N] [--json FILE]

replay     conversations of a public trace (bench/data), scaled to the model: a block of 512 tokens becomes one of 32, and
           answers are 1/128 of theirs, since a CPU decodes slowly and nothing here changes that. Two engines serve the
           requests in turn, one at a time, in the trace's order, and are restarted half way; so do two of every other kind
           beside them, each request right after the other's, so that all have the same machine.
again      all of it once more, after another restart.
overhead   prompts that never repeat, so that nothing is ever found: without kvtier, with it, and with kvtier but no kvtierd, a
           round of each in turn. Beside the engines' times, which differ more from round to round on a machine that others
           use than what is sought, the cost itself: seconds that vLLM's thread spends in the connector's methods, and
           processor time of the connector's own threads.

vLLM's own OffloadingConnector is tried too, and what it says is printed: 0.32 has it for GPUs only, as LMCache has its.
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
import threading
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
LOCAL_BLOCKS = 100
ROUNDS = 9


HOOKS = (
    *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
    *("update_connector_output", "request_finished_all_groups", "take_events", "handle_preemptions"),
    *("bind_connector_metadata", "start_load_kv", "wait_for_save", "get_transfer_results"),
    *("get_block_ids_with_load_errors", "get_kv_connector_stats", "build_connector_worker_meta"),
)
"""What vLLM calls, each request and each step."""


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
    hooks = watched(engine) if options.get("kv_transfer_config") else None
    print("{}", file=say)
    number = 0
    for line in sys.stdin:
        waiting = json.loads(line)
        asked: dict[str, float] = {}
        first: list[float] = []
        cached = computed = 0
        before = (hooks[0], threads_cpu()) if hooks else (0.0, 0.0)
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
        answer = {"first": first, "seconds": seconds, "cpu": cpu, "cached": cached, "prompt": computed}
        if hooks:
            answer |= {"hooks": hooks[0] - before[0], "threads": threads_cpu() - before[1]}
        print(json.dumps(answer), file=say)


def watched(engine: Any) -> list[float]:
    """Have the connector's methods, on both sides, add the seconds they take to the one number that this gives."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    spent = [0.0]

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*given, **more)
            finally:
                spent[0] += time.perf_counter() - started

        return call

    for side in (engine.engine_core.engine_core.scheduler.connector, get_kv_transfer_group()):
        for name in HOOKS:
            setattr(side, name, timed(getattr(side, name)))
    return spent


def threads_cpu() -> float:
    """Processor seconds of the connector's own threads so far."""
    ticks = 0
    for thread in threading.enumerate():
        if thread.name.startswith("kvtier"):
            fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


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


class Pair:
    """Two engines of a kind, that serve requests in turn."""

    def __init__(self, name: str, transfer: dict[str, Any] | None, place: Path) -> None:
        self.name, self._transfer, self._place = name, transfer, place
        self._engines: list[Engine] = []
        self._started = 0
        self.answers: list[dict[str, Any]] = []

    def restart(self) -> None:
        self.close()
        for _ in range(2):
            self._started += 1
            log = self._place / f"{self.name}-{self._started}.log"
            self._engines.append(Engine(log, self._transfer, num_gpu_blocks_override=LOCAL_BLOCKS))
            warm_up(self._engines[-1])

    def ask(self, number: int, request: dict[str, Any]) -> None:
        self.answers.append(self._engines[number % 2].ask([request]))

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
        self._engines.clear()

    def row(self, what: str) -> dict[str, Any]:
        """Of the requests since the last one."""
        taken, self.answers = self.answers, []
        first = sorted(one["first"][0] for one in taken)
        total = {key: sum(one[key] for one in taken) for key in ("seconds", "cpu", "cached", "prompt")}
        return {"what": what, "system": self.name, "first": first, **total}


def replay(place: Path, endpoint: str, count: int) -> list[dict[str, Any]]:
    requests = trace(count)
    distinct = len({tuple(one["prompt"][: n + BLOCK]) for one in requests for n in range(0, len(one["prompt"]), BLOCK)})
    print(
        f"\nreplay: {len(requests)} requests, {sum(len(one['prompt']) for one in requests):,} prompt tokens, ", end=""
    )
    print(f"{distinct} distinct blocks of {BLOCK}; an engine's own cache has {LOCAL_BLOCKS}")
    print(f"vLLM's OffloadingConnector: {runs(place, OFFLOADING)}")
    print(f"{'':34} {'first token, s':>24} {'tokens/s':>9} {'cpu, s':>8} {'cached':>7}")
    print(f"{'':34} {'p50':>8} {'mean':>7} {'p90':>7}")
    pairs = [Pair("vLLM", None, place), Pair("vLLM with kvtier", kvtier(endpoint), place)]
    rows = []
    for what in ("first time", "again"):
        for n, request in enumerate(requests):
            if n == 0 or (what == "first time" and n == len(requests) // 2):
                for pair in pairs:
                    pair.restart()
            for pair in pairs if n % 2 else reversed(pairs):
                pair.ask(n + (what == "again"), request)
        for pair in pairs:
            rows.append(pair.row(what))
            print(line(rows[-1]), flush=True)
    for pair in pairs:
        pair.close()
    return rows


def runs(place: Path, transfer: dict[str, Any]) -> str:
    """Whether an engine comes up with it here; its last error, if not."""
    log = place / "peer.log"
    try:
        Engine(log, transfer).close()
    except SystemExit:
        said = [one for one in log.read_text().splitlines() if "Error: " in one or "Exception: " in one]
        return said[-1].split("]: ")[-1] if said else "does not come up"
    return "runs"


def line(row: dict[str, Any]) -> str:
    first = row["first"]
    p90 = first[int(0.9 * (len(first) - 1))]
    name = f"{row['what']}: {row['system']}"
    share, speed = row["cached"] / row["prompt"], row["prompt"] / row["seconds"]
    times = f"{statistics.median(first):8.2f} {statistics.mean(first):7.2f} {p90:7.2f}"
    return f"{name:34} {times} {speed:9.0f} {row['cpu']:8.1f} {share:7.1%}"


def warm_up(engine: Engine) -> None:
    """What an engine does once: its first steps are slower."""
    engine.ask(unique(random.Random(time.time_ns()), 2))


def unique(draw: random.Random, count: int) -> list[dict[str, Any]]:
    return [{"prompt": [draw.randrange(100, 40_000) for _ in range(400)], "answer": 4} for _ in range(count)]


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
    print(f"\noverhead: {ROUNDS} rounds of 8 prompts of 400 tokens that never repeat, 4 tokens each; the best round")
    print(f"{'':20} {'cpu, s':>8} {'ratio':>7} {'wall, s':>8} {'ratio':>7} {'in its methods':>15} {'its threads':>12}")
    rows = []
    for (name, _), taken in zip(ways, times, strict=True):
        row: dict[str, Any] = {"way": name}
        for what in ("cpu", "seconds"):
            row[what] = min(one[what] for one in taken)
            row[f"{what}_ratio"] = row[what] / min(one[what] for one in times[0])
        row["hooks"] = statistics.median(one.get("hooks", 0) / one["seconds"] for one in taken)
        row["threads"] = statistics.median(one.get("threads", 0) / one["cpu"] for one in taken)
        rows.append(row)
        print(
            f"{name:20} {row['cpu']:8.2f} {row['cpu_ratio']:7.3f} {row['seconds']:8.2f} {row['seconds_ratio']:7.3f} "
            f"{row['hooks']:15.2%} {row['threads']:12.2%}",
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
