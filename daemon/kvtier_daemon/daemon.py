"""The daemon put together, and its one loop.

One thread owns all state and runs a plain `zmq.Poller` over four things: the ROUTER (verbs), an epoll (the attach
socket, its peers, their pidfds, signals), the movers' eventfd and that of those who ask for numbers over HTTP. It waits on no lock and never blocks.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import re
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvtier import device, paths
from kvtier.config import LIVE, Config, TierConfig
from kvtier.device import CudaUnavailable, Device
from kvtier.errors import ConfigError, KvtierError
from kvtier.sizes import format_size
from kvtier_daemon import logs
from kvtier_daemon.attach import AttachServer
from kvtier_daemon.cuda import CudaMedium
from kvtier_daemon.directory import Directory, Page
from kvtier_daemon.index import BadIndex, Index
from kvtier_daemon.jobs import Job
from kvtier_daemon.media import FileMedium, HostMedium, Medium
from kvtier_daemon.movers import Movers
from kvtier_daemon.notify import Notifier
from kvtier_daemon.reports import Reports
from kvtier_daemon.restore import restore
from kvtier_daemon.server import Server
from kvtier_daemon.sessions import Sessions
from kvtier_daemon.store import Store
from kvtier_daemon.tenancy import Tenancy
from kvtier_daemon.tiers import Tier
from kvtier_daemon.verbs import Verbs
from kvtier_daemon.web import Web

log = logging.getLogger(__name__)

_BEAT = 0.05
"""Seconds between two looks at what waits; idle, `_IDLE_BEAT`."""
_IDLE_BEAT = 1.0


class Daemon:
    """Everything, in the order in which it must come up: locks, media, index, directory, movers, sockets."""

    def __init__(self, config: Config, notifier: Notifier | None = None) -> None:
        """Raises ConfigError; then nothing is left running."""
        self.config = config
        self.notifier = notifier or Notifier({})
        self.reread: Callable[[], Config] | None = None
        """Gives the settings as they stand now, for a reload. Raises ConfigError."""
        self.quiet: logs.Limit | None = None
        self.terminal = _terminal()
        self.epoch = secrets.randbits(62) + 1
        runtime = Path(config.runtime_dir)
        attach_path = paths.socket_path(runtime, paths.ATTACH_SOCKET)
        router_path = paths.socket_path(runtime, paths.ROUTER_SOCKET)
        _own(runtime)
        self.locks = [_lock(runtime, "runtime_dir")]
        self.tiers: list[Tier] = []
        self.media: list[Medium] = []
        self.gpus: dict[int, Device] = {}
        for name in config.tiers:
            self._add_tier(name)
        if not any(tier.mappable for tier in self.tiers):
            raise ConfigError("no tier that workers can map is left: configure a host tier, or mend the GPU")
        self._join_tiers()
        directory = Directory(len(self.tiers))
        self.store = Store(directory, self.tiers, self._submit)
        self.sessions = Sessions(self.store)
        self.tenancy = Tenancy(config, directory, self.tiers)
        self.indexes: dict[int, Index] = {}
        for tier in reversed(self.tiers):
            if tier.persistent and not tier.closed:
                self._restore(tier)
        self.movers = Movers(self.tiers, self.media, self.indexes)
        self.attach = AttachServer(attach_path, router_path, self.epoch, self.sessions, self.tenancy, self.tiers)
        reports = Reports(self.sessions, self.movers, self.epoch)
        self.verbs = Verbs(self.sessions, self.attach, reports)
        self.context: zmq.Context[Any] = zmq.Context()
        self.server = Server(self.context, router_path, self.epoch, self.sessions, self.verbs)
        self.server.slow = config.slow_request
        self.store.room.retire = self.attach.retire
        self.store.publish = self._event
        self.stopping = False
        self._signals, self._signalled = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.attach.watch(self._signals, self._on_signal)
        self.web = Web(config.http_port, reports, self._unready)
        reports.http_port = self.web.port

    def heed_signals(self) -> None:
        """From now on a signal is one for `run`, whenever that comes. Call before anyone is told that this daemon is up:
        whoever is may stop it at once."""
        signal.set_wakeup_fd(self._signalled, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)

    def run(self) -> None:
        """Serve until a signal, then flush and end, in bounded time."""
        self.notifier.ready(self._status())
        poller = zmq.Poller()
        poller.register(self.server.router, zmq.POLLIN)
        poller.register(self.attach.poller.fileno(), zmq.POLLIN)
        poller.register(self.movers.wakeup, zmq.POLLIN)
        poller.register(self.web.desk.wakeup, zmq.POLLIN)
        beat = time.monotonic()
        stop_at = float("inf")
        while True:
            events = dict(poller.poll(self._timeout(beat)))
            if self.server.router in events:
                self.server.serve()
            if self.movers.wakeup in events:
                for job in self.movers.collect():
                    self.store.finish(job)
            if self.attach.poller.fileno() in events:
                self.attach.serve()
            if self.web.desk.wakeup in events:
                self.web.desk.serve()
            self.server.expire()
            now = time.monotonic()
            if now >= beat:
                self.store.beat()
                self.web.beat(now)
                self.movers.revive()
                if self.quiet is not None:
                    self.quiet.tell()
                if self.stopping:
                    self.notifier.stopping(f"saving what lives only in memory: {self._unsaved()} pages to go")
                beat = now + _BEAT
            self.store.run()
            self.notifier.alive(now)
            if self.server.unread:
                self.server.flush()
            if self.stopping and stop_at == float("inf"):
                stop_at = now + self.config.stop_timeout
                self.notifier.stopping("saving what lives only in memory")
                self.verbs.draining = True
                self.verbs.flush_unsaved()
                self.store.run()
            if self.stopping and (now >= stop_at or self._flushed()):
                break
        self.close()

    def end_with(self, pid: int) -> None:
        """Stop when process `pid` ends."""
        process = os.pidfd_open(pid)

        def stop() -> None:
            self.attach.unwatch(process)
            os.close(process)
            self.stopping = True

        self.attach.watch(process, stop)

    def close(self) -> None:
        """Let go of everything."""
        unsaved = len({page for page, _ in self.verbs.unsaved()})
        self.web.close()
        self.server.close()
        self.attach.close()
        self.context.destroy(linger=0)
        stuck = not self.movers.stop(timeout=2.0)
        for index in self.indexes.values():
            if not stuck:
                index.close()
        if unsaved or stuck:
            log.warning(
                "stopped with %d pages unsaved%s",
                unsaved,
                "; a mover is stuck in I/O" if stuck else "",
                extra=logs.fields(unsaved=unsaved),
            )
        else:
            log.info("stopped; all pages saved")
        if stuck:
            os._exit(0)
        for lock in self.locks:
            os.close(lock)

    def _timeout(self, beat: float) -> int:
        """Milliseconds that the poller may sleep."""
        if self.store.postponed:
            return 0
        if self.server.unread:
            return 2
        waiting = (
            self.server.deadlines or self.store.watchers or any(tier.unsaved for tier in self.tiers) or self.stopping
        )
        until = beat if waiting else beat - _BEAT + _IDLE_BEAT
        deadline = self.server.next_deadline()
        if deadline is not None:
            until = min(until, deadline)
        until = min(until, self.notifier.due)
        return max(0, math.ceil((until - time.monotonic()) * 1e3))

    def _unready(self) -> str:
        """Why workers should not be sent here; "" if they may."""
        if self.stopping or self.verbs.draining:
            return "draining: no new pages are taken"
        if all(tier.closed for tier in self.tiers if tier.mappable):
            return "no tier that workers can map takes pages"
        return ""

    def _flushed(self) -> bool:
        """Whether all is saved, but for what a tier would not take however long one waited."""
        return not self.store.jobs and not any(tier.unsaved and not self.store.stalled(tier) for tier in self.tiers)

    def _submit(self, jobs: list[Job]) -> None:
        self.movers.submit(jobs)

    def _add_tier(self, name: str) -> None:
        settings = self.config.tiers[name]
        medium: Medium
        if settings.medium == "cuda":
            self._add_gpus(name, settings)
            return
        if settings.medium == "host":
            medium = HostMedium(name, next(iter(self.gpus.values()), None))
        else:
            medium = FileMedium(name, Path(settings.path))
        tier = Tier(len(self.tiers), name, settings, persistent=medium.persistent, mappable=medium.mappable)
        self.tiers.append(tier)
        self.media.append(medium)
        if isinstance(medium, FileMedium):
            try:
                _private(medium.directory, f"tiers.{name}.path")
            except OSError as error:
                tier.closed = True
                log.error(
                    "tier %s: %s cannot be used (%s): it is closed, the others serve; mend it and restart",
                    *(name, medium.directory, error.strerror),
                )
                return
            self.locks.append(_lock(medium.directory, f"tiers.{name}.path"))

    def _add_gpus(self, name: str, settings: TierConfig) -> None:
        """A tier for each GPU that is meant; none, and a line in the log, where CUDA cannot be used."""
        try:
            found = device.devices()
        except CudaUnavailable as error:
            log.error("tier %s is left out: %s; the others serve", name, error)
            return
        chosen = [gpu for gpu in found if str(settings.device) in ("all", gpu.uuid, str(gpu.ordinal))]
        if not chosen:
            there = ", ".join(f"{gpu.ordinal} ({gpu.uuid})" for gpu in found)
            raise ConfigError(f"tiers.{name}.device {settings.device!r} is none of the GPUs here: {there}")
        for gpu in chosen:
            own = name if len(chosen) == 1 else f"{name}:{gpu.ordinal}"
            if settings.capacity > gpu.total:
                raise ConfigError(
                    f"tiers.{name}.capacity is {format_size(settings.capacity)} and {gpu.name} has {format_size(gpu.total)}"
                )
            try:
                device.start(gpu.ordinal)
            except CudaUnavailable as error:
                log.error("tier %s is left out: %s; the others serve", own, error)
                continue
            tier = Tier(len(self.tiers), own, settings, persistent=False, mappable=True, device=gpu.uuid)
            tier.section = name
            self.gpus[tier.index] = gpu
            self.tiers.append(tier)
            self.media.append(CudaMedium(own, gpu))

    def _join_tiers(self) -> None:
        """Say which tier is below which, and which exchange pages directly: host memory with all, GPUs that are peers
        with each other, and no GPU with a file."""
        for tier in self.tiers:
            later = self.tiers[tier.index + 1 :]
            tier.below = next((other for other in later if not (tier.device and other.device)), None)
            tier.direct = {other.index for other in self.tiers if self._direct(tier, other)}

    def _direct(self, one: Tier, other: Tier) -> bool:
        if one.device and other.device:
            here, there = self.gpus[one.index].ordinal, self.gpus[other.index].ordinal
            if here == there:
                return True
            allowed = one.config.peers and other.config.peers
            return allowed and device.connect(here, there) and device.connect(there, here)
        return "host" in (one.config.medium, other.config.medium)

    def _restore(self, tier: Tier) -> None:
        medium = self.media[tier.index]
        assert isinstance(medium, FileMedium)
        started = time.monotonic()
        self.notifier.starting(f"reading the index of tier {tier.name}")
        try:
            index = Index(medium.directory, tier.name)
            restored = restore(self.store, tier, medium, index, self.tenancy.named)
        except (BadIndex, OSError) as error:
            tier.closed = True
            log.error("%s; the tier is closed, the others serve", error)
            return
        self.indexes[tier.index] = index
        log.info(
            "tier %s: %d pages (%s of %s) back in %.2f s",
            *(tier.name, restored.pages, format_size(tier.allocated), format_size(tier.capacity)),
            time.monotonic() - started,
            extra=logs.fields(tier=tier.name, pages=restored.pages, seconds=time.monotonic() - started),
        )

    def _event(self, event: str, page: Page) -> None:
        """Tell subscribers of the page's tenant."""
        for identity, session in list(self.sessions.subscribers.items()):
            if session.tenant is page.namespace.tenant:
                self.server.event(session, identity, [event, page.namespace.seed, page.number, page.key])

    def _on_signal(self) -> None:
        numbers = os.read(self._signals, 64)
        if signal.SIGHUP in numbers and not (self.terminal and not _terminal()):
            self.reload()
            numbers = numbers.replace(bytes([signal.SIGHUP]), b"")
        if numbers and not self.stopping:
            log.info("stopping: flushing what lives only in memory")
        self.stopping = self.stopping or bool(numbers)

    def reload(self) -> None:
        """Take over what can change live of the settings as they stand now; with a mistake in them, nothing."""
        self.notifier.reloading()
        try:
            if self.reread is not None:
                self._take_over(self.reread())
        except KvtierError as error:
            log.error("not reloaded, the settings are as before: %s", error)
        self.notifier.ready(self._status())

    def _take_over(self, wanted: Config) -> None:
        now = self.config
        changed = [name for name in LIVE if getattr(wanted, name) != getattr(now, name)]
        fixed = [
            name
            for name in Config.__struct_fields__
            if name not in (*LIVE, "tiers") and getattr(wanted, name) != getattr(now, name)
        ]
        if list(wanted.tiers) != list(now.tiers):
            fixed.append("tiers")
        kept = dict(now.tiers)
        for name in set(wanted.tiers) & set(kept):
            old, new = kept[name], wanted.tiers[name]
            fixed += [
                f"tiers.{name}.{key}"
                for key in TierConfig.__struct_fields__
                if key != "capacity" and getattr(old, key) != getattr(new, key)
            ]
            if all(tier.capacity == new.capacity for tier in self._tiers_of(name)):  # not resized by hand either
                continue
            problem = next(filter(None, (self._unfit(tier, new.capacity) for tier in self._tiers_of(name))), "")
            if problem:
                log.error("tiers.%s.capacity stays %s: %s", name, format_size(old.capacity), problem)
                continue
            for tier in self._tiers_of(name):
                self.store.room.resize(tier, new.capacity)
            kept[name] = msgspec.structs.replace(old, capacity=new.capacity)
            changed.append(f"tiers.{name}.capacity")
        self.config = msgspec.structs.replace(now, tiers=kept, **{name: getattr(wanted, name) for name in LIVE})
        self.tenancy.config = self.config
        for session in self.sessions.by_id.values():
            session.admin = self.tenancy.admin(session.uid)
        self.server.slow = self.config.slow_request
        logs.set_level(self.config.log_level)
        log.info("reloaded; changed: %s", ", ".join(changed) or "nothing", extra=logs.fields(changed=changed))
        if fixed:
            log.warning("changed in the settings, but only after a restart: %s", ", ".join(sorted(fixed)))

    def _tiers_of(self, name: str) -> list[Tier]:
        """Those of section `name`: one, or one a GPU."""
        return [tier for tier in self.tiers if tier.section == name]

    def _unfit(self, tier: Tier, capacity: int) -> str:
        """Why the tier cannot have that capacity, or ""."""
        promised = sum(tenant.guaranteed.get(tier.index, 0) for tenant in tier.tenants.values())
        if capacity < promised:
            return f"tenants are guaranteed {format_size(promised)} of it until a restart"
        gpu = self.gpus.get(tier.index)
        if gpu is not None and capacity > gpu.total:
            return f"{gpu.name} has {format_size(gpu.total)}"
        return ""

    def _status(self) -> str:
        """For `systemctl status`."""
        sizes = ", ".join(
            f"{tier.name} {'closed' if tier.closed else format_size(tier.capacity)}" for tier in self.tiers
        )
        return f"serving: {sizes}"

    def _unsaved(self) -> int:
        return sum(len(tier.unsaved) + tier.writing for tier in self.tiers)


def _terminal() -> bool:
    """Whether this process has a terminal. One that had, and is sent SIGHUP, has lost it, and is not to reload."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _own(runtime: Path) -> None:
    """Make the runtime directory. Raises ConfigError where another user could put other sockets in it."""
    try:
        runtime.mkdir(mode=0o750, parents=True, exist_ok=True)
        owner = runtime.stat().st_uid
    except OSError as error:
        raise ConfigError(f"runtime_dir {runtime}: {error.strerror}; choose one that this user can make") from error
    if owner not in (0, os.geteuid()):
        raise ConfigError(f"runtime_dir {runtime} belongs to uid {owner}, who could swap its sockets: choose another")


def _private(directory: Path, setting: str) -> None:
    """Make a file tier's directory, of mode 0700. Raises ConfigError for one that others use too: pointed at a mount
    or at /tmp, it would be closed to them. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not directory.stat().st_mode & 0o077:
        return
    ours = re.compile(r"lock|index|slab-\d+\.kv")
    if any(not ours.fullmatch(entry.name) for entry in directory.iterdir()):
        raise ConfigError(
            f"{setting} {directory} is open to other users and holds files that are not kvtier's: give it a directory "
            f"of its own, {directory / 'kvtier'}"
        )
    directory.chmod(0o700)


def _lock(directory: Path, setting: str) -> int:
    """An exclusive lock on `directory`, held until it is closed. Raises ConfigError if another daemon holds it."""
    try:
        fd = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{setting} {directory}: {error.strerror}; choose a directory that this user can write"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise ConfigError(
            f"{setting} {directory} belongs to a running kvtierd (pid {owner or 'unknown'}): stop it, or give this one "
            f"its own"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd
