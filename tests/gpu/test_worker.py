"""The native worker on a GPU: what plain `generate` says, from pages in HBM that are read where they lie.

In float32, where no ties are broken by rounding, token for token; in bfloat16 by the error against float32, and by the
text of a real model where KVTIER_SMOLLM2 names its folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvtier_client.transformers import GenerationCache, Sampling, Worker
from tests.gpu.conftest import with_hbm
from tests.gpu.serving import SMOLLM2, ask, plain, prompt, run, said, small, smollm2
from tests.system.conftest import Daemon, MakeDaemon

COUNT = 40


@pytest.fixture(scope="module")
def model() -> Any:
    return small()


@pytest.fixture
def worker(gpu: Daemon, model: Any) -> Iterator[Worker]:
    made = Worker(model, gpu.client(device=0, name="worker"), max_batch=16, step_tokens=512)
    yield made
    made.close()
    if gpu.process is not None and gpu.process.process.poll() is None:
        made.client.ping()
        (mine,) = [session for session in made.client.sessions()["sessions"] if session["name"] == "worker"]
        assert (mine["leases"], mine["reserved_pages"]) == (0, 0)


def test_unequal_prompts_cold_then_from_hbm(worker: Worker, model: Any) -> None:
    prompts = [prompt(seed, length) for seed, length in enumerate((700, 3, 64, 333, 1500, 16, 17, 90))]
    for round_ in range(2):
        requests = [worker.submit(tokens, Sampling(max_tokens=COUNT)) for tokens in prompts]
        run(worker)
        for tokens, request in zip(prompts, requests, strict=True):
            assert said(request) == [plain(model, tokens, COUNT)], f"{len(tokens)} tokens, round {round_}"
            assert not round_ or request.cached_tokens >= (len(tokens) - 1) // 16 * 16 - 48
    assert worker._decoder.graphs and worker._decoder._captured, "decode steps were replayed"


def test_graphs_say_what_launches_say(gpu: Daemon, model: Any) -> None:
    answers = []
    for graphs in (True, False):
        worker = Worker(model, gpu.client(device=0), max_batch=8, cuda_graphs=graphs)
        answers.append([ask(worker, prompt(7, 50 + at), COUNT)[0] for at in range(3)])
        worker.close()
    assert answers[0] == answers[1]


def test_samples_fork(worker: Worker, model: Any) -> None:
    tokens = prompt(3, 101)
    request = worker.submit(tokens, Sampling(max_tokens=COUNT, n=4))
    drawn = worker.submit(tokens, Sampling(max_tokens=COUNT, n=2, temperature=1.0, top_p=0.9, seed=1))
    run(worker)
    assert said(request) == [plain(model, tokens, COUNT)] * 4
    samples = said(drawn)
    assert samples[0] != samples[1]


def test_generate_with_padding_and_beams(gpu: Daemon, model: Any) -> None:
    client = gpu.client(device=0)
    long, short = prompt(11, 120), prompt(12, 30)
    ids = torch.tensor([long, [0] * 90 + short], device="cuda")
    mask = torch.tensor([[1] * 120, [0] * 90 + [1] * 30], device="cuda")
    wishes: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    for _ in range(2):
        with GenerationCache(model, client, ids, mask) as cache, torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, past_key_values=cache, **wishes)
        assert out[:, 120:].tolist() == [plain(model, long, 20), plain(model, short, 20)]
    one = ids[:1]
    with torch.inference_mode():
        wanted = model.generate(one, num_beams=3, **wishes)
        with GenerationCache(model, client, one) as cache:
            assert torch.equal(model.generate(one, past_key_values=cache, num_beams=3, **wishes), wanted)
        assert cache.cached_tokens == [112]


def test_too_little_hbm_makes_the_youngest_wait_in_host_memory(make: MakeDaemon, model: Any) -> None:
    daemon = with_hbm(make, hbm="32MiB", slab="1MiB")  # 512 units of 64 KiB: 8,192 tokens
    daemon.settings["tiers.hbm.slab"] = "1MiB"
    daemon.start()
    worker = Worker(model, daemon.client(device=0), max_batch=16)
    prompts = [prompt(seed, 1000) for seed in range(12)]
    requests = [worker.submit(tokens, Sampling(max_tokens=200)) for tokens in prompts]
    run(worker)
    for tokens, request in zip(prompts, requests, strict=True):
        assert said(request) == [plain(model, tokens, 200)]
    worker.close()


def test_kvtierd_is_killed_and_restarted_in_the_middle(gpu: Daemon, worker: Worker, model: Any) -> None:
    prompts = [prompt(seed, 200) for seed in range(4)]
    requests = [worker.submit(tokens, Sampling(max_tokens=300)) for tokens in prompts]
    for _ in range(60):
        worker.step()
    gpu.kill()
    for _ in range(20):
        worker.step()
    gpu.start()
    run(worker)
    for tokens, request in zip(prompts, requests, strict=True):
        assert said(request) == [plain(model, tokens, 300)]
    assert worker.counters["restarted"]


def test_a_second_process_on_the_gpu_borrows_and_prefills_nothing(gpu: Daemon, model: Any) -> None:
    serve = f"""
from tests.gpu.serving import *
worker = Worker(small(), client)
ask(worker, prompt(22, 40), {COUNT})  # what it takes for itself
before, done = torch.cuda.memory_allocated(), worker.counters['prefilled']
said, cached = ask(worker, prompt(21, 2001), {COUNT})
result = [said, cached, worker.counters['prefilled'] - done, torch.cuda.memory_allocated() - before]
worker.close()
"""
    answers = []
    for _ in range(2):
        process = gpu.worker(bare=True, device=0)
        process.tell(serve)
        answers.append(process.heard(within=60))
    wanted = plain(model, prompt(21, 2001), COUNT)
    assert [answer[0] for answer in answers] == [wanted, wanted]
    first, second = answers
    assert first[1] == 0 and second[1] >= 2001 - 128
    assert first[2] == 2001 and second[2] == 2001 - second[1]
    kv = 2001 * 4096
    assert first[3] < kv / 4 and second[3] < kv / 4, "no KV but kvtierd's"


def test_bfloat16_is_as_near_to_float32_as_transformers_own(gpu: Daemon) -> None:
    """Logprobs of the worker's own tokens, decoded one by one, against one pass in float32 over the same."""
    model, exact = small(torch.bfloat16), small()
    exact.load_state_dict(model.float().state_dict())
    model = model.to(torch.bfloat16)
    worker = Worker(model, gpu.client(device=0))
    tokens = prompt(31, 800)
    request = worker.submit(tokens, Sampling(max_tokens=100, logprobs=0))
    run(worker)
    made = list(request)
    worker.close()
    whole = torch.tensor([[*tokens, *(token.token for token in made)]], device="cuda")

    def logprobs(which: Any) -> torch.Tensor:
        with torch.inference_mode():
            logits = which(input_ids=whole).logits[0, len(tokens) - 1 : -1].float().log_softmax(-1)
        return logits.gather(1, whole[0, len(tokens) :, None])[:, 0]

    wanted, theirs = logprobs(exact), logprobs(model)
    ours = torch.tensor([token.logprob for token in made], device="cuda")
    errors = [float((x - wanted).norm() / wanted.norm()) for x in (ours, theirs)]
    print(f"relative error of logprobs against float32: worker {errors[0]:.4f}, transformers {errors[1]:.4f}")
    assert errors[0] <= 1.5 * errors[1] + 1e-3


@pytest.mark.skipif(not SMOLLM2, reason="KVTIER_SMOLLM2 names no folder")
def test_a_real_model_says_the_same_in_bfloat16(gpu: Daemon) -> None:
    model, tokenizer = smollm2()
    subjects = [
        "a river",
        "the moon",
        "a bridge",
        "bread",
        "a library",
        "the heart",
        "an engine",
        "a forest",
        "salt",
        "time",
    ]
    asked = [
        "What is {}?",
        "Name three uses of {}.",
        "Tell me about {}.",
        "Why does {} matter?",
        "Describe {} to a child.",
    ]
    texts = [form.format(subject) for form in asked for subject in subjects]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]
    count = 16
    wanted = [plain(model, tokens, count) for tokens in prompts]
    eager = [plain(model, tokens, count, "eager") for tokens in prompts]
    worker = Worker(model, gpu.client(device=0), max_batch=64)
    requests = [worker.submit(tokens, Sampling(max_tokens=count)) for tokens in prompts]
    run(worker)
    answers = [said(request)[0] for request in requests]
    worker.close()
    same = [a == b for a, b in zip(answers, wanted, strict=True)]
    among = sum(a == b for a, b in zip(eager, wanted, strict=True))
    print(f"identical text: worker {sum(same)} of {len(same)}; transformers' eager against its sdpa: {among}")
    model.set_attn_implementation("sdpa")
    for tokens, ours, theirs in zip(prompts, answers, wanted, strict=True):
        if ours != theirs:
            at = next(at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
            ids = torch.tensor([[*tokens, *theirs[:at]]], device="cuda")
            with torch.inference_mode():
                logits = model(input_ids=ids).logits[0, -1].float()
            gap = float(logits[theirs[at]] - logits[ours[at]])
            print(f"  apart at token {at}: its logits differ by {gap:.3f}, of {float(logits.max()):.1f}")
            assert gap <= 2**-7 * float(logits.abs().max()), "not a tie within bfloat16"
    assert sum(same) >= among, "farther from Transformers than Transformers' own are from each other"
