"""A vLLM engine in a process that does as it is told: each line of its input is Python to run, each line of its output the
JSON of what that left in `result`, or the error it raised. `llm`, `generate` and what earlier lines named are at hand.

Runs where vLLM is installed; its log goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    options = json.loads(sys.argv[1])
    say = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to stdout
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
    for line in sys.stdin:
        names["result"] = None
        try:
            exec(json.loads(line), names)
            answer = {"result": names["result"]}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=say)


if __name__ == "__main__":
    main()
