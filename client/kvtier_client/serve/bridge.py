"""From the worker's thread to the event loop, and how much may wait.

The worker hands over tokens in its own thread; a `Mailbox` takes them and wakes the loop once for all that came since it
last looked, so that a batch costs the worker one wake-up a step. The loop never waits for the worker. A `Run` is what one
HTTP request asked for: one request of the worker a prompt, their events in one queue, together with the news that the
client has gone.
Not here: what tokens mean (`text`, `answers`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvtier_client.serve.schema import Refused


class Event(NamedTuple):
    """Of prompt number `prompt`: a token; or, with neither, its end; or an error, which is its end too."""

    prompt: int
    token: Any = None
    error: BaseException | None = None


class Gone(Exception):
    """The client has closed its connection: nobody waits for the answer."""


class Mailbox:
    """Calls that any thread posts and `loop` makes, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posted: deque[tuple[Callable[[Any], object], Any]] = deque()
        self._rung = False

    def post(self, call: Callable[[Any], object], argument: Any) -> None:
        self._posted.append((call, argument))
        if not self._rung:
            self._rung = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._rung = False  # before looking: what is posted from here on rings again
        while self._posted:
            call, argument = self._posted.popleft()
            call(argument)


@dataclass(slots=True)
class Totals:
    """Since the start."""

    requests: int = 0
    refused: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


class Bridge:
    """Submits to `worker`, at most `limit` samples at a time; more are refused, so that what waits is bounded."""

    def __init__(self, worker: Any, limit: int) -> None:
        self.limit = limit
        self.totals = Totals()
        self.in_flight = 0
        """Samples that the worker has not ended."""
        self.being_read = 0
        """Requests that are not samples yet."""
        self._worker = worker
        self._runs: set[Run] = set()
        self._mailbox: Mailbox | None = None
        self._closing = False

    @property
    def in_step(self) -> float:
        """Seconds that the worker has been in the step that it is in."""
        return float(self._worker.in_step)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """A request that is being read has a place, as if it were one sample. Raises Refused where there is none."""
        self._admit(1)
        self.being_read += 1
        try:
            yield
        finally:
            self.being_read -= 1

    def submit(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Any], salt: str = "") -> Run:
        """Start making the answers to `prompts`. On the event loop. Raises Refused, or what the worker refuses."""
        self._admit(sum(sampling.n for sampling in samplings))
        if self._mailbox is None:
            self._mailbox = Mailbox(asyncio.get_running_loop())
        run = Run(self, self._mailbox)
        self._runs.add(run)
        try:
            for prompt, sampling in zip(prompts, samplings, strict=True):
                run.follow(self._worker.submit(prompt, sampling, salt=salt), sampling.n)
        except BaseException:
            run.close()
            self._forget(run)
            raise
        self.totals.requests += 1
        return run

    def ended(self, run: Run, request: Any, samples: int, made: int) -> None:
        """The worker has ended one of the requests of `run`, after `made` tokens."""
        self.in_flight -= samples
        self.totals.prompt_tokens += request.prompt_tokens
        self.totals.cached_tokens += request.cached_tokens
        self.totals.generated_tokens += made
        self._forget(run)

    def close(self) -> None:
        """Cancel all that is left, and accept no more."""
        self._closing = True
        for run in list(self._runs):
            run.close()

    def _admit(self, samples: int) -> None:
        if self._closing:
            raise Refused("the server is stopping", status=503, kind="server_error", code="stopping")
        if samples > self.limit:
            raise Refused(f"{samples} samples were asked for at once, and {self.limit} is the most that may wait")
        if self.in_flight + self.being_read + samples > self.limit:
            self.totals.refused += 1
            raise Refused(
                f"{self.in_flight} samples are being made or waiting, and {self.limit} is the most: try again later",
                status=429,
                kind="rate_limit_error",
                code="queue_full",
            )

    def _forget(self, run: Run) -> None:
        if run.done:
            self._runs.discard(run)


class Run:
    """What one HTTP request asked for. Belongs to the loop that made it."""

    def __init__(self, bridge: Bridge, mailbox: Mailbox) -> None:
        self.requests: list[Any] = []
        """The worker's, one a prompt."""
        self._bridge = bridge
        self._mailbox = mailbox
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._open = 0
        self._wanted: set[int] = set()
        """Prompts whose answers are neither ended nor cancelled."""
        self._watch: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        """The worker has ended all of it."""
        return not self._open

    def follow(self, request: Any, samples: int) -> None:
        number = len(self.requests)
        self.requests.append(request)
        self._open += 1
        self._wanted.add(number)
        self._bridge.in_flight += samples
        made = 0

        def take(item: Any) -> None:
            nonlocal made
            if item is not None and not isinstance(item, BaseException):
                made += 1
                self._events.put_nowait(Event(number, item))
                return
            self._open -= 1
            self._wanted.discard(number)
            self._events.put_nowait(Event(number, None, item))
            self._bridge.ended(self, request, samples, made)

        request.listen(lambda item: self._mailbox.post(take, item))

    def watch(self, receive: Callable[[], Awaitable[Any]]) -> None:
        """From now on, `events` raises Gone when the client has gone."""

        async def wait() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._events.put_nowait(None)

        self._watch = asyncio.create_task(wait())

    async def events(self) -> list[Event]:
        """What has come, at least one; all of it where several have. Raises Gone."""
        found = [await self._events.get()]
        with contextlib.suppress(asyncio.QueueEmpty):
            while True:
                found.append(self._events.get_nowait())
        if None in found:
            raise Gone
        return [event for event in found if event is not None]

    def cancel(self, prompt: int, sample: int | None = None) -> None:
        """The rest of this prompt's answer, or of one of its samples, is not needed."""
        if sample is None:
            self._wanted.discard(prompt)
        self.requests[prompt].cancel(sample)

    def close(self) -> None:
        """Nobody waits any more: cancel what is not done. May be called again."""
        if self._watch is not None:
            self._watch.cancel()
        if self._wanted:
            self._bridge.totals.cancelled += 1
            for prompt in list(self._wanted):
                self.cancel(prompt)
