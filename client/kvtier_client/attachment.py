"""One attachment to one daemon: the session, its channels, and the slabs mapped so far.

It ends with the daemon. What was mapped stays readable for as long as anyone holds a view of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zmq

from kvtier import device, paths, wire
from kvtier.device import Device
from kvtier.errors import DaemonLost, InvalidRequest, KvtierError, ProtocolError, SlabError, from_code
from kvtier.layout import Layout, probe_value
from kvtier.memory import Mapping
from kvtier.presence import PresenceView
from kvtier_client.gpu import DeviceMapping

_HELLO_TIMEOUT = 10.0
_PRESENCE_PAUSE = 10.0
"""Seconds until a daemon that had no presence table is asked again."""
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class _Poll(ctypes.Structure):
    """struct pollfd."""

    _fields_ = (("descriptor", ctypes.c_int), ("events", ctypes.c_short), ("happened", ctypes.c_short))


_LIBC = ctypes.PyDLL(None)  # keeps the interpreter's lock: a worker's threads would make each look wait for it again
_LIBC.poll.argtypes = (ctypes.POINTER(_Poll), ctypes.c_ulong, ctypes.c_int)


class Attachment:
    """A session with the daemon at `directory`; with `gpu`, that of a process on that GPU. Raises DaemonLost where none
    answers."""

    def __init__(self, directory: Path, *, name: str, read_only: bool, gpu: Device | None = None) -> None:
        self.read_only = read_only
        self.gpu = gpu
        self.lock = threading.Lock()
        self.opening = threading.Lock()
        """Held from a probe to the `open` that it is for: the daemon knows one probe a session."""
        self.slabs: dict[int, Mapping | DeviceMapping] = {}
        self.slab_tiers: dict[int, int] = {}
        self.retired: set[int] = set()
        self.pinned: set[int] = set()
        self.presence: PresenceView | None = None
        self._presence_due = 0.0
        """When a presence table is to be asked for: never, while an answer is on its way."""
        self.seen_notices = 0
        self._holds = 0
        self._ended = False
        path = paths.socket_path(directory, paths.ATTACH_SOCKET)
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.connection.settimeout(_HELLO_TIMEOUT)
        self._received = b""
        self._fds: list[int] = []
        try:
            self.connection.connect(str(path))
            hello = wire.Hello(wire.VERSION, name, read_only, gpu.uuid if gpu is not None else "")
            welcome = self._ask(hello, wire.Welcome)
        except (OSError, KvtierError) as error:
            self.connection.close()
            if isinstance(error, OSError):
                raise DaemonLost(
                    f"no kvtierd answers at {path} ({error.strerror or error}): start one, or set KVTIER_ENDPOINT"
                ) from error
            raise
        assert isinstance(welcome, wire.Welcome)
        self.session = welcome.session
        self.token = welcome.token
        self.epoch = welcome.epoch
        self.router = welcome.router
        self.tenant = welcome.tenant
        self.tiers = [name for name, _, _ in welcome.tiers]
        self.fastest = next(
            name
            for name, medium, of in welcome.tiers
            if medium == "host" or (medium == "cuda" and gpu is not None and of == gpu.uuid)
        )
        self._readable = select.poll()
        self._readable.register(self.connection, select.POLLIN)

    def named(self, tier: str) -> str:
        """The tier that a caller means by "cuda": its own GPU's."""
        return self.fastest if tier == "cuda" else tier

    def alive(self) -> bool:
        """Whether the daemon still holds its end."""
        return not self._happened() & _GONE

    def present(self, keys: Sequence[bytes]) -> int | None:
        """How many leading keys the tenant's presence table has; None where it is to be asked for with `lookup`.

        Waits for nothing and nobody. Raises DaemonLost, at once.
        """
        happened = self._happened()
        if happened:
            if happened & _GONE:
                raise DaemonLost("kvtierd hung up: every handle is void, treat all as a miss")
            self.hear(wait=False)
        table = self.presence
        if table is not None and table.replaced:
            self.presence = table = None
            self._presence_due = 0.0
        if table is None:
            self._want_presence()
            return None
        return table.count(keys)

    def mapping(self, slab: int) -> Mapping | DeviceMapping:
        """The slab in this process's memory, mapped at first use. Raises SlabError, DaemonLost."""
        found = self.slabs.get(slab)
        if found is not None:
            return found
        with self.lock:
            if slab not in self.slabs:
                answer = self._ask(wire.WantSlab(slab), wire.SlabIs)
                assert isinstance(answer, wire.SlabIs) and answer.slab == slab
                self.slab_tiers[slab] = answer.tier
                if answer.handle:
                    assert self.gpu is not None
                    self.slabs[slab] = DeviceMapping(answer.handle, answer.nbytes, self.gpu)
                    return self.slabs[slab]
                fd = self._fds.pop(0)
                try:
                    self.slabs[slab] = Mapping(fd, answer.nbytes, writable=not self.read_only, populate=True)
                finally:
                    os.close(fd)
            return self.slabs[slab]

    def device_address(self, slab: int) -> int:
        """Where kernels of this process's GPU find the slab: GPU memory, or host memory, pinned at first use."""
        mapping = self.mapping(slab)
        if isinstance(mapping, Mapping) and slab not in self.pinned:
            if self.gpu is None:
                raise InvalidRequest("this client is not on a GPU: make it with Client(device=...)")
            with self.lock:
                if slab not in self.pinned:
                    device.use(self.gpu.ordinal)
                    device.pin(mapping.address, mapping.nbytes, read_only=self.read_only)
                    self.pinned.add(slab)
        return mapping.address

    def probe(self, layout: Layout) -> None:
        """Write the layout's probes where this process thinks they belong, for the daemon to check."""
        with self.lock:
            answer = self._ask(wire.WantProbe(layout.unit_stride), wire.ProbeIs)
            assert isinstance(answer, wire.ProbeIs)
            fd = self._fds.pop(0)
        try:
            mapping = Mapping(fd, layout.unit_stride, writable=True)
            for number, offset in enumerate(layout.probes()):
                value = probe_value(answer.nonce, number)[: layout.row_bytes]
                mapping.view[offset : offset + len(value)] = value
            mapping.close()
        finally:
            os.close(fd)

    def notice(self, notices: int) -> None:
        """The daemon has left word on the socket: unmap the slabs that it wants back, as far as nothing uses them."""
        with self.lock, contextlib.suppress(OSError, DaemonLost):
            while self.seen_notices < notices:
                self._note(self._next())
            self._let_go()

    def hear(self, *, wait: bool = True) -> None:
        """As `notice`, for what is there without waiting; not at all while another thread is at it, unless `wait`."""
        if not self.lock.acquire(blocking=wait):
            return
        try:
            with contextlib.suppress(OSError, DaemonLost):
                while self._received or self._readable.poll(0):
                    self._note(self._next())
                if self.retired:
                    self._let_go()
        finally:
            self.lock.release()

    def _let_go(self) -> None:
        for slab in list(self.retired):
            mapping = self.slabs.get(slab)
            self._unpin(slab)
            if mapping is None or mapping.close():
                self.slabs.pop(slab, None)
                self.retired.discard(slab)
                self.connection.sendall(wire.encode_attach(wire.Dropped(slab)))

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Meanwhile all that is mapped stays mapped and pinned, even if the daemon is lost: for copies by address.
        Raises DaemonLost if it is lost already."""
        with self.lock:
            if self._ended:
                raise DaemonLost("this attachment is over: what it had mapped may be unmapped")
            self._holds += 1
        try:
            yield
        finally:
            with self.lock:
                self._holds -= 1
                self._unmap()

    def close(self) -> None:
        """End it. What it had mapped is unmapped when nobody holds it."""
        self.connection.close()
        with self.lock:
            self.presence = None
            if not self._ended:
                self._ended = True
                for fd in self._fds:
                    os.close(fd)
                self._unmap()

    def _unmap(self) -> None:
        if self._ended and not self._holds:
            for slab, mapping in self.slabs.items():
                self._unpin(slab)
                mapping.close()
            self.slabs.clear()

    def _unpin(self, slab: int) -> None:
        """Before it is unmapped: what is unmapped while pinned takes the CUDA context with it."""
        mapping = self.slabs.get(slab)
        if slab in self.pinned and mapping is not None:
            device.unpin(mapping.address, mapping.nbytes)
            self.pinned.discard(slab)

    def _ask(self, body: wire.Body, wanted: type[wire.Body]) -> wire.Body:
        try:
            self.connection.sendall(wire.encode_attach(body))
            while True:
                answer = self._next()
                if isinstance(answer, wanted):
                    return answer
                if isinstance(answer, wire.Refused):
                    if isinstance(body, wire.WantSlab):
                        raise SlabError(answer.message)
                    raise from_code(answer.code, answer.message)
                self._note(answer)
        except OSError as error:
            self._break()
            raise DaemonLost(f"the attach socket broke ({error.strerror or error})") from error
        except BaseException as error:
            if not isinstance(error, KvtierError) or isinstance(error, DaemonLost | ProtocolError):
                self._break()
            raise

    def _break(self) -> None:
        """An answer is outstanding, and would be taken for the next one's: nothing more can be asked here."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _note(self, body: wire.Body) -> None:
        if isinstance(body, wire.Retire):
            self.retired.add(body.slab)
            self.seen_notices += 1
        elif isinstance(body, wire.PresenceIs):
            self._take_presence(body.nbytes)

    def _happened(self) -> int:
        """What poll(2) tells of the connection at this moment."""
        poll = _Poll(self.connection.fileno(), select.POLLIN | select.POLLRDHUP)
        if poll.descriptor < 0:
            return select.POLLNVAL
        return poll.happened if _LIBC.poll(ctypes.byref(poll), 1, 0) else 0

    def _want_presence(self) -> None:
        """Ask for the presence table, if it is time to and no other thread is talking to the daemon; `_note` takes it."""
        if time.monotonic() < self._presence_due or not self.lock.acquire(blocking=False):
            return
        try:
            self._presence_due = float("inf")
            with contextlib.suppress(OSError):
                self.connection.sendall(wire.encode_attach(wire.WantPresence()))
        finally:
            self.lock.release()

    def _take_presence(self, nbytes: int) -> None:
        self._presence_due = time.monotonic() + _PRESENCE_PAUSE
        if not nbytes:
            return
        fd = self._fds.pop(0)
        try:
            self.presence = PresenceView(fd, nbytes)
        except KvtierError:
            return  # lookups go to the daemon meanwhile
        finally:
            os.close(fd)

    def _next(self) -> wire.Body:
        """The next message; descriptors that came beside it are in `_fds`."""
        header = wire.ATTACH_HEADER.size
        while True:
            if len(self._received) >= header:
                (size,) = wire.ATTACH_HEADER.unpack_from(self._received)
                if size > wire.MAX_ATTACH_MESSAGE:
                    raise ProtocolError(f"the daemon sent an attach message of {size} bytes")
                if len(self._received) >= header + size:
                    message = self._received[header : header + size]
                    self._received = self._received[header + size :]
                    return wire.decode_attach(message)
            data, fds, _, _ = socket.recv_fds(self.connection, 1 << 16, 8)
            if not data:
                raise DaemonLost("kvtierd hung up")
            self._received += data
            self._fds += fds


class Context:
    """The process's one ZeroMQ context, made anew in a forked child, where the parent's is of no use."""

    _mine: tuple[int, zmq.Context[Any]] | None = None

    @classmethod
    def get(cls) -> zmq.Context[Any]:
        if cls._mine is None or cls._mine[0] != os.getpid():
            cls._mine = (os.getpid(), zmq.Context())
        return cls._mine[1]
