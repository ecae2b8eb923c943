"""The daemon's state, compiled: the same sources as C extensions, by mypyc, in half the time a page or less.

    KVTIER_COMPILE=1 pip install .        needs a C compiler and Python's headers

A build hook of hatchling's. Extensions stand beside the sources and go before them; an interpreter that they were not made
for takes the sources.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # deploy/build-deb wants the extensions alone
    BuildHookInterface = object

ROOT = Path(__file__).resolve().parents[1]
MODULES = (
    "counters",
    "directory",
    "jobs",
    "operations",
    "placement",
    "recency",
    "room",
    "sessions",
    "slabs",
    "store",
    "tiers",
    "verbs",
)
"""Of kvtier_daemon: what the state thread does a page. They call each other directly, so they are compiled together."""
_SETUP = """
from mypyc.build import mypycify
from setuptools import setup

modules = mypycify({arguments}, opt_level="3", debug_level="0", group_name="kvtier_daemon")
setup(name="kvtier", ext_modules=modules)
"""


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc]
    """hatchling asks for this name. It does nothing unless told to, and nothing for an editable install."""

    def dependencies(self) -> list[str]:
        if not self._wanted():
            return []
        return ["mypy>=2.4,<2.5", "setuptools>=77", *self.metadata.core.dependencies]  # mypy reads what is imported

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not self._wanted() or version == "editable":
            return
        self.made = tempfile.TemporaryDirectory()
        place = Path(self.made.name)
        make(place)
        for path in place.rglob("*.so"):
            build_data["force_include"][str(path)] = str(path.relative_to(place))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "made"):
            self.made.cleanup()

    def _wanted(self) -> bool:
        return self.target_name == "wheel" and os.environ.get("KVTIER_COMPILE") == "1"


def make(place: Path) -> None:
    """Make the extensions in `place`, where kvtier is to be. Exits with the compiler's words if it fails."""
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        for package in ("kvtier", "daemon/kvtier_daemon"):
            shutil.copytree(ROOT / package, work / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
        arguments = ["--ignore-missing-imports", *(f"kvtier_daemon/{name}.py" for name in MODULES)]
        (work / "setup.py").write_text(_SETUP.format(arguments=arguments))
        command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(place.resolve())]
        run = subprocess.run(
            command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if run.returncode:
            sys.exit(f"{run.stdout}\ncompiling failed; without KVTIER_COMPILE=1, kvtierd is installed as its sources")
