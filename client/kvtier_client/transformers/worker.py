"""`Worker`: requests in, tokens out, with continuous batching over pages of kvtierd.

One thread owns the loop. A step admits what waits, runs the model once over the next tokens of all running sequences
(prompts in chunks, answers a token at a time, together), chooses tokens, and sends errands for pages. It never waits for
kvtierd while there is something to compute.

Memory is kvtierd's: the worker borrows what is cached, reserves ahead of need, publishes pages the moment they are whole.
When frames run out the youngest sequence makes room: its whole pages stay in kvtierd, which may demote them, and it
borrows them again later. When kvtierd is lost, all that runs is started again when it is back, or fails after `patience`.

Not here: what a sequence holds (`sequence`), which tokens run next (`schedule`), how they are chosen (`sampling`).
"""

from __future__ import annotations

import inspect
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Run
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import torch

from kvtier.errors import DaemonLost, Draining, InvalidRequest, KvtierError, OutOfPages
from kvtier_client.client import Client
from kvtier_client.namespace import NamespaceClient
from kvtier_client.transformers import attention, errands, sampling
from kvtier_client.transformers.attention import PagedCache, Part
from kvtier_client.transformers.batches import make_batch
from kvtier_client.transformers.errands import Answer, Terms
from kvtier_client.transformers.model import describe, open_namespace, weights_digest
from kvtier_client.transformers.paging import Leftovers, Page
from kvtier_client.transformers.requests import Request, RequestFailed, Token
from kvtier_client.transformers.sampling import Row, Sampling
from kvtier_client.transformers.schedule import plan
from kvtier_client.transformers.sequence import Sequence, State

_LOG = logging.getLogger(__name__)
_AHEAD = 16
"""Tokens that there are frames for beyond those that are known: several steps, so that the next frames are there in time."""
_PAUSE = 0.05
"""Seconds before an admission that found no frames, or no daemon, is tried again."""
_TIGHT = 2.0
"""Seconds that frames are taken to be short after they were."""
_CLERKS = 4
_SALTS = 256
"""Namespaces that are kept open besides the one without a salt."""


class Worker:
    """Serves `model`, a Transformers decoder, on pages of the daemon that `client` is attached to.

    `max_batch`: sequences that run at once. `step_tokens`: at most so many in a forward pass, decoding ones first.
    `max_length`: tokens of a sequence, what the model was made for by default. `tier`: where pages are borrowed and
    written ("cuda" for the memory of the client's GPU; "any" reads them where they lie). `patience`: seconds that a
    request may wait for frames, or for a lost daemon. `cuda_graphs`: replay decode steps (on a GPU). `revision` and `name` as in `open_namespace`.

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
        if model.device.type == "cuda" and (client.gpu is None or client.gpu.ordinal != (model.device.index or 0)):
            raise InvalidRequest(f"the model is on {model.device}, the client is not: Client(device='{model.device}')")
        self.model = model
        self.client = client
        self.description = describe(model, unit_tokens=unit_tokens)
        self.device: torch.device = model.device
        self.max_batch = max_batch
        self.step_tokens = step_tokens or (512 if self.device.type == "cpu" else 4096)
        self.max_length = max_length or self.description.longest or (1 << 31)
        self.patience = patience
        on_gpu = self.device.type == "cuda"
        self._terms = Terms(tier or ("cuda" if on_gpu else "any"), borrow=10.0, reserve=0.25)
        self._naming: dict[str, Any] = {
            "name": name,
            "revision": revision or weights_digest(model),
            "unit_tokens": unit_tokens,
            "cap_tokens": cap_tokens,
        }
        self._spaces: dict[str, NamespaceClient] = {"": open_namespace(client, model, **self._naming)}
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._cache = PagedCache(self.description.layout)
        self._decoder: Any = self._make_decoder(cuda_graphs) if on_gpu else None
        attention.lend(model)

        self._inbox: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._unopened: deque[tuple[Request, float]] = deque()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._leaving: list[tuple[Sequence, bool]] = []
        self._asked: dict[int, list[Page]] = {}
        self._partings: set[Future[None]] = set()
        self._clerks = ThreadPoolExecutor(_CLERKS, thread_name_prefix="kvtier-clerk")
        self._arrivals = 0
        self._next_admission = 0.0
        self._tight = 0.0
        self._lost = False
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self.counters = {"steps": 0, "tokens": 0, "prefilled": 0, "borrowed": 0, "preempted": 0, "restarted": 0}

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
        while self._leaving or self._partings:
            self._collect()
            self._idle(0.01)
        self._clerks.shutdown()
        attention.take_back(self.model)

    def step(self) -> bool:
        """One turn of the loop, for those who run it themselves. Whether there is anything left to do."""
        self._receive()
        self._cancel()
        work = plan(self._running, self.step_tokens)
        if work:
            self._compute(work)
        else:
            self._keep_house()
        busy = bool(
            self._running
            or self._waiting
            or self._leaving
            or self._partings
            or self._unopened
            or not self._inbox.empty()
        )
        if busy and not work:
            self._idle(_PAUSE / 5)
        return busy

    def check(self) -> None:
        """Assert what holds between steps."""
        for sequence in self._running:
            sequence.check()
        assert all(sequence.state is State.WAITING and not sequence.pages for sequence in self._waiting)

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
        if not self._unopened or time.monotonic() < self._next_admission:
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
                self._all_end(request, "cancelled")
            elif time.monotonic() - since > self.patience:
                request.fail(RequestFailed(f"no pages within {self.patience:g} s: {error}"))
            else:
                self._unopened.append((request, since))
                self._next_admission = time.monotonic() + _PAUSE
            return
        except KvtierError as error:
            request.fail(RequestFailed(f"its namespace could not be opened: {error}"))
            return
        limit = min(len(request.prompt) + request.sampling.max_tokens, self.max_length)
        sequence = Sequence(request, 0, space, list(request.prompt), limit, self.device)
        self._arrivals += 1
        sequence.age = (self._arrivals, 0)
        self._waiting.append(sequence)

    def _space(self, salt: str) -> NamespaceClient:
        if salt not in self._spaces:
            if len(self._spaces) > _SALTS:  # a salt a user adds up; what still runs keeps its own
                self._spaces.pop(next(other for other in self._spaces if other))
            self._spaces[salt] = open_namespace(self.client, self.model, salt=salt, **self._naming)
        return self._spaces[salt]

    def _cancel(self) -> None:
        for sequence in [*self._running, *self._waiting]:
            if sequence.request.cancelled.is_set():
                self._end(sequence, "cancelled")
        for sequence, _ in self._leaving:
            if sequence.request.cancelled.is_set():
                self._finish(sequence, "cancelled")

    def _admit(self) -> None:
        """Send for the pages of what waits, oldest first, as far as there is room in the batch. While frames are short,
        one at a time, and none while a running sequence lacks any: who came first goes on first."""
        now = time.monotonic()
        tight = now < self._tight
        if now < self._next_admission or any(sequence.lacking for sequence in self._running):
            return
        asked = sum(self._samples(sequence) for sequence in self._waiting if sequence.errand is not None)
        room = self.max_batch - len(self._running) - asked
        for sequence in self._waiting:
            if sequence.errand is not None:
                if tight:
                    return
                continue
            room -= self._samples(sequence)
            if room < 0:
                return
            tokens, goal = list(sequence.tokens), sequence.goal(_AHEAD)
            sequence.errand = self._send(errands.fetch, sequence.space, tokens, goal, self._terms, tight)

    def _samples(self, sequence: Sequence) -> int:
        """How many sequences it is going to be: the first pass over a prompt is one of all its samples."""
        return sequence.request.sampling.n if len(sequence.tokens) == sequence.request.prompt_tokens else 1

    def _collect(self) -> None:
        """Apply the answers that have come. One may send other sequences away (a lost daemon, a failed request); theirs
        are then applied as those of sequences that leave."""
        for sequence in list(self._waiting):
            if sequence in self._waiting and _done(sequence):
                self._arrive(sequence)
        for sequence in list(self._running):
            if sequence in self._running and _done(sequence):
                self._apply(sequence)
        for item in [item for item in self._leaving if item[0].errand is None or _done(item[0])]:
            self._leaving.remove(item)
            if item[0].errand is not None:
                self._apply(item[0], leaving=True)
            self._part(item[0], requeue=item[1])
        self._partings = {parting for parting in self._partings if not parting.done()}

    def _arrive(self, sequence: Sequence) -> None:
        """The first pages of a sequence have come, or not."""
        answer = self._answer(sequence)
        if answer is None:
            return
        if answer.starved is not None and not answer.reserved:
            leftovers = Leftovers()
            leftovers.drop(answer.borrowed)
            self._give_back(leftovers)
            self._run_short()
            if not self._running:
                self._expire(sequence, answer.starved)
            return
        self._waiting.remove(sequence)
        sequence.begin(answer)
        sequence.state = State.RUNNING
        self._running.append(sequence)
        self.counters["borrowed"] += sequence.computed
        if len(sequence.tokens) == sequence.request.prompt_tokens:
            sequence.request.cached_tokens = sequence.computed

    def _apply(self, sequence: Sequence, *, leaving: bool = False) -> None:
        """A running sequence's pages were published, or more were reserved."""
        asked = self._asked.pop(id(sequence), [])
        answer = self._answer(sequence)
        if answer is None:
            for page in asked:
                page.asked = False
            return
        leftovers = Leftovers()
        if asked:
            sequence.settle(asked, answer, leftovers)
        elif answer.borrowed:
            sequence.begin(answer)  # it left before its first pages came
        else:
            sequence.extend(answer)
            sequence.lacking = False
            if sequence.source is not None and sequence.capacity >= sequence.computed + sequence.source.tokens:
                sequence.adopt(leftovers)
        self._give_back(leftovers)
        if answer.starved is not None and not answer.reserved and not leaving:
            self._make_room(sequence, answer.starved)

    def _answer(self, sequence: Sequence) -> Answer | None:
        """What an errand brought; None when it failed, which is dealt with here."""
        errand, sequence.errand = sequence.errand, None
        assert errand is not None
        try:
            answer: Answer = errand.result()
        except (DaemonLost, Draining) as error:
            self._lose(error)
        except KvtierError as error:
            self._fail(sequence, RequestFailed(f"kvtierd refused it pages: {error}"))
        else:
            self._lost = False
            return answer
        return None

    def _send_errands(self) -> None:
        for sequence in self._running:
            if sequence.errand is not None:
                continue
            pages = sequence.unpublished()
            if pages:
                for page in pages:
                    page.asked = True
                self._asked[id(sequence)] = pages
                tokens = sequence.tokens[: sequence.computed]
                sequence.errand = self._send(errands.publish, sequence.space, tokens, pages, self._terms, self._event())
            elif sequence.short_of(_AHEAD) and time.monotonic() >= self._next_admission:
                first, goal = len(sequence.pages), sequence.goal(_AHEAD)
                sequence.errand = self._send(errands.reserve, sequence.space, first, goal, self._terms)

    # When things do not go on

    def _run_short(self) -> None:
        now = time.monotonic()
        self._next_admission = now + _PAUSE
        self._tight = now + _TIGHT

    def _make_room(self, sequence: Sequence, error: OutOfPages) -> None:
        """No frames for a running sequence. If it cannot go on without, the youngest makes room, itself or another; if it
        is alone, itself: what it holds may be what keeps memory from being carved anew."""
        self._run_short()
        if sequence.capacity > sequence.computed:
            return
        sequence.lacking = True
        self._expire(sequence, error)
        if sequence.state is State.RUNNING:
            self.counters["preempted"] += 1
            self._leave(max(self._running, key=lambda other: other.age), requeue=True)

    def _expire(self, sequence: Sequence, error: KvtierError) -> None:
        """Note that it waits for kvtierd; fail it when it has waited too long."""
        now = time.monotonic()
        if sequence.starved_since is None:
            sequence.starved_since = now
        if now - sequence.starved_since > self.patience:
            self._fail(sequence, RequestFailed(f"no pages within {self.patience:g} s: {error}"))

    def _lose(self, error: KvtierError) -> None:
        """kvtierd is gone or going: what its pages held is to be had again when it is back, or to be computed."""
        now = time.monotonic()
        if not self._lost:
            _LOG.warning("kvtierd is lost (%s): %d requests start again when it is back", error, len(self._running))
        self._lost = True
        self._next_admission = now + _PAUSE
        for sequence in list(self._running):
            self.counters["restarted"] += 1
            self._leave(sequence, requeue=True)
        for sequence in list(self._waiting):
            self._expire(sequence, error)

    def _leave(self, sequence: Sequence, *, requeue: bool) -> None:
        """Out of the batch; what it holds is given back when its errand is done."""
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        sequence.state = State.WAITING if requeue else State.ENDED
        sequence.lacking = False
        if self._decoder is not None:
            self._decoder.forget(sequence)
        if sequence.errand is not None:
            self._leaving.append((sequence, requeue))
        else:
            self._part(sequence, requeue=requeue)

    def _part(self, sequence: Sequence, *, requeue: bool) -> None:
        """Give back what it holds, published as far as it is whole."""
        whole = sequence.unpublished()
        leftovers = Leftovers()
        for page in whole:
            page.refs += 1
        tokens = sequence.tokens[: sequence.computed]
        sequence.clear(leftovers)
        leftovers.drop(whole)
        whole = [page for page in whole if page.refs == 0]
        if whole or leftovers:
            self._partings.add(self._send(errands.part, sequence.space, tokens, whole, leftovers, self._event()))
        if requeue and sequence.state is State.WAITING:
            self._waiting.appendleft(sequence)

    def _end(self, sequence: Sequence, how: str) -> None:
        self._finish(sequence, how)
        self._leave(sequence, requeue=False)

    def _finish(self, sequence: Sequence, how: str) -> None:
        """Tell the caller; of a prompt that had not been forked yet, for all its samples."""
        sequence.state = State.ENDED
        request = sequence.request
        if self._samples(sequence) > 1:
            self._all_end(request, how)
        else:
            request.end(sequence.sample, how)

    def _all_end(self, request: Request, how: str) -> None:
        for sample in range(request.sampling.n):
            request.end(sample, how)

    def _fail(self, sequence: Sequence, error: KvtierError) -> None:
        sequence.request.fail(error)
        for other in [*self._running, *self._waiting]:
            if other.request is sequence.request:
                self._leave(other, requeue=False)
        for other, _ in self._leaving:
            if other.request is sequence.request:
                other.state = State.ENDED
        if sequence.state is not State.ENDED:
            self._leave(sequence, requeue=False)

    def _fail_all(self, error: KvtierError) -> None:
        while not self._inbox.empty():
            self._inbox.get_nowait().fail(error)
        while self._unopened:
            self._unopened.popleft()[0].fail(error)
        for sequence in [*self._running, *self._waiting]:
            if sequence.state is not State.ENDED:
                self._fail(sequence, error)
        for sequence, _ in self._leaving:
            if sequence.state is not State.ENDED:
                sequence.request.fail(error)
                sequence.state = State.ENDED

    def _keep_house(self) -> None:
        """What is done beside a forward pass: send for pages, and take in what has come."""
        self._send_errands()
        self._collect()
        self._admit()

    # Computing

    def _compute(self, work: list[tuple[Sequence, int]]) -> None:
        complete = [sequence for sequence, count in work if count == sequence.left]
        try:
            logits = self._forward(work)
            for sequence, count in work:
                sequence.advance(count)
            self._keep_house()  # while the device computes
            self._advance(complete, logits)
        except torch.OutOfMemoryError as error:
            for sequence, _ in work:
                self._fail(sequence, RequestFailed(f"no memory for a forward pass: {error}; lower step_tokens"))
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
            for sample in range(1, self._samples(sequence)):
                child = sequence.fork(sample, self.device)
                self._running.append(child)
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
                self._end(sequence, "stop")
            elif len(sequence.tokens) >= sequence.limit:
                self._end(sequence, "length")

    # Errands

    def _send(self, errand: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future = self._clerks.submit(errand, *arguments)
        future.add_done_callback(lambda _: self._wake.set())
        return future

    def _give_back(self, leftovers: Leftovers) -> None:
        if leftovers:
            self._partings.add(self._send(leftovers.give_back, self._event()))

    def _event(self) -> Any:
        """Of the stream that the model runs on, as far as it has been given work; None on the CPU, which is done."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def _idle(self, seconds: float) -> None:
        """Wait until an errand is done or a request comes, at most so long."""
        self._wake.wait(seconds)
        self._wake.clear()


def _done(sequence: Sequence) -> bool:
    return sequence.errand is not None and sequence.errand.done()
