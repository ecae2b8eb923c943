"""`Worker`: requests in, tokens out, with continuous batching over pages of kvtierd.

One thread owns the loop. A step admits what waits, runs the model once over the next tokens of all running sequences
(prompts in chunks, answers a token at a time, together), chooses tokens, and sends errands for pages. It never waits for
kvtierd while there is something to compute.

Memory is kvtierd's: the worker borrows what is cached, reserves ahead of need, publishes pages the moment they are whole.

Not here: who runs and what is asked for them (`roster`), which tokens run next (`schedule`), how they are chosen
(`sampling`), what a sequence holds (`chain`).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence as Run
from types import TracebackType
from typing import Any, Self

import torch

from kvtier.errors import DaemonLost, Draining, InvalidRequest, KvtierError
from kvtier_client.client import Client
from kvtier_client.namespace import NamespaceClient
from kvtier_client.transformers import attention, sampling
from kvtier_client.transformers.attention import PagedCache, Part
from kvtier_client.transformers.batches import make_batch
from kvtier_client.transformers.errands import Terms
from kvtier_client.transformers.model import cache_argument, check_device, describe, open_namespace, weights_digest
from kvtier_client.transformers.requests import Request, RequestFailed, Token
from kvtier_client.transformers.roster import PAUSE, Roster
from kvtier_client.transformers.sampling import Row, Sampling
from kvtier_client.transformers.schedule import plan
from kvtier_client.transformers.sequence import Sequence, State

_LOG = logging.getLogger(__name__)
_SALTS = 256
"""Namespaces that are kept open besides the one without a salt."""


class Worker:
    """Serves `model`, a Transformers decoder, on pages of the daemon that `client` is attached to.

    `max_batch`: sequences that run at once. `step_tokens`: at most so many in a forward pass, decoding ones first.
    `max_length`: tokens of a sequence, what the model was made for by default. `tier`: where pages are borrowed and
    written ("cuda" for the memory of the client's GPU; "any" reads them where they lie). `patience`: seconds that a
    request may wait for frames, or for a lost daemon. `cuda_graphs`: replay decode steps (on a GPU). `revision` and `name`
    as in `open_namespace`.

    The model's attention implementation is replaced until `close`. A context manager: starts, and closes.
    """

    def __init__(
        self,
        model: Any,
        client: Client,
        *,
        max_batch: int = 64,
        step_tokens: int | None = None,
        max_length: int | None = None,
        tier: str | None = None,
        patience: float = 30.0,
        name: str = "",
        revision: str = "",
        unit_tokens: int = 16,
        cap_tokens: int = 256,
        cuda_graphs: bool = True,
    ) -> None:
        check_device(model, client)
        self.model = model
        self.client = client
        self.description = describe(model, unit_tokens=unit_tokens)
        self.device: torch.device = model.device
        self.max_batch = max_batch
        self.step_tokens = step_tokens or (512 if self.device.type == "cpu" else 4096)
        self.max_length = max_length or self.description.longest or (1 << 31)
        self.patience = patience
        on_gpu = self.device.type == "cuda"
        self._naming: dict[str, Any] = {
            "name": name,
            "revision": revision or weights_digest(model),
            "unit_tokens": unit_tokens,
            "cap_tokens": cap_tokens,
        }
        self._spaces: dict[str, NamespaceClient] = {"": open_namespace(client, model, **self._naming)}
        self._cache_argument = cache_argument(model)
        self._cache = PagedCache(self.description.layout)
        self._decoder: Any = self._make_decoder(cuda_graphs) if on_gpu else None
        attention.lend(model)

        self._inbox: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._unopened: deque[tuple[Request, float]] = deque()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self.counters = {"steps": 0, "tokens": 0, "prefilled": 0, "borrowed": 0, "preempted": 0, "restarted": 0}
        self._next_opening = 0.0
        self._step_began = 0.0
        self.roster = Roster(
            most=max_batch,
            ahead=4 * self.step_tokens,
            terms=Terms(tier or ("cuda" if on_gpu else "any"), borrow=10.0, reserve=0.25),
            patience=patience,
            event=self._event,
            forget=self._forget,
            wake=self._wake,
            counters=self.counters,
        )

    # What a caller does

    def submit(self, tokens: Run[int], sampling: Sampling = Sampling(), *, salt: str = "") -> Request:  # noqa: B008
        """Queue a request and return at once; any thread may. `salt` keeps its pages apart from those of other salts.

        Raises InvalidRequest for tokens or wishes that the model or this worker cannot serve.
        """
        prompt = list(tokens)
        if not prompt:
            raise InvalidRequest(
                "the prompt is empty: there is nothing to go on from; begin with the model's first token"
            )
        if min(prompt) < 0 or max(prompt) >= self.description.vocabulary:
            raise InvalidRequest(f"token ids must be from 0 to {self.description.vocabulary - 1}")
        if len(prompt) >= self.max_length:
            raise InvalidRequest(f"the prompt has {len(prompt)} tokens, a sequence may have {self.max_length}")
        if sampling.n > self.max_batch:
            raise InvalidRequest(f"n is {sampling.n}, this worker runs {self.max_batch} sequences at once")
        if self._stop.is_set():
            raise RequestFailed("the worker is closed")
        request = Request(prompt, sampling, salt)
        self._inbox.put(request)
        self._wake.set()
        return request

    def start(self) -> Self:
        """Run the loop in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="kvtier-worker", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """End the loop; what is not finished fails. Gives all pages back, and the model its attention. Once is enough."""
        if self._closed:
            return
        self._closed = True
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._fail_all(RequestFailed("the worker was closed"))
        self.roster.close()
        attention.take_back(self.model)

    @property
    def in_step(self) -> float:
        """Seconds that the step under way has taken; 0 between steps. Any thread may ask."""
        began = self._step_began
        return time.monotonic() - began if began else 0.0

    def step(self) -> bool:
        """One turn of the loop, for those who run it themselves. Whether there is anything left to do."""
        self._step_began = time.monotonic()
        try:
            return self._turn()
        finally:
            self._step_began = 0.0

    def _turn(self) -> bool:
        self._receive()
        self.roster.cancel()
        work = plan(self.roster.running, self.step_tokens)
        if work:
            self._compute(work)
        else:
            self.roster.keep_house()
        busy = self.roster.busy or bool(self._unopened) or not self._inbox.empty()
        if busy and not work:
            self._idle(PAUSE / 5)
        return busy

    def check(self) -> None:
        """Assert what holds between steps."""
        self.roster.check()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The loop

    def _make_decoder(self, graphs: bool) -> Any:
        from kvtier_client.transformers.decoding import Decoder  # it brings Triton

        rope = getattr(self.model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
        looks = rope.get("rope_type") in ("dynamic", "longrope")  # at positions, on the host: not to be captured
        return Decoder(
            self._run_model,
            self.description.layout,
            self.device,
            rows=self.max_batch,
            longest=min(self.max_length, 1 << 20),
            graphs=graphs and not looks,
        )

    def _run(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        while not self._stop.is_set():
            try:
                if not self.step():
                    self._wake.wait()
                    self._wake.clear()
            except Exception as error:  # noqa: BLE001 - the loop outlives whatever a model raises
                _LOG.exception("a step failed; its requests fail with it")
                self._fail_all(RequestFailed(f"the worker failed in a step: {type(error).__name__}: {error}"))

    def _receive(self) -> None:
        while not self._inbox.empty():
            self._unopened.append((self._inbox.get_nowait(), time.monotonic()))
        if not self._unopened or time.monotonic() < self._next_opening:
            return
        unopened, self._unopened = self._unopened, deque()
        for request, since in unopened:
            self._open(request, since)

    def _open(self, request: Request, since: float) -> None:
        """Find the request's namespace; while kvtierd is lost, later."""
        try:
            space = self._space(request.salt)
        except (DaemonLost, Draining) as error:
            if request.cancelled.is_set():
                request.end_all("cancelled")
            elif time.monotonic() - since > self.patience:
                request.fail(RequestFailed(f"no pages within {self.patience:g} s: {error}"))
            else:
                self._unopened.append((request, since))
                self._next_opening = time.monotonic() + PAUSE
            return
        except KvtierError as error:
            request.fail(RequestFailed(f"its namespace could not be opened: {error}"))
            return
        limit = min(len(request.prompt) + request.sampling.max_tokens, self.max_length)
        sequence = Sequence(request, 0, space, list(request.prompt), limit, self.device)
        self.roster.add(sequence)

    def _space(self, salt: str) -> NamespaceClient:
        if salt not in self._spaces:
            if len(self._spaces) > _SALTS:  # a salt a user adds up; what still runs keeps its own
                self._spaces.pop(next(other for other in self._spaces if other))
            self._spaces[salt] = open_namespace(self.client, self.model, salt=salt, **self._naming)
        return self._spaces[salt]

    # Computing

    def _compute(self, work: list[tuple[Sequence, int]]) -> None:
        complete = [sequence for sequence, count in work if count == sequence.left]
        try:
            logits = self._forward(work)
            for sequence, count in work:
                sequence.advance(count)
            self.roster.keep_house()  # while the device computes
            self._advance(complete, logits)
        except torch.OutOfMemoryError as error:
            for sequence, _ in work:
                self.roster.fail(sequence, RequestFailed(f"no memory for a forward pass: {error}; lower step_tokens"))
        self.counters["steps"] += 1
        self.counters["prefilled"] += sum(count for _, count in work if count > 1)

    @torch.inference_mode()
    def _forward(self, work: list[tuple[Sequence, int]]) -> torch.Tensor:
        """Logits after the last token of each sequence that is complete with this pass."""
        if self._decoder is not None and all(sequence.left == 1 for sequence, _ in work):
            decoded: torch.Tensor = self._decoder([sequence for sequence, _ in work])
            return decoded
        ids: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        parts: list[Part] = []
        for sequence, count in work:
            parts.append(Part(sequence, sequence.computed, count, len(ids)))
            ids += sequence.tokens[sequence.computed : sequence.computed + count]
            positions += range(sequence.computed, sequence.computed + count)
            if count == sequence.left:
                last.append(len(ids) - 1)
        batch = make_batch(self.description.layout, parts, self.device)
        given, where, keep = (
            torch.tensor(numbers, dtype=torch.long, device=self.device) for numbers in (ids, positions, last)
        )
        return self._run_model(given[None], where[None], self._cache.over(batch), keep)[0]

    def _run_model(
        self, ids: torch.Tensor, positions: torch.Tensor, cache: PagedCache, keep: torch.Tensor | int = 0
    ) -> torch.Tensor:
        """Logits `[1, rows, vocabulary]` of the rows in `keep`, or of all."""
        options = {self._cache_argument: cache, "logits_to_keep": keep, "use_cache": True}
        logits: torch.Tensor = self.model(input_ids=ids, position_ids=positions, **options).logits
        return logits

    @torch.inference_mode()
    def _advance(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        """A token more for each that still runs; samples of a prompt part ways with their first."""
        index: list[int] = []
        everyone: list[Sequence] = []
        for at, sequence in enumerate(sequences):
            if sequence.state is not State.RUNNING:  # it made room, or its caller went, while the device computed
                continue
            sample_of = [sequence]
            for sample in range(1, sequence.samples):
                child = sequence.fork(sample, self.device)
                self.roster.running.append(child)
                sample_of.append(child)
            everyone += sample_of
            index += [at] * len(sample_of)
        if not everyone:
            return
        rows = [Row(s.request.sampling, s.tokens, s.generator) for s in everyone]
        for sequence, choice in zip(everyone, sampling.choose(logits[index], rows), strict=True):
            request = sequence.request
            sequence.tokens.append(choice.token)
            self.counters["tokens"] += 1
            request.put(Token(sequence.sample, *choice))
            wanted = request.sampling
            stops = wanted.stop_tokens if wanted.ignore_eos else wanted.stop_tokens | self.description.stops
            if choice.token in stops:
                self.roster.end(sequence, "stop")
            elif len(sequence.tokens) >= sequence.limit:
                self.roster.end(sequence, "length")

    def _fail_all(self, error: KvtierError) -> None:
        while not self._inbox.empty():
            self._inbox.get_nowait().fail(error)
        while self._unopened:
            self._unopened.popleft()[0].fail(error)
        self.roster.fail_all(error)

    def _forget(self, sequence: Sequence) -> None:
        if self._decoder is not None:
            self._decoder.forget(sequence)

    def _event(self) -> Any:
        """Of the stream that the model runs on, as far as it has been given work; None on the CPU, which is done."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def _idle(self, seconds: float) -> None:
        """Wait until an errand is done or a request comes, at most so long."""
        self._wake.wait(seconds)
        self._wake.clear()
