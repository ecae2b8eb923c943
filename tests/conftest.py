"""Before anything else is imported: without a GPU, kernels are defined for Triton's interpreter, in every test alike."""

from __future__ import annotations

import os
from pathlib import Path

if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")
