"""The attach socket: where processes come, get descriptors of memory, and are seen to die.

A unix stream, so that the kernel vouches for the peer (credentials, pidfd) and carries descriptors. Its hang-up and
the peer's pidfd tell of death: there is no heartbeat, and silence is not death.
Not here: verbs (`kvtier_daemon.server`), what a session holds (`kvtier_daemon.sessions`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import select
import socket
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier import wire
from kvtier.errors import ConfigError, InvalidRequest, KvtierError, LayoutError, ProtocolError, SlabError
from kvtier.keys import Namespace
from kvtier.layout import probe_value
from kvtier.memory import read_only
from kvtier_daemon import logs
from kvtier_daemon.sessions import Session, Sessions
from kvtier_daemon.slabs import Slab
from kvtier_daemon.tenancy import Tenancy
from kvtier_daemon.tiers import Tier

log = logging.getLogger(__name__)

_SO_PEERGROUPS = 59
_SO_PEERPIDFD = 77
_MOST_PROBE = 1 << 30
_MOST_UNSENT = 1 << 20
_MOST_DESCRIPTORS = 64


class Peer:
    """A connection. `unsent` are (bytes, descriptors) that its socket did not take yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.session: Session | None = None
        self.received = bytearray()
        self.unsent: list[tuple[bytes, list[int]]] = []


class AttachServer:
    """Accepts peers and serves their messages. `poller` (an epoll) is polled by the daemon's loop."""

    def __init__(
        self, path: Path, router: Path, epoch: int, sessions: Sessions, tenancy: Tenancy, tiers: list[Tier]
    ) -> None:
        """Listens at `path`. Raises ConfigError where something that is no socket stands there."""
        self.path = path
        self.router = router
        self.epoch = epoch
        self.sessions = sessions
        self.tenancy = tenancy
        self.tiers = tiers
        self.poller = select.epoll()
        self.peers: dict[int, Peer] = {}
        self.processes: dict[int, int] = {}
        """Session ids by pidfd, also of sessions that have ended while their process goes on."""
        self.retired: dict[int, Slab] = {}
        self.others: dict[int, Callable[[], None]] = {}
        clear_socket(path)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self.listener.bind(str(path))
        os.chmod(path, 0o660)
        self.listener.listen(128)
        self.poller.register(self.listener.fileno(), select.EPOLLIN)

    def watch(self, fd: int, react: Callable[[], None]) -> None:
        """Have `react` called when `fd` can be read."""
        self.others[fd] = react
        self.poller.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        del self.others[fd]
        self.poller.unregister(fd)

    def serve(self) -> None:
        """Deal with all that has happened."""
        arrived = False
        for fd, events in self.poller.poll(0):
            if fd == self.listener.fileno():
                arrived = True  # last: a new connection may get the number of one that this very batch closes
            elif fd in self.others:
                self.others[fd]()
            elif fd in self.processes:
                if _readable(fd):
                    self._died(fd)
            elif (peer := self.peers.get(fd)) is not None:
                if events & select.EPOLLOUT:
                    self._flush(peer)
                if events & ~select.EPOLLOUT and fd in self.peers:
                    self._receive(peer)
        if arrived:
            self._accept()

    def retire(self, slab: Slab) -> None:
        """Ask all who map `slab` to let go of it."""
        self.retired[slab.id] = slab
        for session_id in list(slab.holders):
            peer = next((peer for peer in self.peers.values() if peer.session and peer.session.id == session_id), None)
            if peer is not None and peer.session is not None:
                peer.session.notices += 1
                self._send(peer, wire.Retire(slab.id))

    def detach(self, session: Session) -> None:
        """The session ended in order; its process has let go of all memory."""
        self.sessions.end(session, clean=True, alive=True)
        self._forget_slabs(session)
        self._forget_process(session)

    def verify_probe(self, session: Session, spec: Namespace) -> None:
        """Compare what the session wrote in its probe memory with what this layout says should be where.

        Raises LayoutError where they differ, InvalidRequest where there is no probe memory of that size.
        """
        if session.probe is None:
            raise InvalidRequest("no probe memory was asked for on the attach socket; use kvtier_client to attach")
        fd, nonce = session.probe
        session.probe = None
        try:
            if os.fstat(fd).st_size < spec.layout.unit_stride:
                raise InvalidRequest(f"the probe memory is smaller than a unit ({spec.layout.unit_stride} bytes)")
            for number, offset in enumerate(spec.layout.probes()):
                wanted = probe_value(nonce, number)[: spec.layout.row_bytes]
                if os.pread(fd, len(wanted), offset) != wanted:
                    raise LayoutError(
                        f"the worker's layout puts probe {number} elsewhere than at byte {offset} of the unit: daemon "
                        f"and worker read {spec.layout} differently; use one release for both"
                    )
        finally:
            os.close(fd)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        self.listener.close()
        for peer in self.peers.values():
            peer.connection.close()
        self.poller.close()

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError as error:
            log.warning("cannot accept an attachment: %s", error.strerror)
            return
        connection.setblocking(False)
        self.peers[connection.fileno()] = Peer(connection)
        self.poller.register(connection.fileno(), select.EPOLLIN | select.EPOLLRDHUP)

    def _receive(self, peer: Peer) -> None:
        try:
            data = peer.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hung_up(peer)
            return
        peer.received += data
        while len(peer.received) >= wire.ATTACH_HEADER.size and peer.connection.fileno() >= 0:  # or an answer closed it
            (size,) = wire.ATTACH_HEADER.unpack_from(peer.received)
            end = wire.ATTACH_HEADER.size + size
            if size > wire.MAX_ATTACH_MESSAGE:
                self._refuse(
                    peer, ProtocolError(f"an attach message of {size} bytes; the limit is {wire.MAX_ATTACH_MESSAGE}")
                )
                return
            if len(peer.received) < end:
                return
            message = bytes(peer.received[wire.ATTACH_HEADER.size : end])
            del peer.received[:end]
            try:
                self._message(peer, wire.decode_attach(message))
            except KvtierError as error:
                self._refuse(peer, error)
                return
            except OSError as error:  # no descriptors left, most likely
                self._refuse(peer, SlabError(f"kvtierd cannot serve this on the attach socket: {error.strerror}"))
                return

    def _message(self, peer: Peer, body: wire.Body) -> None:
        session = peer.session
        match body:
            case wire.Hello() if session is None:
                self._hello(peer, body)
            case wire.WantSlab() if session is not None:
                self._lend(peer, session, body.slab)
            case wire.WantPresence() if session is not None:
                presence = session.tenant.presence
                fd = presence.share(session.tenant.pages)
                self._send(peer, wire.PresenceIs(presence.nbytes if fd >= 0 else 0), [fd] if fd >= 0 else None)
            case wire.WantProbe() if session is not None:
                if not 0 < body.nbytes <= _MOST_PROBE:
                    raise ProtocolError(f"a probe memory of {body.nbytes} bytes; the most is {_MOST_PROBE}")
                fd = os.memfd_create("kvtier-probe", os.MFD_CLOEXEC)
                os.ftruncate(fd, body.nbytes)
                if session.probe is not None:
                    os.close(session.probe[0])
                nonce = secrets.token_bytes(16)
                session.probe = (fd, nonce)
                self._send(peer, wire.ProbeIs(nonce), [os.dup(fd)])
            case wire.Dropped() if session is not None:
                session.slabs.discard(body.slab)
                self._let_go(body.slab, session.id)
            case _:
                raise ProtocolError(f"{type(body).__name__.lower()} has no place here")

    def _hello(self, peer: Peer, hello: wire.Hello) -> None:
        if hello.version != wire.VERSION:
            raise ProtocolError(
                f"this daemon speaks version {wire.VERSION} and the client {hello.version}; use one release for both"
            )
        connection = peer.connection
        pid, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        tenant = self.tenancy.of(uid, [gid, *_groups(connection)])
        process = _pidfd(connection, pid)
        session = Session(self.sessions.new_id(), tenant, name=hello.name[:64], pid=pid, uid=uid, process=process)
        session.admin = self.tenancy.admin(uid)
        session.read_only = hello.read_only
        session.home = home(self.tiers, hello.device)
        session.readable = readable(self.tiers, session.home)
        session.since = time.time()
        peer.session = session
        self.sessions.add(session)
        if process >= 0:
            self.processes[process] = session.id
            self.poller.register(process, select.EPOLLIN)
        tiers = [(tier.name, str(tier.config.medium), tier.device) for tier in self.tiers]
        self._send(
            peer,
            wire.Welcome(session.id, session.token, self.epoch, str(self.router), tenant.name, tiers),
        )

    def _lend(self, peer: Peer, session: Session, slab_id: int) -> None:
        for tier in self.tiers:
            slab = tier.slabs.get(slab_id)
            if slab is not None and tier.index in session.readable and slab.owner.tenant is session.tenant:
                handle, fds = b"", []
                if tier.device:
                    handle = slab.backing.handle
                else:
                    try:
                        fds = [read_only(slab.backing.fd) if session.read_only else os.dup(slab.backing.fd)]
                    except OSError as error:  # no descriptors left
                        self._send(peer, wire.Refused("slab", f"slab {slab_id} cannot be given: {error.strerror}"))
                        return
                slab.holders.add(session.id)
                session.slabs.add(slab_id)
                self._send(peer, wire.SlabIs(slab_id, tier.index, slab.nbytes, handle), fds)
                return
        self._send(peer, wire.Refused("invalid", f"no slab {slab_id} of this tenant can be mapped"))

    def _send(self, peer: Peer, body: wire.Body, fds: list[int] | None = None) -> None:
        """Send, now or when the socket takes it. `fds` are closed once sent."""
        peer.unsent.append((wire.encode_attach(body), fds or []))
        self._flush(peer)

    def _flush(self, peer: Peer) -> None:
        connection = peer.connection
        try:
            while peer.unsent:
                data, fds = peer.unsent[0]
                sent = socket.send_fds(connection, [data], fds) if fds else connection.send(data)
                for fd in fds:
                    os.close(fd)
                if sent == len(data):
                    peer.unsent.pop(0)
                else:
                    peer.unsent[0] = (data[sent:], [])
        except BlockingIOError:
            descriptors = sum(len(fds) for _, fds in peer.unsent)
            if descriptors > _MOST_DESCRIPTORS or sum(len(data) for data, _ in peer.unsent) > _MOST_UNSENT:
                self._hung_up(peer)  # it reads nothing; a bound on what it can cost
                return
        except OSError:
            self._hung_up(peer)
            return
        wanted = select.EPOLLIN | select.EPOLLRDHUP | (select.EPOLLOUT if peer.unsent else 0)
        self.poller.modify(connection.fileno(), wanted)

    def _refuse(self, peer: Peer, error: KvtierError) -> None:
        """Say why, and close the connection if it has no session."""
        self.sessions.store.counters.protocol_errors += 1
        with contextlib.suppress(OSError):
            peer.connection.send(wire.encode_attach(wire.Refused(error.code, str(error))))
        self._hung_up(peer)

    def _close_peer(self, peer: Peer) -> bool:
        """False if it was closed before."""
        fd = peer.connection.fileno()
        if self.peers.pop(fd, None) is None:
            return False
        self.poller.unregister(fd)
        peer.connection.close()
        for _, fds in peer.unsent:
            for unsent in fds:
                os.close(unsent)
        return True

    def _hung_up(self, peer: Peer) -> None:
        if not self._close_peer(peer):
            return
        session = peer.session
        if session is None:
            return
        if session.gone:
            self._forget_process(session)
            return
        alive = session.process < 0 or not _readable(session.process)
        self.sessions.end(session, clean=False, alive=alive)
        log.info(
            "session %d (%s, pid %d) hung up%s",
            *(session.id, session.name, session.pid, "" if alive else "; it is dead"),
            extra=_about(session),
        )
        if not alive or session.process < 0:
            self._forget_slabs(session)
        self._forget_process(session)
        if session.process < 0 and session.id in self.sessions.quarantine:
            log.warning("this kernel gives no pidfd: what session %d was writing stays in quarantine", session.id)

    def _forget_process(self, session: Session) -> None:
        """Watch the process of an ended session no longer, if nothing depends on its death: one that attaches again
        and again must not cost a descriptor each time."""
        watched = self.processes.get(session.process) == session.id
        if watched and not session.slabs and session.id not in self.sessions.quarantine:
            del self.processes[session.process]
            self.poller.unregister(session.process)
            os.close(session.process)

    def _died(self, pidfd: int) -> None:
        session_id = self.processes.pop(pidfd)
        self.poller.unregister(pidfd)
        os.close(pidfd)
        for peer in list(self.peers.values()):
            if peer.session is not None and peer.session.id == session_id:
                self._close_peer(peer)  # a child of the dead may hold the other end
        session = self.sessions.by_id.get(session_id)
        if session is not None:
            log.info(
                "session %d (%s, pid %d) died",
                *(session.id, session.name, session.pid),
                extra=_about(session),
            )
            self.sessions.end(session, clean=False, alive=False)
        self.sessions.buried(session_id)
        for slab in [*self.retired.values(), *(slab for tier in self.tiers for slab in tier.slabs.values())]:
            if session_id in slab.holders:
                self._let_go(slab.id, session_id)

    def _forget_slabs(self, session: Session) -> None:
        for slab_id in list(session.slabs):
            self._let_go(slab_id, session.id)
        session.slabs.clear()

    def _let_go(self, slab_id: int, session_id: int) -> None:
        slab = self.retired.get(slab_id)
        if slab is None:
            slab = next((tier.slabs[slab_id] for tier in self.tiers if slab_id in tier.slabs), None)
        if slab is None:
            return
        slab.holders.discard(session_id)
        if slab.retired and not slab.holders:
            self.retired.pop(slab_id, None)
            self.sessions.store.room.unheld(slab)


def _about(session: Session) -> dict[str, Any]:
    return logs.fields(session=session.id, pid=session.pid, uid=session.uid, tenant=session.tenant.name)


def home(tiers: list[Tier], gpu: str) -> Tier | None:
    """The memory of that GPU."""
    return next((tier for tier in tiers if gpu and tier.device == gpu), None)


def readable(tiers: list[Tier], own: Tier | None) -> frozenset[int]:
    """Which tiers a worker on the GPU of `own` can read in place: host memory, its own GPU's, its peers'."""
    return frozenset(
        tier.index
        for tier in tiers
        if tier.mappable and (not tier.device or tier is own or (own is not None and tier.reaches(own)))
    )


def clear_socket(path: Path) -> None:
    """Remove a dead daemon's socket. Raises ConfigError for anything else, and for one that someone listens at (the
    caller holds the directory's lock, but lock files are deleted by cleaners and administrators)."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} is in the way and is not a socket: move it, or choose another runtime_dir")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        refused = probe.connect_ex(str(path))
    if refused in (0, errno.EAGAIN, errno.EINPROGRESS):
        raise ConfigError(f"{path}: someone listens there: stop that daemon, or choose another runtime_dir")
    path.unlink()


def _readable(fd: int) -> bool:
    """Of a pidfd: whether its process has ended."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _groups(connection: socket.socket) -> list[int]:
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024)
    except OSError:
        return []
    return list(struct.unpack(f"{len(packed) // 4}I", packed))


def _pidfd(connection: socket.socket, pid: int) -> int:
    """The peer's pidfd, across PID namespaces where the kernel can (6.5 and later); -1 if it gives none."""
    with contextlib.suppress(OSError):
        packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
        fd: int = struct.unpack("i", packed)[0]
        return fd
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid)
    return -1
