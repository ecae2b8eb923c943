"""What each launch is compiled with: tile sizes, warps, stages, programs, and how stored precisions are read.

A choice comes from, in this order: the file that `kvtier_kernels.tune` recorded (KVTIER_KERNELS_TUNING, by default
`~/.cache/kvtier/kernels.json`), or the defaults below, which were measured on an H200 (docs/kernels.md). Choices never
depend on lengths, so a launch that was compiled once is never compiled again for other lengths.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvtier.errors import ConfigError
from kvtier.layout import AttentionLayout, LatentLayout
from kvtier_kernels.widening import FLOAT, FLOAT8, INT4, INT8

Device = torch.device | int | None
"""Where a kernel will run: a device, or the compute capability (90 for 9.0) of one that is not there."""


class Choice(NamedTuple):
    """How a kernel is compiled and spread. `per_sm`: programs resident on a multiprocessor, for persistent launches;
    `gluon`: 1 for the kernel that is written for the GPU's own matrix units, where there is one (`warpgroups`)."""

    block: int
    warps: int
    stages: int
    per_sm: int = 1
    rows: int = 0
    sms: int = 1
    gluon: int = 0

    @property
    def programs(self) -> int:
        return self.sms * self.per_sm


class Stored(NamedTuple):
    """How a stored dtype is read: `kind` for the kernels, the element that addresses point to, the fast conversions."""

    kind: int
    element: Any
    fast: bool

    def pieces(self, words: bool) -> int:
        """How many accumulators an output is held in: 4 where V of quantised units is read in words, else 1, int4 2."""
        if self.kind == FLOAT.value:
            return 1
        return 4 if words else 2 if self.kind == INT4.value else 1


def padded(columns: int) -> int:
    """Columns of a tile for so many of a row: a power of two, of at least the 16 that products need."""
    return max(16, triton.next_power_of_2(columns))


def interpreting() -> bool:
    """Kernels run in Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def stored(dtype: str, device: Device = None) -> Stored:
    """How units of `dtype` are read on `device`. float8 is read as bytes where the device has no conversion of it."""
    fast = isinstance(device, int) or not interpreting()
    match dtype:
        case "float8_e4m3fn":
            native = fast and capability(device) >= 89
            return Stored(FLOAT8.value, tl.float8e4nv if native else tl.uint8, fast)
        case "int8":
            return Stored(INT8.value, tl.int8, fast)
        case "int4":
            return Stored(INT4.value, tl.uint8, fast)
        case _:
            return Stored(FLOAT.value, FLOATS[dtype], fast)


GLUON = triton.__version__.startswith("3.6.")
"""This is the release of Triton whose Gluon (an experimental part of it) kernels were written for and tested with."""

FEW = 16
"""Sequences that have long segments enough for programs with large tiles."""
FLOATS = {"float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16}


def decode(layout: AttentionLayout, rows: int, device: Device = None, batch: int = 1) -> Choice:
    """For decode of `batch` sequences with `rows` query rows a kv head."""
    wide = layout.head_dim > 128
    if interpreting() and not isinstance(device, int):
        return Choice(block=64 if layout.unit_tokens == 64 else 32, warps=4, stages=1, sms=3)
    if layout.dtype == "float32":
        choice = Choice(block=16, warps=4, stages=2, per_sm=1)
    elif layout.dtype in FLOATS:
        # For many sequences many small programs: what one of them waits for at the ends of its segments, the others hide.
        if wide:
            choice = Choice(block=32, warps=4 if rows <= 16 else 8, stages=3, per_sm=2 if rows <= 16 else 1)
        elif rows > 16:
            choice = Choice(block=32, warps=4, stages=3, per_sm=2)
        elif layout.unit_tokens < 64:
            choice = Choice(block=64, warps=4, stages=4, per_sm=2)
        elif rows <= 8 and batch <= FEW:
            choice = Choice(block=128, warps=4, stages=3, per_sm=1)
        else:
            choice = Choice(block=32, warps=1 if rows <= 8 else 2, stages=3, per_sm=4)
    elif wide or (layout.dtype == "int4" and layout.unit_tokens < 64 and rows > 8):
        choice = Choice(block=32, warps=2, stages=3, per_sm=4)
    elif rows > 16:
        choice = Choice(block=32, warps=4, stages=3, per_sm=2)
    elif layout.dtype == "int4" and rows <= 8:
        # One warp a program: what bounds int4 is arithmetic, and waiting for another warp.
        choice = Choice(block=64 if layout.unit_tokens >= 64 else 32, warps=1, stages=3, per_sm=8)
    else:
        choice = Choice(block=64, warps=2, stages=3, per_sm=4)
    return _recorded("decode", decode_key(layout, rows, batch), choice)._replace(sms=multiprocessors(device))


def prefill(layout: AttentionLayout, group: int, device: Device = None, *, plain: bool = False) -> Choice:
    """For prefill; `rows` are query tokens times heads of a group. `plain`: no options, and queries of the units' dtype."""
    rows = max(64 if layout.head_dim > 128 else 128, triton.next_power_of_2(group))
    if interpreting() and not isinstance(device, int):
        return Choice(
            block=64 if layout.unit_tokens == 64 else 32, warps=4, stages=1, rows=max(16, triton.next_power_of_2(group))
        )
    choice = Choice(block=64, warps=8, stages=4 if layout.head_dim <= 128 else 2, rows=rows)
    if device is not None and capability(device) < 90:
        choice = choice._replace(stages=min(choice.stages, 3))
    if layout.dtype == "float32":
        choice = Choice(block=16, warps=8, stages=1, rows=max(32, triton.next_power_of_2(group)))
    if plain and device is not None and prefill_warpgroups(layout, device):
        return _recorded("prefill", key(layout, group), Choice(block=128, warps=4, stages=3, rows=128, gluon=1))
    found = _recorded("prefill", key(layout, group), choice)
    return choice if found.gluon else found


def mla(layout: LatentLayout, rows: int, device: Device = None) -> Choice:
    """For latent decode with `rows` query rows."""
    if interpreting() and not isinstance(device, int):
        return Choice(block=16 if layout.unit_tokens == 16 else 32, warps=4, stages=1, rows=16, sms=3)
    few = rows <= 16
    choice = Choice(block=64, warps=4 if few else 8, stages=3 if few else 2, per_sm=1, rows=16 if few else 64)
    # Elsewhere than on Hopper these are what fits without spills; they were compiled, and never run.
    if device is not None and not hopper(device):
        choice = choice._replace(warps=8, stages=2) if few else choice._replace(block=32, rows=32)
    if layout.dtype == "float32":
        choice = Choice(block=16, warps=4, stages=1, per_sm=1, rows=16)
    if not few and device is not None and warpgroups(layout, device):
        choice = choice._replace(gluon=1)
    return _recorded("mla", mla_key(layout, rows), choice)._replace(sms=multiprocessors(device))


def warpgroups(layout: LatentLayout, device: Device) -> bool:
    """Whether latents of `layout` can be served by `mla_hopper` on `device`, from queries of their own dtype."""
    fits = (layout.latent, layout.rope) == (512, 64) and layout.dtype in ("bfloat16", "float16")
    return GLUON and fits and hopper(device)


def prefill_warpgroups(layout: AttentionLayout, device: Device) -> bool:
    """Whether units of `layout` can be served by `prefill_hopper` on `device`, to queries of their own dtype."""
    fits = layout.head_dim in (64, 128) and layout.dtype in ("bfloat16", "float16")
    return GLUON and fits and hopper(device)


def multiprocessors(device: Device) -> int:
    if not isinstance(device, torch.device) or device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def chains(device: Device) -> bool:
    """Whether a launch may be started before the one it depends on ends (programmatic dependent launch)."""
    return (isinstance(device, int) or not interpreting()) and capability(device) >= 90


def record_path() -> Path:
    """Where measured choices are kept."""
    named = os.environ.get("KVTIER_KERNELS_TUNING")
    return Path(named) if named else Path.home() / ".cache" / "kvtier" / "kernels.json"


def record(kernel: str, key: str, choice: Choice) -> None:
    """Keep a measured choice for this device's architecture, in this process and in the file."""
    path = record_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = dict(_file())
    entries[f"{_architecture()}/{kernel}/{key}"] = choice._replace(sms=1)._asdict()
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    partial.replace(path)
    _file.cache_clear()


@contextlib.contextmanager
def using(kernel: str, **fields: int) -> Iterator[None]:
    """Within the block, choices for `kernel` have these fields, whatever was measured or is the default."""
    before = _forced.get(kernel)
    _forced[kernel] = fields
    try:
        yield
    finally:
        _forced.pop(kernel)
        if before is not None:
            _forced[kernel] = before


_forced: dict[str, dict[str, int]] = {}


def _recorded(kernel: str, key: str, default: Choice) -> Choice:
    if kernel in _forced:
        return default._replace(**_forced[kernel])
    entries = _file()
    found = entries.get(f"{_architecture()}/{kernel}/{key}") if entries else None
    return default if found is None else Choice(**found)


@functools.cache
def _file() -> dict[str, dict[str, int]]:
    path = record_path()
    try:
        entries = json.loads(path.read_text())
        for fields in entries.values():
            Choice(**fields)
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no record of tuning ({error}): delete it, or set KVTIER_KERNELS_TUNING"
        ) from error
    return entries  # type: ignore[no-any-return]


@functools.cache
def _architecture() -> str:
    if not torch.cuda.is_available():
        return "none"
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def capability(device: Device) -> int:
    if isinstance(device, int):
        return device
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def hopper(device: Device) -> bool:
    return 90 <= capability(device) < 100


def mla_key(layout: LatentLayout, rows: int) -> str:
    return f"{layout.dtype}/{layout.unit_tokens}/{16 if rows <= 16 else 64}"


def decode_key(layout: AttentionLayout, rows: int, batch: int) -> str:
    return f"{key(layout, rows)}/{'few' if batch <= FEW else 'many'}"


def key(layout: AttentionLayout, rows: int) -> str:
    return f"{layout.dtype}/{layout.head_dim}/{layout.unit_tokens}/{max(8, triton.next_power_of_2(rows))}"
