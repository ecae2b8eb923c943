"""A vLLM engine in a process that does as it is told: each line of its input is Python to run, each line of its output the
JSON of what that left in `result`, or the error it raised. `llm`, `generate` and what earlier lines named are at hand.

    python -m tests.vllm.engine OPTIONS     one engine, of vLLM's options
    python -m tests.vllm.engine FD          forks an engine for each request on that socket; see `nursery`

Runs where vLLM is installed; its log goes to stderr.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import multiprocessing
import os
import select
import socket
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    if sys.argv[1].isdigit():
        nursery(socket.socket(fileno=int(sys.argv[1])))
    else:
        serve(json.loads(sys.argv[1]))


def nursery(asked: socket.socket) -> None:
    """Import vLLM once, which is most of an engine's start, and for each message, an engine's options and environment and
    three descriptors, fork one. Tells what became of it: {"born": pid}, and {"ended": pid, "status": status}. Ends when its
    socket does."""
    importlib.import_module("vllm").LLM  # noqa: B018 - made when it is asked for
    for name in (
        "model_executor.models.llama",
        "v1.engine.llm_engine",
        "v1.worker.cpu_worker",
        "v1.executor.multiproc_executor",
    ):
        importlib.import_module(f"vllm.{name}")
    gc.freeze()
    living: set[int] = set()
    while True:
        if select.select([asked], [], [], 0.05)[0]:
            message, descriptors, _, _ = socket.recv_fds(asked, 1 << 16, 3)
            if not message:
                return
            pid = os.fork()
            if pid == 0:
                asked.close()
                for number, descriptor in enumerate(descriptors):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                given = json.loads(message)
                os.environ.update(given["environment"])
                own_ways()
                serve(given["options"])
                atexit._run_exitfuncs()
                os._exit(0)
            living.add(pid)
            for descriptor in descriptors:
                os.close(descriptor)
            asked.send(json.dumps({"born": pid}).encode())
        for pid in list(living):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                living.discard(pid)
                asked.send(json.dumps({"ended": pid, "status": os.waitstatus_to_exitcode(status)}).encode())


def own_ways() -> None:
    """What is saved where all was imported already: ranks of an engine are forked as well, instead of each started anew, and
    at the end nobody looks through what was imported for garbage."""
    executor: Any = importlib.import_module("vllm.v1.executor.multiproc_executor")
    executor.get_mp_context = functools.partial(multiprocessing.get_context, "fork")
    setattr(gc, "unfreeze", lambda: None)  # noqa: B010


def serve(options: dict[str, Any]) -> None:
    """`options` are vLLM's; "make" among them is what of `tests.vllm.models` the model is, which is made if it is not there,
    with the tokenizer in the folder "like"."""
    say = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to stdout
    make, like = options.pop("make", None), options.pop("like", None)
    if make is not None and not Path(options["model"]).exists():
        getattr(importlib.import_module("tests.vllm.models"), make)(Path(options["model"]), Path(like))
    from vllm import LLM, SamplingParams

    llm = LLM(**options)

    def generate(prompts: list[list[int]], tokens: int = 8, **more: Any) -> list[dict[str, Any]]:
        """Greedy continuations, and how many tokens of each prompt were not computed."""
        asked = [{"prompt_token_ids": prompt, **more} for prompt in prompts]
        outputs = llm.generate(asked, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
        return [{"tokens": list(one.outputs[0].token_ids), "cached": one.num_cached_tokens} for one in outputs]

    def settle() -> None:
        """Wait until saves on their way have been made; they are made while other things go on."""
        connector = worker()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and any(
            job.reads() for jobs in list(connector._worker._reading.values()) for job in jobs
        ):
            time.sleep(0.01)
        time.sleep(0.05)

    def worker() -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    names: dict[str, Any] = {"llm": llm, "generate": generate, "settle": settle, "worker": worker, "time": time}
    print(json.dumps({"result": "ready"}), file=say)
    for line in os.fdopen(0, closefd=False):
        names["result"] = None
        try:
            exec(json.loads(line), names)
            answer = {"result": names["result"]}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=say)


if __name__ == "__main__":
    main()
