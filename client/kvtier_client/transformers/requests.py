"""A request as its caller holds it: tokens as they are made, how it ended, a way to take it back.

Any thread may hold it; the worker's loop feeds it. Not here: how tokens are chosen (`sampling`) and computed (`worker`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple

from kvtier.errors import KvtierError
from kvtier_client.transformers.sampling import Sampling


class RequestFailed(KvtierError):
    """The worker cannot finish this request; the message says why. Other requests go on."""

    code: ClassVar[str] = "request_failed"


class Token(NamedTuple):
    """One token of one sample, an end-of-sequence token too. `logprob` and the `top` alternatives (token, logprob) are
    of the model's own distribution, before temperature and the like, and only there if they were asked for."""

    sample: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Request:
    """Iterate over it for its tokens; the iteration ends with the last sample, or raises what became of the request.

    `cached_tokens` is how much of the prompt came from kvtierd, final when the first token is out. `finish` says by
    sample how it ended: "stop", "length", "cancelled"; None while it runs.
    """

    def __init__(self, prompt: list[int], sampling: Sampling, salt: str) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.salt = salt
        self.cached_tokens = 0
        self.finish: list[str | None] = [None] * sampling.n
        self.cancelled = threading.Event()
        self._unwanted: set[int] = set()
        self._out: queue.SimpleQueue[Token | BaseException | None] = queue.SimpleQueue()
        self._ended: BaseException | bool | None = False
        self._lock = threading.Lock()
        self._hand_over: Callable[[Token | BaseException | None], object] = self._out.put

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    def __repr__(self) -> str:
        return f"<Request: {self.prompt_tokens} tokens, {self.cached_tokens} cached, {self.finish}>"

    def __iter__(self) -> Iterator[Token]:
        while True:
            if self._ended is not False:
                if isinstance(self._ended, BaseException):
                    raise self._ended
                return
            item = self._out.get()
            if isinstance(item, Token):
                yield item
            else:
                self._ended = item

    def listen(self, call: Callable[[Token | BaseException | None], object]) -> None:
        """Instead of iterating: have `call` called with each token when it is made, and at the end with None or what went
        wrong. It is called in the worker's thread, so it must be quick and not raise; here first, with what there is."""
        with self._lock:
            while not self._out.empty():
                call(self._out.get())
            self._hand_over = call

    def cancel(self, sample: int | None = None) -> None:
        """Take it back, or one of its samples: what that holds is given up at the worker's next step. Never raises, may be
        called at any time."""
        if sample is None:
            self.cancelled.set()
        else:
            self._unwanted.add(sample)

    # The worker's side

    def wants(self, sample: int) -> bool:
        """Whether somebody still waits for this sample."""
        return not self.cancelled.is_set() and sample not in self._unwanted

    def put(self, token: Token) -> None:
        self._put(token)

    def end(self, sample: int, how: str) -> None:
        """One sample ended; with the last of them the iteration does."""
        if self.finish[sample] is None:
            self.finish[sample] = how
            if None not in self.finish:
                self._put(None)

    def end_all(self, how: str) -> None:
        for sample in range(self.sampling.n):
            self.end(sample, how)

    def fail(self, error: BaseException) -> None:
        """All samples end in an error."""
        self._put(error)

    def _put(self, item: Token | BaseException | None) -> None:
        with self._lock:
            self._hand_over(item)
