"""LMCache's multiprocess server on a CPU: see bench/peers.py.

The client is the one of its own `lmcache bench server`, in two processes. A page is one chunk of 16 tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from peers_common import PAGE, SMALL, event, listens, main, say, server

SHAPES = {  # 2 MiB a page: as two pieces of 1 MiB, the fewest that it takes, and as the 64 of a common model
    "one": "(2,{blocks},16,8,4096):float16:1",
    "many": "(2,{blocks},16,8,128):float16:32",
    "small": "(2,{blocks},16,1,64):float16:1",
}
LOCAL = {"rpc_url": "tcp://127.0.0.1:5555", "http_url": "http://127.0.0.1:8080"}
SMALL_TURN = 1000


def client(shape: str, blocks: int, instance: int, model: str) -> Any:
    from lmcache.cli.commands.bench.server_bench import helpers
    from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
    from lmcache.cli.commands.bench.server_bench.config import BenchConfig

    helpers._INSTANCE_ID_BASE, helpers._MODEL_NAME = instance, model
    config = BenchConfig(
        **LOCAL,
        mode="cpu",
        transfer_mode="engine_driven",
        tp_size=1,
        use_mla=False,
        num_tokens=blocks * 16,
        kvcache_shape_spec=SHAPES[shape].format(blocks=blocks),
        num_blocks=blocks,
        block_size=16,
    )
    made = ServerBenchClient(config, lambda _: None)
    made.start()
    return made


class Pages:
    """Pages of the layers' tensors, filled and looked at one at a time."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.layers = [tensor.numpy() for tensor in tensors]  # each [2, blocks, 16, heads, size]

    def __len__(self) -> int:
        return int(self.layers[0].shape[1])

    def __setitem__(self, index: int, value: int) -> None:
        for layer in self.layers:
            layer.view(np.uint8)[:, index] = value

    def __getitem__(self, index: int) -> np.ndarray:
        if index >= len(self):
            raise IndexError
        return np.concatenate([layer[:, index].reshape(-1).view(np.uint8) for layer in self.layers])


class Store:
    def __init__(self, place: str, role: str, variant: str, pages: int) -> None:
        self.model, self.instance, self.role = variant, 1000 if role == "writer" else 2000, role
        self.large = client(variant, pages, self.instance, self.model)
        self.source: Any = Pages(list(self.large._workers[0].kv_caches.values()))
        self.little: Any = None
        self.request: Any = None
        self.number = 0

    def ask(self, made: Any, turn: int, keys: int) -> Any:
        """A request for the first `keys` pages of a sequence."""
        self.number += 1
        whole = made.create_request(turn, f"{self.model}-{self.role}-{self.number}", "bench")
        tokens = whole.token_ids[: keys * 16]
        return type(whole)(
            **{
                **{name: getattr(whole, name) for name in whole.__dataclass_fields__},
                "token_ids": tokens,
                "num_full_tokens": keys * 16,
                "total_chunks": keys,
                "num_blocks": keys,
                "block_offset": 0,
            }
        )

    def clear(self) -> None:
        self.large._req_client.clear(True).result(timeout=10)

    def put(self, turn: int) -> None:
        request = self.ask(self.large, turn, len(self.source))
        stored = self.large.store(request, 0, request.num_full_tokens)
        if not stored.succeeded:
            raise RuntimeError("a store failed")
        self.large.end_session(request)

    def prepare(self, turn: int, pages: int) -> None:
        self.request = self.ask(self.large, turn, pages)
        found = self.large.lookup(self.request)
        if found.hit_chunks != pages:
            raise RuntimeError(f"a lookup found {found.hit_chunks} of {pages} pages")

    def get(self, turn: int, pages: int) -> Sequence[np.ndarray]:
        got = self.large.retrieve(self.request, 0, pages * 16)
        if not got.succeeded:
            raise RuntimeError("a retrieve failed")
        return self.source

    def done(self) -> None:
        self.large.end_session(self.request)

    def small_client(self) -> Any:
        if self.little is None:
            self.model += "-small"
            self.little = client("small", SMALL, self.instance + 1, self.model)
        return self.little

    def put_small(self) -> None:
        made = self.small_client()
        request = self.ask(made, SMALL_TURN, SMALL)
        if not made.store(request, 0, request.num_full_tokens).succeeded:
            raise RuntimeError("a small store failed")
        made.end_session(request)

    def exists(self, count: int) -> int:
        made = self.small_client()
        request = self.ask(made, SMALL_TURN, count)
        found = int(made.lookup(request).hit_chunks)
        made.end_session(request)
        return found


@contextmanager
def servers(place: str, pages: int) -> Iterator[None]:
    os.environ |= {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["LMCACHE_LOG_LEVEL"] = "WARNING"
    os.environ["OMP_NUM_THREADS"] = "1"  # with two, stores varied from 0.3 to 5.4 GB/s between runs on two shared cores
    command: list[str | Path] = [Path(sys.executable).parent / "lmcache", "server", "--host", "127.0.0.1"]
    command += ["--port", "5555", "--http-host", "127.0.0.1", "--http-port", "8080", "--chunk-size", "16"]
    command += ["--l1-size-gb", f"{pages * PAGE * 4 / (1 << 30) + 1:.0f}", "--no-l1-use-lazy"]
    command += ["--eviction-policy", "LRU", "--supported-transfer-mode", "engine_driven", "--disable-observability"]
    command += ["--shm-name", f"kvp-{os.getpid()}"]
    say("LMCache: its server starts")
    with server(command, lambda: listens(5555) and listens(8080)):
        yield


def own(place: str, pages: int) -> None:
    """`lmcache bench server --mode cpu`: one process that stores and retrieves, medians of three sequences."""
    name = "LMCache, its own bench"
    say(f"{name}: 3 sequences of {pages} pages")
    result = Path(place) / "own.json"
    command = [str(Path(sys.executable).parent / "lmcache"), "bench", "server", "--mode", "cpu"]
    command += ["--transfer-mode", "engine_driven", "--rpc-url", LOCAL["rpc_url"], "--url", LOCAL["http_url"]]
    command += ["--num-tokens", str(pages * 16), "--kvcache-shape-spec", SHAPES["one"].format(blocks=pages)]
    command += ["--start", "0", "--end", "3", "--interval", "0.05", "--quiet"]
    command += ["--format", "json", "--output", str(result)]
    try:
        with servers(place, pages):
            subprocess.run(command, stdout=sys.stderr, check=True, timeout=120)
        metrics = json.loads(result.read_text())["metrics"]
        if metrics["results"]["checksum_ok"] != 3:
            raise RuntimeError("it got other bytes back than it put")
        middle = {part: metrics[part][f"{part}_p50"] for part in ("cold_store", "warm_lookup", "warm_retrieve")}
    except (OSError, subprocess.SubprocessError, KeyError, ValueError, RuntimeError) as error:
        event(row=name, error=f"{type(error).__name__}: {error}")
        return
    total = pages * PAGE / 1e6
    event(
        row=name,
        put=total / middle["cold_store"],
        get=total / middle["warm_retrieve"],
        batched=pages / middle["warm_lookup"] * 1e3,
    )


if __name__ == "__main__":
    names = {"one": "LMCache, a page in 2 pieces", "many": "LMCache, a page in 64 pieces"}
    sys.exit(main(Store, servers, names, own))
