"""The tests in `real`, in a process of their own with SGLang on its path; see `tests.sglang.place`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sglang.place import place

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_with_sglangs_own_pools_controller_and_factory() -> None:
    there = place()
    if not there.is_dir():
        pytest.skip(f"SGLang is not at {there}: .ci/sglang puts it there")
    paths = [there, *(ROOT / part for part in (".", "kernels", "daemon", "client"))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "KVTIER"))}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "tests/sglang/real"],
        env={**environment, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    print(run.stdout, run.stderr, sep="\n")
    assert run.returncode == 0
    assert " passed" in run.stdout.splitlines()[-1] and "skipped" not in run.stdout.splitlines()[-1]
