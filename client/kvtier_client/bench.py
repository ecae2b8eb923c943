"""`kvtier bench`: what this host gives, beside what kvtierd gives on it, in well under two minutes.

A limit is measured in the same run with the plainest code there is: memmove, an O_DIRECT loop over one file, one large
copy of pinned memory. kvtierd is a private daemon in a temporary directory, or with `--running` the one that serves, in a
namespace of its own, with no more bytes than its tiers have free, so that nobody's pages are evicted; the namespace is
evicted afterwards, whatever happened.
Not here: benches of the project itself, with goals and peers (`bench/`).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import secrets
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvtier import device, paths
from kvtier.device import CudaUnavailable, Device
from kvtier.errors import ConfigError, InvalidRequest, KvtierError
from kvtier.layout import AttentionLayout
from kvtier.memory import available_memory
from kvtier.sizes import format_size
from kvtier_client.client import Client
from kvtier_client.local import LocalDaemon
from kvtier_client.namespace import NamespaceClient

LAYOUT = AttentionLayout(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16")
"""A usual 8B model: units of 2 MiB."""
PAGE = LAYOUT.unit_stride
_MIB = 1 << 20
_ROUNDS = 3
_STAGE = 15.0
"""Seconds after which a stage is not repeated."""
_DEPTH = 8
_AT_ONCE = 32
_LEAST = 32 * _MIB
_SLAB = 64 * _MIB
_WAIT = 60.0


class Row(NamedTuple):
    """One figure. `limit` is what the host gives, 0 where there is nothing to compare with."""

    name: str
    value: float
    limit: float
    unit: str
    against: str

    @property
    def ratio(self) -> float:
        return self.value / self.limit if self.limit else 0.0


class Skipped(NamedTuple):
    what: str
    why: str


def run(given: argparse.Namespace) -> int:
    """The command. Exit status 0; 1 comes from the errors that it raises."""
    if given.plot:
        _matplotlib()
    if given.size < _LEAST:
        raise InvalidRequest(f"--size {format_size(given.size)} is too little to measure with: at least 32 MiB")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    rows: list[Row] = []
    skipped: list[Skipped] = []
    started = time.monotonic()
    with _progress() as step:
        bench = _running if given.running else _private
        bench(given, step, rows, skipped)
    seconds = time.monotonic() - started
    if given.json:
        figures = [{**row._asdict(), "ratio": row.ratio} for row in rows]
        plain = [one._asdict() for one in skipped]
        print(json.dumps({"seconds": seconds, "figures": figures, "skipped": plain}, indent=2))
    else:
        _draw(console, rows, skipped, seconds)
    if given.plot:
        plot(rows, Path(given.plot))
        print(f"drawn to {given.plot}", file=sys.stderr)
    return 0


Step = Callable[[str, float], None]


def _private(given: argparse.Namespace, step: Step, rows: list[Row], skipped: list[Skipped]) -> None:
    """A daemon of our own: host and SSD, then, where there are GPUs, GPU and host."""
    parent = Path(given.directory) if given.directory else paths.state_dir()
    parent.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="bench-", dir=parent))
    runtime = tempfile.mkdtemp(prefix="kvb-")
    try:
        size = _affordable(given.size, shutil.disk_usage(place).free, skipped)
        roomy = _setting(2 * size + 2 * _SLAB)
        settings = (
            *("tiers.host.slab=64MiB", "tiers.ssd.slab=64MiB", f"tiers.ssd.path={place / 'ssd'}"),
            f"tiers.host.write_queue={_setting(2 * size)}",
        )
        with (
            BareFile(place, size, step, skipped) as disk,
            LocalDaemon(host=roomy, ssd=roomy, directory=runtime, settings=settings) as daemon,
            daemon.client(name="kvtier bench") as client,
        ):
            _tiers(client, ("host", "ssd"), size, step, rows, disk)
        if given.no_gpu:
            return
        gpus = _gpus(skipped)
        if gpus:
            step("GPU: plain copies", 0.65)
            links = _links(gpus, size)
            first = ("tiers.hbm.medium=cuda", "tiers.hbm.device=all", f"tiers.hbm.capacity={roomy}")
            plain = ("tiers.host.slab=64MiB", "tiers.hbm.slab=64MiB", "tiers.host.write_queue=1")
            with LocalDaemon(host=roomy, directory=runtime, settings=plain, first=first) as daemon:
                _gpu_tiers(daemon.endpoint, gpus, size, step, rows, links, skipped)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(runtime, ignore_errors=True)


def _running(given: argparse.Namespace, step: Step, rows: list[Row], skipped: list[Skipped]) -> None:
    """The daemon that serves, with what is free in it."""
    with Client(given.endpoint, name="kvtier bench") as client:
        tiers = client.stats()["tiers"]
        host = next((tier["name"] for tier in tiers if tier["medium"] == "host"), None)
        ssd = next((tier["name"] for tier in tiers if tier["medium"] == "file" and not tier["closed"]), None)
        if host is None:
            raise InvalidRequest("this daemon has no host tier to measure")
        used = [tier for tier in tiers if tier["name"] in (host, ssd)]
        spare = min(map(_spare, used)) - _SLAB
        size = min(given.size, max(0, spare) // 2 // PAGE * PAGE)
        if size < _LEAST:
            raise InvalidRequest(
                f"the daemon's tiers have {format_size(max(0, spare))} to spare, and measuring with more would evict "
                f"others' pages: raise a capacity (kvtier resize), or run kvtier bench without --running"
            )
        if size < given.size:
            skipped.append(Skipped("the size asked for", f"{format_size(size)} is what the tiers have free"))
        names = (host, ssd) if ssd else (host,)
        with contextlib.ExitStack() as stack:
            disk = None
            if ssd is None:
                skipped.append(Skipped("SSD", "the daemon has no open file tier"))
            elif given.directory:
                disk = stack.enter_context(BareFile(Path(given.directory), size, step, skipped))
            else:
                why = "say --directory, on the file system of the daemon's tier"
                skipped.append(Skipped("the disk's own speed", why))
            _tiers(client, names, size, step, rows, disk)
    if given.no_gpu or not any(tier["medium"] == "cuda" for tier in tiers):
        return
    gpus = _gpus(skipped)
    if gpus:
        room = min(_spare(tier) for tier in tiers if tier["medium"] == "cuda") // 2 - _SLAB
        size = min(size, max(0, room) // PAGE * PAGE)
        if size < _LEAST:
            skipped.append(Skipped("GPU", "its tier is full, and others' pages would be evicted"))
            return
        step("GPU: plain copies", 0.65)
        _gpu_tiers(str(client.directory), gpus, size, step, rows, _links(gpus, size), skipped)


# What kvtierd gives


def _tiers(
    client: Client,
    names: Sequence[str],
    size: int,
    step: Step,
    rows: list[Row],
    disk: BareFile | None,
) -> None:
    """Host memory, and the SSD where `names` has a second; turn about with their limits, so that all see one machine."""
    source = mmap.mmap(-1, PAGE)
    source.write(os.urandom(PAGE))
    with _space(client) as space:
        step("round trips", 0.2)
        _write(space, _chain(space, 0, size), names[0], source)  # slabs are made before the clock runs
        one = _chain(space, 0, size)[:1]
        single = _times(lambda: space.borrow(one, tier=names[0]).release(), 300)
        whole = _chain(space, 0, size)
        many = _times(lambda: space.borrow(whole, tier=names[0]).release(), 20)
        rows.append(Row("borrow and release 1 page", statistics.median(single) * 1e6, 0, "us", ""))
        label = f"borrow and release {len(whole)} pages"
        rows.append(Row(label, statistics.median(many) * 1e6, 0, "us", ""))
        space.evict()
        step("writing and reading host memory", 0.25)
        writes, reads, copies = [], [], []
        memory = BareMemory(size)
        for turn in _rounds():
            keys = _chain(space, 10 + turn, size)
            writes.append(size / _write(space, keys, names[0], source) / 1e9)
            reads.append(size / _read(space, keys, names[0]) / 1e9)
            copies.append((memory.write(), memory.read()))
            space.evict()
        filled, copied = (statistics.median(rates) for rates in zip(*copies, strict=True))
        rows.append(Row("write pages, host", statistics.median(writes), filled, "GB/s", "memmove"))
        rows.append(Row("read borrowed pages, host", statistics.median(reads), copied, "GB/s", "memmove"))
        if len(names) < 2:
            return
        step("writing and reading SSD", 0.4)
        on_disk = disk.nbytes if disk is not None else size
        writes, reads = [], []
        bare: list[tuple[float, float]] = []
        for turn in _rounds(one_more=True):
            keys = _chain(space, 20 + turn, on_disk)
            started = time.perf_counter()
            _write(space, keys, names[0], source)
            held = space.migrate(keys, names[1], timeout=_WAIT)
            writes.append(on_disk / (time.perf_counter() - started) / 1e9)
            moved = space.migrate(keys, names[1], move=True, timeout=_WAIT)
            if held < len(keys) or moved < len(keys):
                raise InvalidRequest(
                    f"only {min(held, moved)} of {len(keys)} pages came to tier {names[1]}: it is full, or slow, or busy; "
                    f"try a smaller --size"
                )
            started = time.perf_counter()
            with space.borrow(keys, tier=names[0], timeout=_WAIT) as lease:
                reads.append(on_disk / (time.perf_counter() - started) / 1e9)
                _complete(lease, keys)
            space.evict()
            if disk is not None:
                bare.append((disk.write(), disk.read()))
        # the first turn made the files' blocks
        limits = [statistics.median(rates) for rates in zip(*bare, strict=True)] or [0.0, 0.0]
        rows.append(Row("SSD write", statistics.median(writes[1:] or writes), limits[0], "GB/s", "O_DIRECT"))
        rows.append(Row("SSD read", statistics.median(reads[1:] or reads), limits[1], "GB/s", "O_DIRECT"))


def _gpu_tiers(
    endpoint: str,
    gpus: Sequence[Device],
    size: int,
    step: Step,
    rows: list[Row],
    links: Links,
    skipped: list[Skipped],
) -> None:
    """Promotion, demotion and, with two GPUs, migration between them."""
    step("copies between GPU and host", 0.7)
    with Client(endpoint, name="kvtier bench", device=gpus[0].uuid) as client, _space(client) as space:
        tiers = client.stats()["tiers"]
        cuda = [tier["name"] for tier in tiers if tier["medium"] == "cuda"]
        own = client.current().fastest
        host = next(tier["name"] for tier in tiers if tier["medium"] == "host")
        if own not in cuda:
            skipped.append(Skipped("GPU", f"GPU {gpus[0].uuid} has no tier in this daemon"))
            return
        source = mmap.mmap(-1, PAGE)
        ups, downs, across = [], [], []
        peers = [name for name in cuda if name != own]
        for turn in _rounds(one_more=True):
            keys = _chain(space, 30 + turn, size)
            _write(space, keys, host, source)
            started = time.perf_counter()
            with space.borrow(keys, tier=own, timeout=_WAIT) as lease:
                ups.append(size / (time.perf_counter() - started) / 1e9)
                _complete(lease, keys)
            space.evict()
            keys = _chain(space, 50 + turn, size)
            _write(space, keys, own, source)
            started = time.perf_counter()
            _all(space.migrate(keys, host, timeout=_WAIT), keys, host)
            downs.append(size / (time.perf_counter() - started) / 1e9)
            if peers:
                started = time.perf_counter()
                _all(space.migrate(keys, peers[0], timeout=_WAIT), keys, peers[0])
                across.append(size / (time.perf_counter() - started) / 1e9)
            space.evict()
        # the first turn made the slabs
        rows.append(Row("host to GPU", statistics.median(ups[1:] or ups), links.up, "GB/s", "H2D copy"))
        rows.append(Row("GPU to host", statistics.median(downs[1:] or downs), links.down, "GB/s", "D2H copy"))
        if across:
            value = statistics.median(across[1:] or across)
            rows.append(Row("GPU to GPU", value, links.across, "GB/s", "peer copy" if links.across else ""))


@contextlib.contextmanager
def _space(client: Client) -> Iterator[NamespaceClient]:
    """A namespace that nobody else has, of pages of one size; evicted on any way out."""
    space = client.namespace(LAYOUT, model="kvtier-bench", salt=secrets.token_hex(8), cap_tokens=LAYOUT.unit_tokens)
    try:
        yield space
    finally:
        space.evict()


def _chain(space: NamespaceClient, seed: int, nbytes: int) -> list[bytes]:
    return space.keys([seed] * (nbytes // PAGE * LAYOUT.unit_tokens))


def _write(space: NamespaceClient, keys: list[bytes], tier: str, source: mmap.mmap) -> float:
    """Reserve, fill and commit; seconds spent filling."""
    buffer = ctypes.addressof(ctypes.c_char.from_buffer(source))
    spent = 0.0
    start = 0
    while start < len(keys):
        with space.reserve(keys[: start + _AT_ONCE], start=start, tier=tier, timeout=_WAIT) as fresh:
            addresses = [page.address for page in fresh]
            started = time.perf_counter()
            if fresh and _on_gpu(fresh[0]):
                for address in addresses:
                    device.runtime().memset(address, start % 251, PAGE)
                device.runtime().deviceSynchronize()
            else:
                for address in addresses:
                    ctypes.memmove(address, buffer, PAGE)
            spent += time.perf_counter() - started
            fresh.commit()
            start += len(addresses)
    return spent


def _read(space: NamespaceClient, keys: list[bytes], tier: str) -> float:
    """Borrow, and copy each page out; seconds spent copying."""
    target = mmap.mmap(-1, PAGE)
    buffer = ctypes.addressof(ctypes.c_char.from_buffer(target))
    with space.borrow(keys, tier=tier, timeout=_WAIT) as lease:
        _complete(lease, keys)
        addresses = [page.address for page in lease]
        started = time.perf_counter()
        for address in addresses:
            ctypes.memmove(buffer, address, PAGE)
        return time.perf_counter() - started


def _on_gpu(page: Any) -> bool:
    from kvtier_client.gpu import DeviceMapping

    return isinstance(page.holder.attachment.mapping(page.handle.slab), DeviceMapping)


def _complete(lease: Any, keys: Sequence[bytes]) -> None:
    if len(lease) < len(keys):
        raise InvalidRequest(
            f"only {len(lease)} of {len(keys)} pages could be borrowed: the tier is too small or busy; a smaller --size"
        )


def _all(count: int, keys: Sequence[bytes], tier: str) -> None:
    if count < len(keys):
        raise InvalidRequest(f"only {count} of {len(keys)} pages came to tier {tier}: try a smaller --size")


def _rounds(*, one_more: bool = False) -> Iterator[int]:
    started = time.monotonic()
    for turn in range(_ROUNDS + one_more):
        if turn > one_more and time.monotonic() - started > _STAGE:
            return
        yield turn


def _times(action: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return times


# What the host gives


class Links(NamedTuple):
    """GB/s of plain copies. `across` is 0 where there is one GPU, or no link between two."""

    up: float
    down: float
    across: float


class BareMemory:
    """GB/s of memmove between one page and pages that are mapped already, both ways."""

    def __init__(self, size: int) -> None:
        self.page, self.pages = mmap.mmap(-1, PAGE), mmap.mmap(-1, size)
        self.page.write(os.urandom(PAGE))
        self.one, self.many = (ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in (self.page, self.pages))
        self.write()

    def write(self) -> float:
        return self._copy(lambda address: ctypes.memmove(address, self.one, PAGE))

    def read(self) -> float:
        return self._copy(lambda address: ctypes.memmove(self.one, address, PAGE))

    def _copy(self, move: Callable[[int], object]) -> float:
        started = time.perf_counter()
        for offset in range(0, len(self.pages), PAGE):
            move(self.many + offset)
        return len(self.pages) / (time.perf_counter() - started) / 1e9


class BareFile:
    """GB/s of pages written to and read from one preallocated file with O_DIRECT, by as many threads as kvtierd uses.
    `nbytes` is how much at a time: less than `size` where the disk is slow. A context manager that removes it."""

    def __init__(self, directory: Path, size: int, step: Step, skipped: list[Skipped]) -> None:
        step("the disk by itself", 0.05)
        handle, name = tempfile.mkstemp(prefix=".kvtier-bench-", dir=directory)
        os.close(handle)
        self.path = Path(name)
        try:
            self.fd = os.open(self.path, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            self.path.unlink()
            raise ConfigError(
                f"{directory} does not take O_DIRECT ({error.strerror}), so its speed would be that of the page cache: "
                f"give a directory on a disk with --directory"
            ) from error
        self.buffer = mmap.mmap(-1, PAGE * _DEPTH)
        self.buffer.write(os.urandom(PAGE) * _DEPTH)
        self.nbytes = _LEAST
        try:
            os.posix_fallocate(self.fd, 0, size)
            seconds = size / 1e9 / self.write()
            self.nbytes = size
            if seconds > _STAGE / 4:
                self.nbytes = max(_LEAST, int(size * _STAGE / 4 / seconds) // PAGE * PAGE)
                skipped.append(Skipped("part of --size on disk", f"it is slow: {format_size(self.nbytes)} at a time"))
            self.write()  # blocks are written once before they count, as the daemon's are
        except BaseException:
            self.__exit__()
            raise

    def write(self) -> float:
        return self._transfer(lambda view, offset: os.pwritev(self.fd, [view], offset), sync=True)

    def read(self) -> float:
        return self._transfer(lambda view, offset: os.preadv(self.fd, [view], offset), sync=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)
        self.path.unlink(missing_ok=True)

    def _transfer(self, move: Callable[[memoryview, int], object], *, sync: bool) -> float:
        offsets = iter(range(0, self.nbytes, PAGE))
        lock = threading.Lock()
        errors: list[OSError] = []

        def work(thread: int) -> None:
            view = memoryview(self.buffer)[thread * PAGE : (thread + 1) * PAGE]
            while not errors:
                with lock:
                    offset = next(offsets, None)
                if offset is None:
                    return
                try:
                    move(view, offset)
                except OSError as error:
                    errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(_DEPTH)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise InvalidRequest(f"the disk could not be measured: {errors[0].strerror}") from errors[0]
        if sync:
            os.fdatasync(self.fd)
        return self.nbytes / (time.perf_counter() - started) / 1e9


def _gpus(skipped: list[Skipped]) -> list[Device]:
    try:
        found = device.devices()
    except CudaUnavailable as error:
        skipped.append(Skipped("GPU", str(error)))
        return []
    if not found:
        skipped.append(Skipped("GPU", "this process sees none"))
    return found


def _links(gpus: Sequence[Device], size: int) -> Links:
    """Each the best of some copies of `size` bytes of pinned memory."""
    cuda: Any = device.runtime()
    host = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(host))
    device.use(gpus[0].ordinal)
    taken: list[tuple[int, int]] = []

    def take(gpu: Device) -> int:
        device.use(gpu.ordinal)
        taken.append((gpu.ordinal, device.allocate(size)))
        return taken[-1][1]

    def best(target: int, source: int) -> float:
        rates = []
        for _ in range(_ROUNDS + 2):
            started = time.perf_counter()
            cuda.memcpyAsync(target, source, size, cuda.memcpyDefault, 0)
            cuda.deviceSynchronize()
            rates.append(size / (time.perf_counter() - started) / 1e9)
        return max(rates)

    device.pin(address, size)
    try:
        own = take(gpus[0])
        up, down, across = best(own, address), best(address, own), 0.0
        if len(gpus) > 1 and device.connect(gpus[0].ordinal, gpus[1].ordinal):
            other = take(gpus[1])
            device.use(gpus[0].ordinal)
            across = best(other, own)
        return Links(up, down, across)
    finally:
        for ordinal, memory in taken:
            device.use(ordinal)
            cuda.free(memory)
        device.use(gpus[0].ordinal)
        device.unpin(address, size)


def _spare(tier: dict[str, Any]) -> int:
    """Bytes of a tier that can be had without evicting anything."""
    return int(tier["capacity"] - tier["allocated"] + tier["empty"])


def _affordable(asked: int, on_disk: int, skipped: list[Skipped]) -> int:
    """As much of what was asked for as memory and disk allow three times over."""
    size = min(asked, available_memory() // 4, on_disk // 5) // PAGE * PAGE
    if size < _LEAST:
        raise InvalidRequest(
            f"there are {format_size(available_memory())} of memory and {format_size(on_disk)} of disk free: too little to "
            f"measure; free some, or name another --directory"
        )
    if size < asked // PAGE * PAGE:
        skipped.append(Skipped("the size asked for", f"{format_size(size)} is what memory and disk allow"))
    return size


def _setting(nbytes: int) -> str:
    """For a setting."""
    return f"{-(-nbytes // _MIB)}MiB"


# How it is told


@contextlib.contextmanager
def _progress() -> Iterator[Step]:
    """A bar on standard error; on a pipe, a line for each step."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda text, share: print(f"{text} ...", file=sys.stderr, flush=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(40, "grey50", "color(33)"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda text, share: progress.update(task, description=f"{text:44}", completed=share)


def _draw(console: Console, rows: Sequence[Row], skipped: Sequence[Skipped], seconds: float) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "kvtierd", "this host", "ratio", "unit", ""):
        table.add_column(name, justify="right" if name in ("kvtierd", "this host", "ratio") else "left", no_wrap=True)
    for row in rows:
        limit = (f"{row.limit:.2f}", f"{row.ratio:.2f}") if row.limit else ("", "")
        bar = "#" * round(20 * min(1.0, row.ratio)) if row.limit else ""
        against = f"of {row.against}" if row.against and row.limit else ""
        table.add_row(row.name, f"{row.value:.2f}", *limit, row.unit, f"[color(33)]{bar:20}[/] {against}")
    console.print(table)
    for one in skipped:
        console.print(f"without {one.what}: {one.why}", style="color(208)", markup=False, soft_wrap=True)
    console.print(f"took {seconds:.0f} s")


def plot(rows: Sequence[Row], file: Path) -> None:
    """Bars of the ratios, each with its figures beside it."""
    pyplot = _matplotlib()
    compared = [row for row in rows if row.limit][::-1]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.55 * len(compared)), layout="constrained")
    axes.barh([row.name for row in compared], [row.ratio for row in compared], color="#0072B2", height=0.6)
    axes.axvline(1.0, color="#D55E00", linestyle="--", linewidth=1.5)
    for at, row in enumerate(compared):
        text = f"{row.value:.2f} of {row.limit:.2f} {row.unit} ({row.against})"
        inside = row.ratio > 0.5
        color = "white" if inside else "black"
        axes.text(0.02 if inside else row.ratio + 0.02, at, text, va="center", color=color, fontsize=9)
    axes.set_xlim(0, max(1.1, *(1.1 * row.ratio for row in compared)) if compared else 1.1)
    axes.set_xlabel("kvtierd's share of what this host gives (dashed: all of it)")
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(file, dpi=150, format="png")
    except OSError as error:
        raise InvalidRequest(f"--plot {file}: {error.strerror}") from error
    finally:
        pyplot.close(figure)


class PlotUnavailable(KvtierError):
    code = "invalid"


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise PlotUnavailable("--plot needs matplotlib: pip install 'kvtier[plot]'") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
