"""Compiling kernels without a GPU, and what the machine code of one needs: registers, shared memory, stack.

A `Variant` names a kernel and all that its machine code depends on. `kvtier_kernels.variants` lists those that are
kept under watch; a stack, which on a GPU means spilled registers, is what a change to a kernel breaks first.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {"sm_80": 80, "sm_90": 90, "sm_100": 100}


class Variant(NamedTuple):
    """One compilation: the kernel, types of its run-time arguments, constants, and compile options."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]


class Resources(NamedTuple):
    """What one program needs: registers a thread, bytes of shared memory, bytes of stack a thread (spills)."""

    registers: int
    shared: int
    stack: int


def compile_for(variant: Variant, target: str) -> tuple[Any, Resources]:
    """The compiled variant for one of TARGETS, and its resources. Needs no GPU; compiled code is cached by Triton.

    Must run in a process whose kernels were not defined for Triton's interpreter.
    """
    names = variant.kernel.arg_names
    unknown = set(names) ^ (set(variant.types) | set(variant.constants))
    if unknown:
        raise TypeError(f"{variant.name}: {', '.join(sorted(unknown))} lack a type, or are no arguments")
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    # Pointers come from allocators and strides from shapes, both multiples of 16: as the launcher finds them.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or (name.startswith("s_") and signature[name] != "constexpr")
    }
    source = _source_class(variant.kernel)(fn=variant.kernel, signature=signature, constexprs=constants, attrs=aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", TARGETS[target], 32), options=variant.options)
    registers, stack = _usage(binary.asm["cubin"])
    return binary, Resources(registers, binary.metadata.shared, stack)


def _source_class(kernel: Any) -> type[ASTSource]:
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    return ASTSource


def _usage(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [_tool("cuobjdump"), "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if not found:
        raise RuntimeError(f"cuobjdump reported no registers: {text[:200]}")
    return int(found[1]), int(found[2])


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)
