"""The scheduler's side: how much of a prompt is to be had, what is to be loaded, and which blocks are full and to be saved.

It decides from what it is told and holds nothing in the daemon: no lease, no reservation, so an abort or a preemption leaves
nothing behind. `Asker` asks the daemon on a thread of its own; the engine's waits for an answer `_PATIENCE` at most, and not
at all while the daemon is away.

A hit counts if every rank and group holds it. All loads are asynchronous: vLLM runs other requests meanwhile, and blocks are
not taken for computed before their bytes are there, so that a failed load can never show.

Which blocks are saved: those that are full of tokens that are known and computed when the step is done. Tokens that a draft
model proposed are not known until they are accepted, so no block that can still change is among them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvtier.schedule import Schedule, Span
from kvtier_client.vllm.asker import Asker, Request
from kvtier_client.vllm.groups import Plan
from kvtier_client.vllm.hashes import BlockHashes
from kvtier_client.vllm.messages import Heard, Load, Pages, Save, Step
from kvtier_client.vllm.naming import page_key

_PATIENCE = 0.5
"""Seconds that a request's turn waits for its lookup. The next ones do not wait until that answer is there."""
_FRESH = 2.0
"""Seconds after which an answer is asked for again."""
_NULL = 0
"""The block that vLLM puts where a window no longer needs one."""


class Scheduler:
    """One engine's requests. `schedules` are of its groups; `hashes` makes the `BlockHashes` of a request."""

    def __init__(
        self,
        plan: Plan,
        schedules: Sequence[Schedule],
        asker: Asker,
        hashes: Callable[[], BlockHashes],
        *,
        saves: bool,
        loads: bool,
    ) -> None:
        self._plan = plan
        self._schedules = schedules
        self._asker = asker
        self._hashes = hashes
        self._saves, self._loads = saves, loads
        self._requests: dict[str, Request] = {}
        self._pending: list[Load] = []
        self._step = 0
        self._generation = ""

    # What vLLM asks and tells, a request at a time

    def queued(self, request: Any) -> None:
        """A request came: find out about its prefix while it waits for its turn."""
        known = self._known(request)
        if known is not None and known.asked < 0:
            self._ask(known)

    def matched(self, request: Any, computed: int) -> int:
        """How many tokens after the first `computed` can be loaded, a multiple of a block, and never all of the request:
        the last token is always computed, since its output is what is wanted. Changes nothing that a load depends on."""
        known = self._known(request)
        if known is None or known.failed or not self._loads or getattr(request, "skip_reading_prefix_cache", False):
            return 0
        step = self._plan.step
        limit: int = (request.num_tokens - 1) // step * step - self._plan.drop
        if limit <= computed:
            return 0
        self._take_hashes(known)
        if known.asked != len(known.page_hashes[0]) or time.monotonic() - known.asked_at > _FRESH:
            self._ask(known)
        if not known.answered.wait(0 if self._asker.silent else _PATIENCE):
            self._asker.silent = True
            return 0
        known.local = computed
        held = [self._covered(group, pages) for group, pages in enumerate(known.found)]
        return max(0, min(limit, min(held) // step * step) - computed)

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], tokens: int) -> None:
        """Blocks for `tokens` tokens to load, after those that `matched` was told of, are there."""
        known = self._requests.get(request.request_id)
        if known is None or tokens <= 0:
            return
        start, stop = known.local, known.local + tokens
        runs = []
        for group in range(known.groups):
            run = self._wanted(known, group, start, stop, block_ids[group])
            if run is not None:
                runs.append(run)
        self._pending.append(Load(request.request_id, known.lora or "", tuple(runs)))

    def finished(self, request: Any) -> None:
        """It ended, whatever the reason. Saves on their way go on by themselves."""
        self._requests.pop(request.request_id, None)

    def heard(self, heard: Heard) -> None:
        for name in heard.failed:
            known = self._requests.get(name)
            if known is not None:
                known.failed = True
                known.next_page = None
                known.found = [0] * known.groups

    def reset(self) -> None:
        """Forget all that was kept, for this engine: its weights may be others now. What it kept before stays what it
        was, for those who have the old ones."""
        self._generation = os.urandom(8).hex()
        for known in self._requests.values():
            known.asked, known.next_page = -1, None

    def request(self, name: str) -> Any:
        """vLLM's own of a request that is under way."""
        return self._requests[name].request

    def keys(self, save: Save, run: Pages) -> Iterator[tuple[Span, bytes]]:
        """The span and the first rank's key of each page of a run."""
        seed = self._asker.seed(run.group, save.lora, self._generation)
        for number, digest in enumerate(run.hashes, run.first):
            yield self._schedules[run.group].span(number), page_key(seed, digest, number)

    # A step

    def step(self, output: Any) -> Step:
        """What workers are to do, from vLLM's SchedulerOutput."""
        self._step += 1
        step = Step(self._step, self._generation)
        for load in self._pending:
            step.loads.append(load)
            step.written += [block for run in load.pages for page in run.blocks for block in page if block >= 0]
        self._pending.clear()
        scheduled: dict[str, int] = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            known = self._requests.get(new.req_id)
            if known is not None:
                known.blocks = [list(ids) for ids in new.block_ids]
            self._write(step, new.block_ids, new.num_computed_tokens)
            self._save(step, known, new.num_computed_tokens + scheduled.get(new.req_id, 0))
        cached = output.scheduled_cached_reqs
        resumed = _resumed(cached)
        for name, new_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            known = self._requests.get(name)
            if new_ids is not None:
                self._write(step, new_ids, computed if name in resumed else 0)
                if known is not None:
                    for group, ids in enumerate(new_ids):
                        known.blocks[group] = list(ids) if name in resumed else known.blocks[group] + list(ids)
            self._save(step, known, computed + scheduled.get(name, 0))
        return step

    def _write(self, step: Step, block_ids: Sequence[Sequence[int]], computed: int) -> None:
        for group, ids in enumerate(block_ids):
            step.written += ids[computed // self._plan.groups[group].block_tokens :]

    def _save(self, step: Step, known: Request | None, computed: int) -> None:
        """Add the pages of `known` that are full now and were not before."""
        if known is None or not self._saves or known.lora is None or not known.answered.is_set():
            return
        self._take_hashes(known)
        if known.next_page is None:
            known.next_page = list(known.found)
        runs = []
        for group, schedule in enumerate(self._schedules):
            first = known.next_page[group]
            count = min(schedule.pages(computed), len(known.page_hashes[group]))
            blocks = [self._blocks_of(known, group, number) for number in range(first, count)]
            whole = next((n for n, page in enumerate(blocks) if page is None or _NULL in page), len(blocks))
            if whole:
                hashes = known.page_hashes[group]
                runs.append(
                    Pages(
                        group,
                        first,
                        hashes[first - 1] if first else b"",
                        tuple(hashes[first : first + whole]),
                        tuple(page for page in blocks[:whole] if page is not None),
                    )
                )
                known.next_page[group] = first + whole
        if runs:
            step.saves.append(Save(known.request.request_id, known.lora, tuple(runs)))

    # Pages of a request

    def _known(self, request: Any) -> Request | None:
        """None for what is not served: input that comes in pieces, which may replace tokens."""
        if getattr(request, "resumable", False):
            return None
        known = self._requests.get(request.request_id)
        if known is None:
            known = Request(request, self._hashes(), len(self._schedules))
            self._requests[request.request_id] = known
        return known

    def _ask(self, known: Request) -> None:
        self._take_hashes(known)
        known.asked, known.asked_at = len(known.page_hashes[0]), time.monotonic()
        self._asker.ask(known, self._generation)

    def _take_hashes(self, known: Request) -> None:
        """Note the hash at the end of every page that has become whole."""
        hashes = known.hashes.of(known.request)
        tokens = len(hashes) * self._plan.hash_tokens
        for schedule, noted in zip(self._schedules, known.page_hashes, strict=True):
            for number in range(len(noted), schedule.pages(tokens)):
                noted.append(hashes[schedule.span(number).stop // self._plan.hash_tokens - 1])

    def _covered(self, group: int, pages: int) -> int:
        return self._schedules[group].span(pages - 1).stop if pages else 0

    def _blocks_of(self, known: Request, group: int, number: int) -> tuple[int, ...] | None:
        """The blocks of a page; None if it has not got them all."""
        span = self._schedules[group].span(number)
        size = self._plan.groups[group].block_tokens
        blocks = known.blocks[group][span.start // size : span.stop // size]
        return tuple(blocks) if len(blocks) == (span.stop - span.start) // size else None

    def _wanted(self, known: Request, group: int, start: int, stop: int, block_ids: Sequence[int]) -> Pages | None:
        """The pages that have tokens from `start` to `stop`, with the blocks to fill; None if a window needs none."""
        schedule = self._schedules[group]
        size = self._plan.groups[group].block_tokens
        first = schedule.pages(start)
        pages: list[tuple[int, ...]] = []
        for number in range(first, len(known.page_hashes[group])):
            span = schedule.span(number)
            if span.start >= stop:
                break
            chosen = (
                block_ids[at] if start <= at * size < stop else -1
                for at in range(span.start // size, span.stop // size)
            )
            page = tuple(-1 if block == _NULL else block for block in chosen)
            if pages or max(page) >= 0:
                pages.append(page)
            else:
                first = number + 1
        if not pages:
            return None
        return Pages(group, first, b"", tuple(known.page_hashes[group][first : first + len(pages)]), tuple(pages))


def _resumed(cached: Any) -> set[str]:
    """Requests whose block ids are all of them, not those after the ones before."""
    names = getattr(cached, "resumed_req_ids", None)
    if names is not None:
        return set(names)
    return {name for name, whole in zip(cached.req_ids, cached.resumed_from_preemption, strict=True) if whole}
