"""Kernels run in Triton's interpreter where there is no GPU; it must be chosen before any kernel is defined."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

# Helpers of these tests are plain modules beside them; importlib mode puts no test folder on the path by itself.
sys.path.insert(0, str(Path(__file__).parent))

if not torch.cuda.is_available():
    if "kvtier_kernels.widening" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "kernels were imported before TRITON_INTERPRET was set: run tests/kernels in a session of its own"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    import interpreter_repair

    interpreter_repair.apply()
