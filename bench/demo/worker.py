"""One worker of the demo, a process of its own: loads the model, answers one question about the document, ends.

With an endpoint it does what an engine does with kvtier: borrow the pages of the prompt that exist, prefill the rest,
answer, and store the pages that did not exist. With none it has no cache at all. It prints one JSON object a line:
{"step": ...} when it begins something, and at the end its result.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.demo import smollm
from kvtier_client import AttentionLayout, Client, NamespaceClient


class Cached(NamedTuple):
    """A cache with the KV of the first `tokens` tokens; `tiers` counts those that each tier served."""

    cache: Any
    tokens: int
    tiers: dict[str, int]


class FirstToken:
    """A streamer for `generate` that notes when the first new token comes. The prompt is what it is given first."""

    def __init__(self) -> None:
        self.puts = 0
        self.at = 0.0

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.at = time.perf_counter()
            say("answering")

    def end(self) -> None:
        pass


def open_namespace(client: Client, config: Any) -> NamespaceClient:
    """What must match for another worker's pages to be of use to this one."""
    layout = AttentionLayout(
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype="float32",
    )
    return client.namespace(layout, model=smollm.NAME, revision=smollm.REVISION)


def borrow(space: NamespaceClient, keys: list[bytes], prompt: list[int], config: Any) -> Cached:
    """A DynamicCache of the longest leading run of pages that kvtier has.

    At most all tokens but one are taken: the model must run at least one to have something to predict from.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    most = space.schedule.pages(len(prompt) - 1)
    tiers: dict[str, int] = {}
    for number, tier in enumerate(space.locate(keys[:most])):
        span = space.schedule.span(number)
        tiers[tier] = tiers.get(tier, 0) + span.stop - span.start
    with space.borrow(keys[:most], timeout=30) as lease:
        if not lease:
            return Cached(cache, 0, {})
        # [unit, layer, K or V, head, token, dim] of every page: as one run of units, still the daemon's memory
        pages = [page.torch() for page in lease]
        for layer in range(config.num_hidden_layers):
            # one copy, of this layer, into what the model's attention takes: [1, head, token, dim]
            layers = torch.cat([page[:, layer] for page in pages]).permute(1, 2, 0, 3, 4).flatten(2, 3)
            cache.update(layers[0][None], layers[1][None], layer)
        return Cached(cache, lease.tokens, tiers)


def store(space: NamespaceClient, keys: list[bytes], cache: Any, *, start: int) -> int:
    """Write the pages from number `start` on, of which the cache has the KV; how many were published."""
    published = 0
    while start < len(keys):
        with space.reserve(keys, start=start, timeout=30) as reservation:
            for number, page in zip(reservation.numbers, reservation, strict=True):
                span = space.schedule.span(number)
                units = page.torch()  # [unit, layer, K or V, head, token, dim]
                for layer, held in enumerate(cache.layers):
                    for kv, values in enumerate((held.keys, held.values)):
                        run = values[0, :, span.start : span.stop]  # [head, token, dim]
                        shape = (run.shape[0], units.shape[0], -1, run.shape[-1])
                        units[:, layer, kv] = run.reshape(shape).transpose(0, 1)
            published += len(reservation)
            start += len(reservation.status)  # shorter than what was asked where frames ran out: go on from there
            reservation.commit()
    return published


def answer(given: argparse.Namespace) -> dict[str, Any]:
    say("loading the model")
    started = time.perf_counter()
    model, tokenizer = smollm.load(given.model)
    model_seconds = time.perf_counter() - started
    document = given.document.read_text()
    chat = [{"role": "user", "content": f"{document}\n\n{given.question}"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    client = Client(given.endpoint, name=given.name) if given.endpoint else None
    space = open_namespace(client, model.config) if client else None

    started = time.perf_counter()
    keys: list[bytes] = []
    held = Cached(None, 0, {})
    borrow_seconds = 0.0
    if space is not None:
        keys = space.keys(prompt)
        held = borrow(space, keys, prompt, model.config)
        borrow_seconds = time.perf_counter() - started
    say(f"prefilling {len(prompt) - held.tokens:,} of {len(prompt):,} tokens")
    first = FirstToken()
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=held.cache,
            max_new_tokens=given.tokens,
            do_sample=False,
            streamer=first,
            return_dict_in_generate=True,
        )
    generated = output.sequences[0, len(prompt) :].tolist()
    stored = 0
    if space is not None:
        say("storing its pages")
        stored = store(space, keys, output.past_key_values, start=space.schedule.pages(held.tokens))
    if client is not None:
        client.close()
    return {
        "model_seconds": model_seconds,
        "prompt_tokens": len(prompt),
        "reused_tokens": held.tokens,
        "tiers": held.tiers,
        "borrow_seconds": borrow_seconds,
        "first_token_seconds": first.at - started,
        "stored_pages": stored,
        "generated": generated,
        "text": tokenizer.decode(generated, skip_special_tokens=True),
        "pid": os.getpid(),
    }


def say(step: str) -> None:
    print(json.dumps({"step": step}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--unpack", action="store_true", help="only unpack the model")
    parser.add_argument("--endpoint", help="runtime directory of kvtierd; none: no cache")
    parser.add_argument("--name", default="demo")
    parser.add_argument("--document", type=Path)
    parser.add_argument("--question", default="")
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()
    if given.unpack:
        say("dequantising its weights")
        smollm.unpack(given.model)
        return 0
    print(json.dumps(answer(given)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
