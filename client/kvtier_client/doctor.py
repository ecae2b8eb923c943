"""`kvtier doctor`: what on this host keeps kvtierd from working well, and the mend of each.

Works with a daemon or without one, and changes nothing: the disk probe writes an unnamed file that is gone with it.
A check is a function of a `Host`, which is all that it may ask, and of the settings; tests give it another host.
Exit status: 0 all is well, 1 something could be better, 2 kvtierd will not work, or not as configured.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import kvtier_client
from kvtier import config as settings
from kvtier import device, paths
from kvtier.config import Config, TierConfig
from kvtier.device import CudaUnavailable, Device
from kvtier.errors import ConfigError, DaemonLost, KvtierError
from kvtier.sizes import format_size
from kvtier_client.client import Client

SYSTEM_CONFIG = "/etc/kvtier/kvtierd.toml"
OK, WARNING, FATAL = "ok", "warning", "fatal"
SLOW_READ, SLOW_WRITE = 500e6, 200e6
"""Bytes a second below which a disk is worth a warning: at 128 KiB a token, some 4,000 tokens a second."""
_PROBE_BYTES = 256 << 20
_PROBE_SECONDS = 2.0
_BLOCK = 4 << 20
_SO_PEERPIDFD = 77
_UNLIMITED = 1 << 62
_SHMEM_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


class Finding(NamedTuple):
    """What a check found. `mend` says what to do, and is empty where all is well."""

    check: str
    level: str
    text: str
    mend: str = ""


class Speed(NamedTuple):
    """Bytes a second."""

    read: float
    write: float


class Host:
    """All that checks ask of this machine, in one place. `pid` is the daemon's, 0 without one: its limits are then those
    of this process, which a daemon started from here would have."""

    def __init__(self) -> None:
        self.pid = 0
        self.version = ""
        """Of the daemon."""
        self.compiled = True
        """Whether the daemon's state is."""
        self.problem = ""
        """Why the daemon that is there cannot be talked to."""
        self.foreign = False
        """Whether the daemon is in another PID namespace."""
        self.denied = False
        """Whether this user may not attach to it."""
        self.runtime = Path()

    def proc(self, name: str) -> str:
        """A file of the daemon in /proc, or of this process; "" where it cannot be read."""
        return self.read(f"/proc/{self.pid or 'self'}/{name}")

    def read(self, path: str) -> str:
        try:
            return Path(path).read_text(errors="replace")
        except OSError:
            return ""

    def euid(self) -> int:
        """The user of the daemon, or of this process."""
        match = re.search(r"^Uid:\s+\d+\s+(\d+)", self.proc("status"), re.MULTILINE)
        return int(match[1]) if match else os.geteuid()

    def memlock(self) -> int:
        match = re.search(r"^Max locked memory\s+(\S+)", self.proc("limits"), re.MULTILINE)
        return int(match[1]) if match and match[1].isdigit() else _UNLIMITED

    def memory(self, name: str) -> int:
        """A line of /proc/meminfo, in bytes."""
        match = re.search(rf"^{name}:\s+(\d+) kB", self.read("/proc/meminfo"), re.MULTILINE)
        return int(match[1]) * 1024 if match else _UNLIMITED

    def cgroup_limit(self) -> int:
        """The least memory.max from the daemon's memory cgroup up to the root."""
        group = self.proc("cgroup").rpartition("0::")[2].split("\n")[0].strip("/")
        place, limit = Path("/sys/fs/cgroup") / group, _UNLIMITED
        while place != Path("/sys/fs"):
            text = self.read(str(place / "memory.max")).strip()
            limit = min(limit, int(text)) if text.isdigit() else limit
            place = place.parent
        return limit

    def memfd(self) -> str:
        """Why this process can make no memfd, or ""."""
        try:
            os.close(os.memfd_create("kvtier-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        except OSError as error:
            return error.strerror or "refused"
        return ""

    def shm(self) -> int:
        """Bytes of /dev/shm, -1 where there is none."""
        try:
            place = os.statvfs("/dev/shm")
        except OSError:
            return -1
        return place.f_blocks * place.f_frsize

    def pidfd(self) -> tuple[bool, bool]:
        """Whether the kernel gives pidfds, and whether it gives them of a socket's peer, across PID namespaces."""
        try:
            os.close(os.pidfd_open(os.getpid()))
        except (OSError, AttributeError):
            return False, False
        one, other = socket.socketpair(socket.AF_UNIX)
        with one, other:
            try:
                os.close(struct.unpack("i", one.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))[0])
            except OSError:
                return True, False
        return True, True

    def kernel(self) -> str:
        return os.uname().release

    def now(self) -> float:
        return time.time()

    def apart(self) -> bool:
        """Whether the daemon, though its process can be seen, is in another IPC namespace. False where it does not show."""
        try:
            return os.readlink(f"/proc/{self.pid}/ns/ipc") != os.readlink("/proc/self/ns/ipc")
        except OSError:
            return False

    def arguments(self) -> list[str]:
        """The daemon's command line."""
        return self.proc("cmdline").rstrip("\0").split("\0") if self.pid else []

    # Disks

    def writable(self, directory: str) -> Path | None:
        """`directory`, or what of its path there is, if this user may write there."""
        place = Path(directory)
        while not place.exists() and place != place.parent:
            place = place.parent
        return place if os.access(place, os.W_OK | os.X_OK) else None

    def usage(self, directory: str) -> tuple[int, int]:
        """Bytes free on the file system of `directory`, and bytes that its slabs take already."""
        place = Path(directory)
        while not place.exists() and place != place.parent:
            place = place.parent
        there = os.statvfs(place)
        try:
            taken = sum(path.stat().st_blocks * 512 for path in Path(directory).glob("slab-*.kv"))
        except OSError:
            taken = 0
        return there.f_bavail * there.f_frsize, taken

    def direct(self, place: Path) -> str:
        """Why files there cannot be opened past the page cache, or ""."""
        name = place / f".kvtier-doctor-{os.getpid()}"
        try:
            os.close(os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            return error.strerror or "refused"
        finally:
            name.unlink(missing_ok=True)
        return ""

    def newest(self, directory: str) -> float:
        """When what is in it was written last, in seconds since 1970; 0 if nothing is, or it cannot be read."""
        try:
            return max((path.stat().st_mtime for path in Path(directory).rglob("*")), default=0.0)
        except OSError:
            return 0.0

    def holder(self, directory: str) -> int:
        """The process that holds the lock of that directory, 0 if none does. Takes no lock: a daemon may be starting."""
        try:
            status = (Path(directory) / "lock").stat()
        except OSError:
            return 0
        wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in self.read("/proc/locks").splitlines():
            words = line.split()
            if len(words) > 5 and words[1] == "FLOCK" and words[5] == wanted:
                return int(words[4])
        return 0

    def speed(self, place: Path, room: int, progress: Callable[[float], None]) -> Speed:
        """What the disk does with large requests past the page cache, one after the other. Raises OSError."""
        buffer = mmap.mmap(-1, _BLOCK)
        buffer.write(os.urandom(1 << 16) * (_BLOCK >> 16))
        name = place / f".kvtier-doctor-{os.getpid()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(name, flags | os.O_DIRECT, 0o600)
        except OSError:
            name.unlink(missing_ok=True)
            fd = os.open(name, flags, 0o600)
        try:
            name.unlink()
            most = min(_PROBE_BYTES, room // 2) // _BLOCK
            start = time.monotonic()
            written = 0
            while written < most and time.monotonic() - start < _PROBE_SECONDS:
                os.pwritev(fd, [buffer], written * _BLOCK)
                written += 1
                progress(0.5 * written / most)
            os.fdatasync(fd)
            write = written * _BLOCK / (time.monotonic() - start)
            start = time.monotonic()
            done = 0
            while done < written and time.monotonic() - start < _PROBE_SECONDS:
                os.preadv(fd, [buffer], done * _BLOCK)
                done += 1
                progress(0.5 + 0.5 * done / written)
            progress(1.0)
            return Speed(done * _BLOCK / (time.monotonic() - start), write)
        finally:
            os.close(fd)
            buffer.close()

    # GPUs

    def nvidia(self) -> bool:
        """Whether the machine has a GPU that the kernel knows of."""
        return Path("/proc/driver/nvidia").exists() or Path("/dev/nvidiactl").exists()

    def gpus(self) -> list[Device]:
        """Raises CudaUnavailable."""
        return device.devices()

    def peers(self, first: int, second: int) -> bool:
        return bool(device.runtime().deviceCanAccessPeer(first, second))

    def cuda_versions(self) -> tuple[int, int]:
        """Of the driver's CUDA and of the runtime that cupy has, such as 12080. Raises CudaUnavailable."""
        cuda = device.runtime()
        return int(cuda.driverGetVersion()), int(cuda.runtimeGetVersion())

    def driver_versions(self) -> tuple[str, str]:
        """Of the kernel's driver and of libcuda; "" where it does not show."""
        module = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", self.read("/proc/driver/nvidia/version"))
        library = ""
        for place in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"):
            found = Path(place) / "libcuda.so.1"
            if found.exists():
                library = found.resolve().name.removeprefix("libcuda.so.")
                break
        return (module[1] if module else "", library if "." in library else "")

    def node(self, number: int) -> set[int]:
        """CPUs of a NUMA node."""
        return numbers(self.read(f"/sys/devices/system/node/node{number}/cpulist"))

    def allowed(self, what: str) -> set[int]:
        """ "Cpus" or "Mems" that the daemon may use."""
        match = re.search(rf"^{what}_allowed_list:\s*(\S+)", self.proc("status"), re.MULTILINE)
        return numbers(match[1]) if match else set()


Check = Callable[[Host, Config], Iterator[Finding]]


def numbers(text: str) -> set[int]:
    """Of a list as the kernel writes it: "0-3,8"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _host_bytes(config: Config) -> int:
    return sum(tier.capacity for tier in config.tiers.values() if tier.medium == "host")


def _cuda_tiers(config: Config) -> list[TierConfig]:
    return [tier for tier in config.tiers.values() if tier.medium == "cuda"]


def _file_tiers(config: Config) -> list[tuple[str, TierConfig]]:
    return [(name, tier) for name, tier in config.tiers.items() if tier.medium == "file"]


def check_memory(host: Host, config: Config) -> Iterator[Finding]:
    """Room for the host tier: in the machine, and in the cgroup that its memory is charged to."""
    wanted = _host_bytes(config)
    total, free, limit = host.memory("MemTotal"), host.memory("MemAvailable"), host.cgroup_limit()
    if limit < wanted:
        yield Finding(
            *("memory", FATAL, f"the host tier may take {format_size(wanted)} and its cgroup {format_size(limit)}"),
            "raise MemoryMax= of the service (or the container's memory limit) above the tier plus 1 GiB, or lower "
            "tiers.host.capacity",
        )
    elif total < wanted:
        yield Finding(
            *(
                "memory",
                FATAL,
                f"the host tier may take {format_size(wanted)} and the machine has {format_size(total)}",
            ),
            "lower tiers.host.capacity, and leave room for the engines",
        )
    elif not host.pid and free < wanted:
        yield Finding(
            *("memory", WARNING, f"the host tier may take {format_size(wanted)} and {format_size(free)} are free now"),
            "lower tiers.host.capacity, or stop what takes the memory; slabs that do not fit are refused",
        )
    else:
        yield Finding("memory", OK, f"{format_size(wanted)} for the host tier fit")


def check_memlock(host: Host, config: Config) -> Iterator[Finding]:
    """Pinning the host tier for GPUs needs leave to lock memory."""
    limit, wanted = host.memlock(), _host_bytes(config)
    if not _cuda_tiers(config):
        yield Finding("memlock", OK, "no GPU tier: nothing is pinned")
    elif host.euid() == 0 or limit >= wanted:
        yield Finding("memlock", OK, "host slabs may be pinned")
    else:
        yield Finding(
            *("memlock", WARNING, f"{format_size(limit)} may be locked and the host tier has {format_size(wanted)}"),
            "set LimitMEMLOCK=infinity for the service (ours has it), `ulimit -l unlimited`, or --ulimit memlock=-1 for "
            "a container; until then slabs are not pinned, and copies to GPUs are slower",
        )


def check_shared_memory(host: Host, _: Config) -> Iterator[Finding]:
    """memfds, which have no name; the size of /dev/shm, small in containers, does not matter."""
    problem = host.memfd()
    if problem:
        yield Finding(
            *("shared memory", FATAL, f"memfd_create is refused: {problem}"),
            "let the container's seccomp profile allow memfd_create; /dev/shm is not needed and does not help",
        )
    else:
        size = host.shm()
        there = f"{format_size(size)}" if size >= 0 else "none"
        yield Finding("shared memory", OK, f"memfds work; /dev/shm ({there}) is not needed")


def check_huge_pages(host: Host, _: Config) -> Iterator[Finding]:
    """Host slabs get huge pages where the kernel may give them to shared memory; most are set not to."""
    setting = host.read(_SHMEM_HUGE_PAGES)
    if "[never]" in setting or "[deny]" in setting:
        faster = f"`echo advise > {_SHMEM_HUGE_PAGES}` before kvtierd starts has workers write faster"
        yield Finding("huge pages", OK, f"host slabs get small pages; {faster}")
    elif setting:
        yield Finding("huge pages", OK, "host slabs get huge pages where the kernel has them")


def check_pidfd(host: Host, _: Config) -> Iterator[Finding]:
    """How the daemon learns that a worker is dead."""
    own, peers = host.pidfd()
    if not own:
        yield Finding(
            *("pidfd", WARNING, f"kernel {host.kernel()} gives no pidfd: frames of workers that die are never reused"),
            "run Linux 5.3 or newer (6.5 for workers in other PID namespaces), or allow pidfd_open in the seccomp profile",
        )
    elif not peers:
        yield Finding(
            *("pidfd", WARNING, f"kernel {host.kernel()} gives no pidfd of a socket's peer"),
            "run Linux 6.5 or newer, or keep daemon and workers in one PID namespace (--pid=host)",
        )
    else:
        yield Finding("pidfd", OK, "deaths of workers are seen, also across PID namespaces")


def check_directories(host: Host, config: Config) -> Iterator[Finding]:
    """Each directory is one daemon's."""
    places = [("runtime_dir", str(host.runtime or config.runtime_dir))]
    places += [(f"tiers.{name}.path", tier.path) for name, tier in _file_tiers(config)]
    for setting, place in places:
        holder = host.holder(place)
        if not holder or holder == host.pid or host.foreign:
            continue
        if setting == "runtime_dir" and not host.pid:
            yield Finding(
                *("directories", FATAL, f"process {holder} holds {place} and does not answer as a daemon"),
                f"see what it does (`ps -p {holder}`, its log), and stop it if it hangs",
            )
        else:
            yield Finding(
                *("directories", FATAL, f"{setting} {place} belongs to another kvtierd (pid {holder})"),
                "stop it, or give this daemon a directory of its own",
            )
        return
    yield Finding("directories", OK, "nobody else uses them")


def check_disk(host: Host, config: Config) -> Iterator[Finding]:
    """Room for the file tiers, and whether the page cache can be passed by."""
    for name, tier in _file_tiers(config):
        free, taken = host.usage(tier.path)
        if free + taken < tier.slab:
            yield Finding(
                *("disk", FATAL, f"tier {name}: {format_size(free)} are free at {tier.path}, less than one slab"),
                f"free space there, or set tiers.{name}.path to another disk",
            )
        elif free + taken < tier.capacity:
            yield Finding(
                *(
                    "disk",
                    WARNING,
                    f"tier {name} may take {format_size(tier.capacity)} and has {format_size(free + taken)}",
                ),
                f"free space at {tier.path}, or lower tiers.{name}.capacity; the tier stops growing where the disk is full",
            )
        else:
            yield Finding("disk", OK, f"tier {name}: {format_size(tier.capacity)} fit at {tier.path}")
        place = host.writable(tier.path)
        if place is None:
            yield Finding(
                *("disk", WARNING, f"tier {name}: this user may not write at {tier.path}, so it was not tried out"),
                "run the doctor as root or as the daemon's user: sudo -u kvtier kvtier doctor",
            )
            continue
        problem = host.direct(place)
        if problem:
            yield Finding(
                *("disk", WARNING, f"tier {name}: {tier.path} does not take O_DIRECT ({problem})"),
                "put the tier on ext4 or XFS on a local disk: through the page cache its pages take memory twice",
            )


def check_clock(host: Host, config: Config) -> Iterator[Finding]:
    """Files written in the future: the clock was set back, or is wrong."""
    for name, tier in _file_tiers(config):
        ahead = host.newest(tier.path) - host.now()
        if ahead > 60:
            yield Finding(
                *("clock", WARNING, f"tier {name}: its newest file is {ahead:.0f} s in the future"),
                "see that the clock is right and kept so (timedatectl); kvtierd itself does not go by it",
            )
            return
    yield Finding("clock", OK, "no file of the tiers is from the future")


def check_gpus(host: Host, config: Config) -> Iterator[Finding]:
    """GPUs, their driver, and their links to each other."""
    wanted = _cuda_tiers(config)
    module, library = host.driver_versions()
    if module and library and module != library:
        yield Finding(
            *("driver", FATAL if wanted else WARNING, f"the kernel runs driver {module} and libcuda is {library}"),
            "reboot, or reload the nvidia modules: the driver was upgraded under them",
        )
        return
    try:
        found = host.gpus()
    except CudaUnavailable as error:
        if wanted:
            yield Finding("gpus", FATAL, f"a GPU tier is configured: {error}", "mend that, or leave the tier out")
        elif host.nvidia():
            yield Finding(
                *("gpus", WARNING, f"the machine has a GPU that kvtier cannot use: {error}"),
                "mend that, and configure a tier of medium cuda, if kvtier is to keep pages on the GPU",
            )
        else:
            yield Finding("gpus", OK, "none, and none is wanted")
        return
    try:
        driver, runtime = host.cuda_versions()
    except CudaUnavailable:
        driver = runtime = 0
    if runtime // 1000 > driver // 1000:
        yield Finding(
            *(
                "driver",
                FATAL if wanted else WARNING,
                f"the driver knows CUDA {_cuda(driver)}, cupy is {_cuda(runtime)}",
            ),
            f"install kvtier[cuda{driver // 1000}], or a newer driver",
        )
    yield Finding("gpus", OK, ", ".join(f"{gpu.ordinal}: {gpu.name}" for gpu in found) or "none is visible")
    if not wanted:
        return
    for tier in wanted:
        small = [gpu for gpu in found if gpu.total < tier.capacity]
        if small:
            yield Finding(
                *("gpus", FATAL, f"the tier wants {format_size(tier.capacity)}, {small[0].name} has less"),
                "lower its capacity, and leave room for the engine",
            )
    apart = [(one.ordinal, two.ordinal) for one in found for two in found if one != two]
    apart = [pair for pair in apart if not host.peers(*pair)]
    if apart and any(tier.peers for tier in wanted):
        pairs = ", ".join(f"{one}-{two}" for one, two in apart if one < two) or str(apart[0])
        yield Finding(
            *("peers", WARNING, f"GPUs {pairs} have no access to each other: pages go through host memory"),
            "see `nvidia-smi topo -p2p r`: without NVLink it often is the IOMMU or PCIe ACS (BIOS, intel_iommu=off); set "
            "peers = false if it is meant so",
        )
    elif len(found) > 1:
        yield Finding("peers", OK, "GPUs reach each other")


def check_numa(host: Host, config: Config) -> Iterator[Finding]:
    """Host slabs lie on the first GPU's node; the daemon must be allowed there."""
    if not _cuda_tiers(config):
        return
    try:
        nodes = {gpu.node for gpu in host.gpus() if gpu.node >= 0}
    except CudaUnavailable:
        return
    cpus, memory = host.allowed("Cpus"), host.allowed("Mems")
    for node in sorted(nodes):
        if cpus and host.node(node) and not cpus & host.node(node):
            what = "none of its CPUs is"
        elif memory and node not in memory:
            what = "its memory is not"
        else:
            continue
        yield Finding(
            *("numa", WARNING, f"a GPU hangs on NUMA node {node}, and {what} allowed to kvtierd: copies cross nodes"),
            "widen CPUAffinity= and AllowedMemoryNodes= of the service, or --cpuset-cpus and --cpuset-mems of the container",
        )
        return
    yield Finding("numa", OK, "the daemon may use the nodes of the GPUs" if nodes else "one node")


def check_daemon(host: Host, config: Config) -> Iterator[Finding]:
    """The daemon that runs: whether it answers, and whether this client fits it."""
    if host.problem:
        yield Finding("daemon", FATAL, host.problem, "use one release for daemon and client, or see the daemon's log")
        return
    if host.denied:
        yield Finding(
            *("daemon", FATAL, f"this user may not attach at {host.runtime}"),
            "add the user to the daemon's group (usermod -aG kvtier USER), and log in again",
        )
        return
    if not host.pid and not host.foreign:
        yield Finding("daemon", OK, f"none runs in {host.runtime}; what follows is about one started from here")
        return
    if host.version != kvtier_client.__version__:
        yield Finding(
            *("daemon", WARNING, f"kvtierd is {host.version} and this client {kvtier_client.__version__}"),
            "upgrade the older of the two; a restart of kvtierd keeps the pages on SSD",
        )
    else:
        yield Finding("daemon", OK, f"kvtierd {host.version} answers")
    if not host.compiled:
        level = WARNING if _cuda_tiers(config) else OK
        yield Finding(
            *("compiled", level),
            "kvtierd runs from its sources: a page's move takes it several times the processor time",
            "install it with KVTIER_COMPILE=1 (docs/operations.md)" if level == WARNING else "",
        )
    if host.foreign or (host.pid and host.apart()):
        kind = "a PID" if host.foreign else "an IPC"
        level = FATAL if _cuda_tiers(config) else OK
        yield Finding(
            *(
                "containers",
                level,
                f"kvtierd is in {kind} namespace of its own: host memory can be shared, GPU memory not",
            ),
            "run daemon and workers with --pid=host --ipc=host (docs/containers.md)" if level == FATAL else "",
        )


CHECKS: tuple[Check, ...] = (
    *(check_daemon, check_directories, check_memory, check_memlock, check_shared_memory, check_huge_pages),
    *(check_pidfd, check_disk, check_clock, check_gpus, check_numa),
)


def check_speed(host: Host, config: Config, progress: Callable[[str, float], None]) -> Iterator[Finding]:
    """A short probe of each file tier's disk. Not while a daemon works on it: they would slow each other."""
    for name, tier in _file_tiers(config):
        place, (free, _) = host.writable(tier.path), host.usage(tier.path)
        if place is None or free < 4 * _BLOCK:
            continue
        try:
            speed = host.speed(place, free, lambda share, name=name: progress(name, share))  # type: ignore[misc]
        except OSError as error:
            yield Finding("speed", WARNING, f"tier {name}: the probe failed: {error.strerror}", "see dmesg")
            continue
        text = f"tier {name}: reads {speed.read / 1e9:.2f} GB/s, writes {speed.write / 1e9:.2f} GB/s, one at a time"
        if speed.read < SLOW_READ or speed.write < SLOW_WRITE:
            yield Finding(
                *("speed", WARNING, text + ": slow"),
                "put the tier on a local NVMe disk; where computing a page is faster than reading it, leave the tier out",
            )
        else:
            yield Finding("speed", OK, text)


def examine(host: Host, config: Config) -> list[Finding]:
    """Every check but the speed's. One that fails is a finding too: the others must not be lost to it."""
    found: list[Finding] = []
    for check in CHECKS:
        try:
            found += check(host, config)
        except (KvtierError, LookupError, OSError, RuntimeError, ValueError) as error:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            found.append(Finding(name, WARNING, f"not checked: {error}", "please report this"))
    return found


def meet(host: Host, endpoint: str | None) -> None:
    """Find out about the daemon that runs, if one does."""
    host.runtime = paths.find_endpoint(endpoint)
    try:
        with Client(endpoint, name="kvtier doctor") as client:
            report = client.stats()["daemon"]
    except DaemonLost:
        host.denied = _denied(host.runtime)
        return
    except KvtierError as error:
        host.problem = str(error)
        return
    host.version, host.compiled = report["version"], report.get("compiled", True)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(host.runtime / paths.ATTACH_SOCKET))
        pid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    host.pid, host.foreign = pid, pid == 0


def run(endpoint: str | None, file: str, flags: list[str], *, probe: bool, as_json: bool) -> int:
    """Examine, say what was found, and give the exit status."""
    host = Host()
    meet(host, endpoint)
    if host.pid and not file and not flags:
        file, flags = _of_command(host.arguments())
    file = file or (SYSTEM_CONFIG if os.access(SYSTEM_CONFIG, os.R_OK) else "")
    try:
        config = settings.load(file or None, flags=flags)
    except ConfigError as error:
        found = [Finding("settings", FATAL, str(error), "kvtierd --check-config says whether it is mended")]
    else:
        found = [Finding("settings", OK, file or "none: the defaults")]
        found += examine(host, config)
        if probe and not host.pid and not host.foreign:
            found += check_speed(host, config, _progress if sys.stderr.isatty() else lambda name, share: None)
    levels = {finding.level for finding in found}
    status = 2 if FATAL in levels else 1 if WARNING in levels else 0
    if as_json:
        print(json.dumps({"status": status, "findings": [finding._asdict() for finding in found]}, indent=2))
        return status
    for finding in found:
        print(f"{finding.level:8}{finding.check:15}{finding.text}")
        if finding.mend:
            print(f"{'':23}-> {finding.mend}")
    return status


def _denied(runtime: Path) -> bool:
    """Whether permissions alone keep this user from the daemon's sockets there."""
    try:
        return not os.access(runtime / paths.ATTACH_SOCKET, os.W_OK) and (runtime / paths.ATTACH_SOCKET).exists()
    except PermissionError:  # what is in the directory does not even show
        return True


def _of_command(arguments: list[str]) -> tuple[str, list[str]]:
    """The settings' file and the settings on a daemon's command line."""
    file, flags = "", []
    for at, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        value = value if equals else "".join(arguments[at + 1 : at + 2])
        if name == "--config":
            file = value
        elif name == "--set":
            flags.append(value)
        elif name == "--runtime-dir":
            flags.append(f"runtime_dir={value}")
    return file, flags


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _progress(name: str, share: float) -> None:
    done = int(30 * share)
    end = "\r\x1b[K" if share >= 1 else ""
    print(
        f"\rmeasuring tier {name} [{'#' * done}{' ' * (30 - done)}] {share:4.0%}{end}",
        end="",
        file=sys.stderr,
        flush=True,
    )
