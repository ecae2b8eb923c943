"""`Client`: a process's attachment to kvtierd, kept up through restarts of it.

Safe to share between threads. After a fork, the child needs a client of its own. When the daemon is lost every call
raises DaemonLost at once, and new attachments are tried in the background of later calls, ever less often, at most
every `_LONGEST_PAUSE` seconds; a worker treats it as a miss and goes on.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, overload

from kvtier import paths, wire
from kvtier.errors import DaemonLost, DeadlineExceeded, ForkedClient, KvtierError, NotAttached, StaleHandle
from kvtier.keys import Namespace
from kvtier.layout import Layout
from kvtier.sizes import parse_size
from kvtier_client import gpu
from kvtier_client.attachment import Attachment, Context
from kvtier_client.channel import Channel
from kvtier_client.namespace import NamespaceClient

DEFAULT_TIMEOUT = 5.0
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 5.0

BodyT = TypeVar("BodyT", bound=wire.Body)
ResultT = TypeVar("ResultT")


class Client:
    """Attached to the daemon at `endpoint`: a runtime directory, else `KVTIER_ENDPOINT`, else the user's own daemon,
    else the system's. `name` is what the operator sees in `kvtier sessions`. With `device` (an ordinal of this process,
    "cuda:0", or a UUID) it is lent GPU memory of that GPU and its peers, and addresses that kernels there can read.

    Raises DaemonLost when there is none. Without `attach` it attaches at the first call that needs it, or a later one, as it
    does after a loss: so it can be made before the daemon is there. A context manager; `close` gives everything back.
    """

    def __init__(
        self,
        endpoint: str | os.PathLike[str] | None = None,
        *,
        name: str = "",
        read_only: bool = False,
        device: int | str | None = None,
        attach: bool = True,
    ) -> None:
        self._endpoint = endpoint
        self.directory: Path = paths.find_endpoint(endpoint)
        self.name = name or os.path.basename(os.environ.get("_", "")) or "python"
        self.read_only = read_only
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        self._numbers = 0
        self._closed = False
        self._failures = 0
        self._next_try = 0.0
        self.gpu = gpu.find(device)
        self._deferred: list[tuple[Any, Attachment, int]] = []
        self._attachment: Attachment | None = self._attach() if attach else None

    # What is asked for

    def namespace(self, layout: Layout, *, model: str, **fields: Any) -> NamespaceClient:
        """The pages of `model` in `layout`; `fields` are those of `kvtier.keys.Namespace`. Proves the layout to the
        daemon. Raises LayoutError if they read it differently."""
        return NamespaceClient(self, Namespace(layout=layout, model=model, **fields))

    def ping(self) -> float:
        """Seconds of a round trip."""
        started = time.perf_counter()
        self.call("ping", wire.Ping(), wire.Done)
        return time.perf_counter() - started

    def stats(self) -> dict[str, Any]:
        """All numbers of the daemon, exact."""
        return self.call("stats", wire.Stats(), wire.Report).report

    def sessions(self) -> dict[str, Any]:
        return self.call("sessions", wire.Sessions(), wire.Report).report

    def inventory(self, namespace: bytes = b"", skip: int = 0) -> dict[str, Any]:
        """The tenant's namespaces; with a namespace's digest, its pages from number `skip` on."""
        return self.call("inventory", wire.Inventory(namespace, skip), wire.Report).report

    def evict(self, *, namespace: bytes = b"", everything: bool = False, timeout: float = 60.0) -> int:
        """Forget a namespace (or all), in every tier and for good; how many pages. Leased ones stay readable."""
        body = wire.Evict(b"", namespace, everything)
        return self.call("evict", body, wire.Count, timeout=timeout).count

    def unpin(self, pin: int) -> int:
        return self.call("unpin", wire.Unpin(pin), wire.Count).count

    def resize(self, tier: str, capacity: int | str, *, timeout: float = 60.0) -> wire.Resized:
        """Give a tier another capacity, live. Shrinking waits for leases until `timeout`, and then goes on by itself."""
        return self.call("resize", wire.Resize(tier, parse_size(capacity)), wire.Resized, timeout=timeout)

    def drain(self, tier: str = "", *, timeout: float = 300.0) -> int:
        """Empty a tier into the one below; with no tier, save all and accept no new pages."""
        return self.call("drain", wire.Drain(tier), wire.Count, timeout=timeout).count

    def log_level(self, level: str = "") -> str:
        """Have the daemon log from `level` on, at once ("": leave it); the level before."""
        return self.call("loglevel", wire.LogLevel(level), wire.LoggedAt).level

    def events(self, timeout: float | None = None) -> Iterator[tuple[str, bytes, int, bytes]]:
        """(what, namespace digest, page number, key) for every page "stored" or "removed" from now on; ends after
        `timeout` seconds without one. Raises DaemonLost."""
        attachment = self.current()
        channel = self._channel(attachment)
        try:
            channel.send("subscribe", DEFAULT_TIMEOUT, wire.Subscribe())
            channel.receive(DEFAULT_TIMEOUT, attachment.alive)
            yield from _events(channel, attachment, timeout)
        finally:
            channel.close()

    def close(self) -> None:
        """End the session: every lease and reservation with it."""
        if self._closed or os.getpid() != self._pid:
            return
        attachment = self._attachment
        if attachment is not None:
            self._release_deferred(wait=True)
            with contextlib.suppress(KvtierError):
                self.on(attachment, "detach", wire.Detach(), timeout=0.5)
        self._closed = True
        self._drop()

    # How it is asked

    @overload
    def call(self, verb: str, body: wire.Body, kind: type[BodyT], *, timeout: float = ...) -> BodyT: ...

    @overload
    def call(self, verb: str, body: wire.Body, *, timeout: float = ...) -> None: ...

    def call(
        self, verb: str, body: wire.Body, kind: type[BodyT] | None = None, *, timeout: float = DEFAULT_TIMEOUT
    ) -> BodyT | None:
        """Ask the daemon, attaching again first if it was lost. Raises what it answers, or DaemonLost."""
        return self._exchange(self.current(), verb, body, kind, timeout)

    @overload
    def on(
        self, attachment: Attachment, verb: str, body: wire.Body, kind: type[BodyT], *, timeout: float = ...
    ) -> BodyT: ...

    @overload
    def on(self, attachment: Attachment, verb: str, body: wire.Body, *, timeout: float = ...) -> None: ...

    def on(
        self,
        attachment: Attachment,
        verb: str,
        body: wire.Body,
        kind: type[BodyT] | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> BodyT | None:
        """As `call`, about something held under `attachment`: DaemonLost if that is over."""
        if attachment is not self._attachment:
            raise DaemonLost("the daemon that this was held with is gone: it is released, or never was committed")
        return self._exchange(attachment, verb, body, kind, timeout)

    def present(self, keys: Sequence[bytes]) -> int | None:
        """How many leading keys the tenant holds, told by its presence table without asking the daemon: as true as a
        lookup's answer, and as soon out of date. None where there is no table (yet): ask. Raises DaemonLost."""
        self._check_process()
        attachment = self._attachment
        if attachment is None:
            return None
        if self._deferred:
            self._release_deferred()
        try:
            return attachment.present(keys)
        except DaemonLost:
            self.lost(attachment)
            raise

    def submit(
        self, verb: str, body: wire.Body, finish: Callable[[Attachment, Any], ResultT], *, timeout: float
    ) -> Pending[ResultT]:
        """Ask now and wait later: `finish` makes the result from the attachment and the reply's body."""
        self._check_process()
        attachment = self.current()
        channel = self._channel(attachment)
        request = channel.send(verb, timeout, body)
        return Pending(self, attachment, channel, request, finish, timeout)

    def release_lease(self, attachment: Attachment, lease: int, after: Any = None) -> None:
        """Release now, or, once what `after` was given is done, with a later call."""
        if after is not None:
            self._deferred.append((gpu.event(after), attachment, lease))
            return
        with contextlib.suppress(DaemonLost):
            self.on(attachment, "release", wire.Release(wire.pack_u64([lease])))

    def _release_deferred(self, *, wait: bool = False) -> None:
        """Release the leases whose kernels are done (`wait`: all of them, when they are)."""
        with self._lock:
            deferred, self._deferred = self._deferred, []
        due: list[int] = []
        for event, attachment, lease in deferred:
            if wait:
                event.synchronize()
            if attachment is not self._attachment:
                continue
            if wait or gpu.passed(event):
                due.append(lease)
            else:
                self._deferred.append((event, attachment, lease))
        current = self._attachment
        if due and current is not None:
            with contextlib.suppress(DaemonLost):
                self.on(current, "release", wire.Release(wire.pack_u64(due)))

    def _meanwhile(self, attachment: Attachment, verb: str) -> bool:
        """While a call waits: give back what its kernels have let go of and what the daemon wants unmapped, either of
        which may be what it waits for. Whether the daemon still lives."""
        if self._deferred and verb != "release":
            self._release_deferred()
        attachment.hear()
        return attachment.alive()

    def _attach(self) -> Attachment:
        self.directory = paths.find_endpoint(self._endpoint)
        made = Attachment(self.directory, name=self.name, read_only=self.read_only, gpu=self.gpu)
        self._endpoint = self.directory  # from now on it is this daemon's, whoever else may come
        return made

    def put_back(self, attachment: Attachment, channel: Channel, reply: wire.Reply) -> None:
        """A channel has its answer: keep it for the next call, and hear what the daemon wants."""
        if attachment is self._attachment:
            self._idle.append(channel)
        else:
            channel.close()
        if reply.notices != attachment.seen_notices or attachment.retired:
            attachment.notice(reply.notices)

    def lost(self, attachment: Attachment) -> None:
        """The daemon of this attachment is gone."""
        with self._lock:
            if attachment is self._attachment:
                self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(
        self, attachment: Attachment, verb: str, body: wire.Body, kind: type[BodyT] | None, timeout: float
    ) -> BodyT | None:
        self._check_process()
        if self._deferred and verb != "release":
            self._release_deferred()
        channel = self._channel(attachment)
        try:
            channel.send(verb, timeout, body)
            reply = channel.receive(timeout, lambda: self._meanwhile(attachment, verb))
            result = None if kind is None else wire.convert(reply.body, kind)
        except (DaemonLost, NotAttached) as error:
            channel.close()
            self.lost(attachment)
            raise DaemonLost(str(error)) from None
        except DeadlineExceeded:
            channel.close()
            raise
        except KvtierError:
            self._idle.append(channel)
            raise
        except BaseException:
            self._take_back(attachment, channel, kind)
            raise
        self.put_back(attachment, channel, reply)
        return result

    def _take_back(self, attachment: Attachment, channel: Channel, kind: type[wire.Body] | None) -> None:
        """A call was interrupted: cancel it, and give back what it was granted meanwhile, since nobody will have it."""
        try:
            with contextlib.suppress(KvtierError):
                self.on(attachment, "cancel", wire.Cancel(channel.number, channel.request), timeout=1.0)
                if kind is None or (not channel.received and not channel.socket.poll(200)):
                    return
                reply = (
                    wire.decode_reply(channel.received[-1])
                    if channel.received
                    else channel.receive(1.0, attachment.alive)
                )
                body = wire.convert(reply.body, kind)
                if isinstance(body, wire.Borrowed | wire.Committed) and body.lease:
                    self.release_lease(attachment, body.lease)
                elif isinstance(body, wire.Reserved) and body.reservation:
                    self.on(attachment, "abort", wire.Abort(body.reservation))
        finally:
            channel.close()

    def _channel(self, attachment: Attachment) -> Channel:
        try:
            channel = self._idle.pop()
            if channel.token == attachment.token:
                return channel
            channel.close()
        except IndexError:
            pass
        with self._lock:
            self._numbers += 1
            number = self._numbers
        return Channel(Context.get(), attachment.router, attachment.token, number, attachment.epoch)

    def current(self) -> Attachment:
        """The attachment, made anew if the daemon was lost. Raises DaemonLost."""
        attachment = self._attachment
        if attachment is not None:
            return attachment
        self._check_process()
        with self._lock:
            if self._attachment is not None:
                return self._attachment
            if self._closed:
                raise StaleHandle("this client was closed; make a new one")
            now = time.monotonic()
            if now < self._next_try:
                raise DaemonLost(f"kvtierd is away; the next attempt to attach is in {self._next_try - now:.2f} s")
            try:
                self._attachment = self._attach()
            except KvtierError:
                pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**self._failures)
                self._failures += 1
                self._next_try = now + pause * random.uniform(0.5, 1.0)
                raise
            self._failures = 0
            return self._attachment

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedClient(
                f"this client attached in process {self._pid} and is used in its child {os.getpid()}: make a new Client "
                f"after the fork"
            )

    def _drop(self) -> None:
        attachment, self._attachment = self._attachment, None
        while self._idle:
            self._idle.pop().close()
        if attachment is not None:
            attachment.close()


class Pending(Generic[ResultT]):
    """A request under way. `result` waits for it; `cancel` takes it back, and whatever it was given in between."""

    def __init__(
        self,
        client: Client,
        attachment: Attachment,
        channel: Channel,
        request: int,
        finish: Callable[[Attachment, Any], ResultT],
        timeout: float,
    ) -> None:
        self._client = client
        self._attachment = attachment
        self._channel: Channel | None = channel
        self._request = request
        self._finish = finish
        self._timeout = timeout
        self._result: ResultT | None = None

    def ready(self) -> bool:
        """Whether `result` would not wait."""
        return self._channel is None or bool(self._channel.socket.poll(0))

    def result(self) -> ResultT:
        """What the verb gives. Raises what the verb raises."""
        if self._channel is None:
            if self._result is None:
                raise StaleHandle("the request was taken back, or failed before")
            return self._result
        channel, self._channel = self._channel, None
        try:
            reply = channel.receive(self._timeout, self._attachment.alive)
        except (DaemonLost, NotAttached) as error:
            channel.close()
            self._client.lost(self._attachment)
            raise DaemonLost(str(error)) from None
        except BaseException:
            channel.close()
            raise
        self._client.put_back(self._attachment, channel, reply)
        self._result = self._finish(self._attachment, reply.body)
        return self._result

    def cancel(self) -> None:
        """Take the request back; what it was granted meanwhile is released. Never raises."""
        if self._channel is None:
            return
        with contextlib.suppress(KvtierError):
            body = wire.Cancel(self._channel.number, self._request)
            self._client.on(self._attachment, "cancel", body, timeout=1.0)
            result = self.result()
            self._result = None
            for undo in ("release", "abort"):
                if hasattr(result, undo):
                    getattr(result, undo)()


def _events(channel: Channel, attachment: Attachment, timeout: float | None) -> Iterator[tuple[str, bytes, int, bytes]]:
    last = time.monotonic()
    while True:
        if channel.socket.poll(100):
            reply = wire.decode_reply(channel.socket.recv())
            if reply.epoch != attachment.epoch:
                raise DaemonLost("kvtierd was restarted: events were missed")
            last = time.monotonic()
            if reply.code == "event":
                what, seed, number, key = reply.body
                yield what, seed, number, key
        elif not attachment.alive():
            raise DaemonLost("kvtierd hung up")
        elif timeout is not None and time.monotonic() - last > timeout:
            return
