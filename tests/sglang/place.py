"""Where `.ci/sglang` puts SGLang, for the Python that runs this: `python -m tests.sglang.place` prints it."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

RECIPE = Path(__file__).parents[2] / ".ci" / "sglang"


def place() -> Path:
    """Another folder when the recipe changes."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    recipe = hashlib.sha256(RECIPE.read_bytes()).hexdigest()[:8]
    return cache / "kvtier-ci" / f"sglang-{recipe}-cp{sys.version_info.major}{sys.version_info.minor}"


if __name__ == "__main__":
    print(place())
