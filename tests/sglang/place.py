"""Where `.ci/sglang` puts SGLang, for the Python that runs this: `python -m tests.sglang.place` prints it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

VERSION = "0.5.23"


def place() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kvtier-ci" / f"sglang-{VERSION}-cp{sys.version_info.major}{sys.version_info.minor}"


if __name__ == "__main__":
    print(place())
