"""Who runs, who waits, and who is leaving: sequences and what is asked of kvtierd for them.

The roster belongs to the worker's loop. It sends errands and applies their answers in later turns, so no turn waits for
kvtierd. When frames run out the youngest sequence makes room: its whole pages stay in kvtierd, and it borrows them again.
When kvtierd is lost, all that runs waits until it is back, at most `patience`, and starts again from what is there then.

Not here: computing (`worker`), what an errand does (`errands`), what a sequence holds (`chain`).
"""

from __future__ import annotations

import bisect
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from kvtier.errors import DaemonLost, Draining, KvtierError, OutOfPages
from kvtier_client.transformers import errands
from kvtier_client.transformers.errands import Answer, Terms
from kvtier_client.transformers.paging import Leftovers, Page
from kvtier_client.transformers.requests import RequestFailed
from kvtier_client.transformers.sequence import Sequence, State

_LOG = logging.getLogger(__name__)
_AHEAD = 16
"""Tokens that there are frames for beyond those that are known: several steps, so that the next frames are there in time."""
PAUSE = 0.05
"""Seconds before what found no frames, or no daemon, is tried again."""
_TIGHT = 2.0
"""Seconds that frames are taken to be short after they were."""
_HASTE = 0.02
"""Seconds to wait for frames while they are short: who gets none had better hear of it, so that another makes room."""
_CLERKS = 4
_USHERS = 2
"""Threads for errands of sequences that run, and of those that wait: these may have to wait for frames, and keep no others."""


class Roster:
    """`most`: sequences that run at once. `ahead`: tokens of prompts that pages are fetched for before they are computed;
    more would only take frames from those that are. `event()`: of what the device has been given so far.
    `forget(sequence)` is called when one leaves the batch. `wake` is set when an errand is done. `counters` are the
    worker's."""

    def __init__(
        self,
        *,
        most: int,
        ahead: int,
        terms: Terms,
        patience: float,
        event: Callable[[], Any],
        forget: Callable[[Sequence], None],
        wake: threading.Event,
        counters: dict[str, int],
    ) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.counters = counters
        self._most = most
        self._ahead = ahead
        self._terms = terms
        self._patience = patience
        self._event = event
        self._forget = forget
        self._wake = wake
        self._leaving: list[tuple[Sequence, bool]] = []
        self._asked: dict[int, list[Page]] = {}
        self._partings: set[Future[None]] = set()
        self._yielding: set[Future[None]] = set()
        """Those of the partings that make room."""
        self._reserving: set[Future[Answer]] = set()
        self._clerks = ThreadPoolExecutor(_CLERKS, thread_name_prefix="kvtier-clerk")
        self._ushers = ThreadPoolExecutor(_USHERS, thread_name_prefix="kvtier-usher")
        self._arrivals = 0
        self._next_admission = 0.0
        self._tight = 0.0
        self._lost = False

    @property
    def busy(self) -> bool:
        """Whether anything runs, waits, or is still to be given back."""
        return bool(self.running or self.waiting or self._leaving or self._partings)

    def add(self, sequence: Sequence) -> None:
        """The newest of those that wait."""
        self._arrivals += 1
        sequence.age = (self._arrivals, 0)
        self.waiting.append(sequence)

    def close(self) -> None:
        """Wait until all is given back; nobody may be running or waiting."""
        while self._leaving or self._partings:
            self._collect()
            self._wake.wait(0.01)
            self._wake.clear()
        self._clerks.shutdown()
        self._ushers.shutdown()

    def check(self) -> None:
        for sequence in self.running:
            sequence.check()
        assert all(sequence.state is State.WAITING and not sequence.pages for sequence in self.waiting)
        assert self.waiting == sorted(self.waiting, key=_age)

    def cancel(self) -> None:
        for sequence in [*self.running, *self.waiting]:
            if _unwanted(sequence):
                self.end(sequence, "cancelled")
        for sequence, _ in self._leaving:
            if _unwanted(sequence):
                self._finish(sequence, "cancelled")

    def _admit(self) -> None:
        """Send for the pages of what waits, oldest first, as far as there is room in the batch. While frames are short,
        one at a time, and none while a running sequence lacks any: who came first goes on first."""
        now = time.monotonic()
        tight = now < self._tight
        if now < self._next_admission or any(sequence.lacking for sequence in self.running):
            return
        room = self._most - len(self.running)
        ahead = self._ahead - sum(sequence.left for sequence in self.running)
        for sequence in self.waiting:
            room -= sequence.samples
            if room < 0 or ahead <= 0 or (tight and sequence.errand is not None):
                return
            ahead -= sequence.left
            if sequence.errand is None:
                tokens, goal = list(sequence.tokens), sequence.goal(_AHEAD)
                arguments = sequence.space, tokens, goal, self._terms, tight
                sequence.errand = self._send(errands.fetch, *arguments, by=self._ushers)

    def _collect(self) -> None:
        """Apply the answers that have come. One may send other sequences away (a lost daemon, a failed request); theirs
        are then applied as those of sequences that leave."""
        for sequence in list(self.waiting):
            if sequence in self.waiting and _done(sequence):
                self._arrive(sequence)
        for sequence in list(self.running):
            if sequence in self.running and _done(sequence):
                self._apply(sequence)
        for item in [item for item in self._leaving if _done(item[0])]:
            self._leaving.remove(item)
            self._apply(item[0], leaving=True)
            self._part(item[0], requeue=item[1])
        self._partings = {parting for parting in self._partings if not parting.done()}
        self._yielding &= self._partings

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
            if not self.running:
                self._expire(sequence, answer.starved)
            return
        self.waiting.remove(sequence)
        sequence.begin(answer)
        sequence.state = State.RUNNING
        self.running.append(sequence)
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
            self.fail(sequence, RequestFailed(f"kvtierd refused it pages: {error}"))
        else:
            self._lost = False
            return answer
        return None

    def _send_errands(self) -> None:
        """Publish what is whole, and reserve ahead of need. While frames are short, only for those that cannot go on, and
        the oldest first: there would be no end to the errands of the others."""
        now = time.monotonic()
        tight = now < self._tight
        terms = replace(self._terms, reserve=_HASTE) if tight else self._terms
        self._reserving = {errand for errand in self._reserving if not errand.done()}
        for sequence in self.running:
            if sequence.errand is not None:
                continue
            pages = sequence.unpublished()
            if pages:
                for page in pages:
                    page.asked = True
                self._asked[id(sequence)] = pages
                tokens = sequence.tokens[: sequence.computed]
                sequence.errand = self._send(errands.publish, sequence.space, tokens, pages, self._terms, self._event())
                continue
            if tight and (sequence.capacity > sequence.computed or len(self._reserving) >= 8 * _CLERKS):
                continue
            if sequence.short_of(_AHEAD) and not self._making_room:
                first, goal = len(sequence.pages), sequence.goal(_AHEAD)
                sequence.errand = self._send(errands.reserve, sequence.space, first, goal, terms)
                self._reserving.add(sequence.errand)

    def keep_house(self) -> None:
        """What is done beside a forward pass: send for pages, and take in what has come."""
        self._send_errands()
        self._collect()
        self._admit()

    @property
    def _making_room(self) -> bool:
        """Whether a sequence is on its way out whose frames are for those that lack some."""
        return bool(self._yielding) or any(requeue for _, requeue in self._leaving)

    def _run_short(self) -> None:
        now = time.monotonic()
        self._next_admission = now + PAUSE
        self._tight = now + _TIGHT

    def _make_room(self, sequence: Sequence, error: OutOfPages) -> None:
        """No frames for a running sequence. If it cannot go on without, the youngest makes room, itself or another; if it
        is alone, itself: what it holds may be what keeps memory from being carved anew."""
        self._run_short()
        if sequence.capacity > sequence.computed:
            return
        sequence.lacking = True
        self._expire(sequence, error)
        if sequence.state is State.RUNNING and not self._making_room:
            self.counters["preempted"] += 1
            self._leave(max(self.running, key=_age), requeue=True)

    def _expire(self, sequence: Sequence, error: KvtierError) -> None:
        """Note that it waits for kvtierd; fail it when it has waited too long."""
        now = time.monotonic()
        if sequence.starved_since is None:
            sequence.starved_since = now
        if now - sequence.starved_since > self._patience:
            self.fail(sequence, RequestFailed(f"no pages within {self._patience:g} s: {error}"))

    def _lose(self, error: KvtierError) -> None:
        """kvtierd is gone or going: what its pages held is to be had again when it is back, or to be computed."""
        now = time.monotonic()
        if not self._lost:
            _LOG.warning("kvtierd is lost (%s): %d requests start again when it is back", error, len(self.running))
        self._lost = True
        self._next_admission = now + PAUSE
        for sequence in list(self.running):
            self.counters["restarted"] += 1
            self._leave(sequence, requeue=True)
        for sequence in list(self.waiting):
            self._expire(sequence, error)

    def _leave(self, sequence: Sequence, *, requeue: bool) -> None:
        """Out of the batch; what it holds is given back when its errand is done."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.state = State.WAITING if requeue else State.ENDED
        sequence.lacking = False
        self._forget(sequence)
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
            parting = self._send(errands.part, sequence.space, tokens, whole, leftovers, self._event())
            self._partings.add(parting)
            if requeue:
                self._yielding.add(parting)
        if requeue and sequence.state is State.WAITING:
            bisect.insort(self.waiting, sequence, key=_age)

    def end(self, sequence: Sequence, how: str) -> None:
        self._finish(sequence, how)
        self._leave(sequence, requeue=False)

    def _finish(self, sequence: Sequence, how: str) -> None:
        """Tell the caller; of a prompt that had not been forked yet, for all its samples."""
        sequence.state = State.ENDED
        request = sequence.request
        if sequence.samples > 1:
            request.end_all(how)
        else:
            request.end(sequence.sample, how)

    def fail(self, sequence: Sequence, error: KvtierError) -> None:
        sequence.request.fail(error)
        for other in [*self.running, *self.waiting]:
            if other.request is sequence.request:
                self._leave(other, requeue=False)
        for other, _ in self._leaving:
            if other.request is sequence.request:
                other.state = State.ENDED
        if sequence.state is not State.ENDED:
            self._leave(sequence, requeue=False)

    def fail_all(self, error: KvtierError) -> None:
        for sequence in [*self.running, *self.waiting]:
            if sequence.state is not State.ENDED:
                self.fail(sequence, error)
        for sequence, _ in self._leaving:
            if sequence.state is not State.ENDED:
                sequence.request.fail(error)
                sequence.state = State.ENDED

    def _send(self, errand: Callable[..., Any], *arguments: Any, by: ThreadPoolExecutor | None = None) -> Future[Any]:
        future = (by or self._clerks).submit(errand, *arguments)
        future.add_done_callback(lambda _: self._wake.set())
        return future

    def _give_back(self, leftovers: Leftovers) -> None:
        if leftovers:
            self._partings.add(self._send(leftovers.give_back, self._event()))


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.age


def _unwanted(sequence: Sequence) -> bool:
    """Whether nobody waits for it. One that still stands for all samples of its request is wanted while that is."""
    request = sequence.request
    return request.cancelled.is_set() if sequence.samples > 1 else not request.wants(sequence.sample)


def _done(sequence: Sequence) -> bool:
    return sequence.errand is not None and sequence.errand.done()
