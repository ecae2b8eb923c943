"""Every watched variant compiles for every architecture, and none needs stack that it did not need before.

Registers, shared memory and stack of each stand in `resources.json`. Stack means spilled registers; a variant that has
more of it than the file says fails, and so does one that needs more shared memory than a program can have. After a
change that is meant:

    python -m kvtier_kernels.warmup --target sm_80 --target sm_90 --target sm_100 --json > tests/kernels/resources.json
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

ROOT = Path(__file__).parents[2]
BASELINE = Path(__file__).with_name("resources.json")
SHARED_LIMIT = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448}

pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."),
    reason="resources.json was made with Triton 3.6, the one that is deployed",
)


@functools.cache
def compilers() -> dict[str, subprocess.Popen[str]]:
    """One process a target, all started at the first use: kernels of this process may be the interpreter's."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    command = [sys.executable, "-m", "kvtier_kernels.warmup", "--json", "--target"]
    return {
        target: subprocess.Popen(
            [*command, target], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        for target in SHARED_LIMIT
    }


@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", sorted(SHARED_LIMIT))
def test_every_variant_compiles_without_new_spills(target: str) -> None:
    out, err = compilers()[target].communicate()
    assert compilers()[target].returncode == 0, err[-3000:]
    found = json.loads(out)
    known = {name: needs for name, needs in json.loads(BASELINE.read_text()).items() if name.startswith(f"{target}:")}
    for name, needs in found.items():
        print(f"{name:<72} {needs['registers']:>4} registers {needs['shared']:>7} shared {needs['stack']:>4} stack")
    assert set(found) == set(known), "variants were added or removed: make resources.json again"
    too_large = {name: needs["shared"] for name, needs in found.items() if needs["shared"] > SHARED_LIMIT[target]}
    assert not too_large
    spills = {name: needs["stack"] for name, needs in found.items() if needs["stack"] > known[name]["stack"]}
    assert not spills, f"more stack than {BASELINE.name} says: {spills}"
