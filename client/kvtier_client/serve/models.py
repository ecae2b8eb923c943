"""A model and its tokenizer, from a directory, a .gguf file or the hub; and the worker that runs it.

Not here: what may be run on pages (`kvtier_client.transformers.model`, which refuses the rest).
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from kvtier.errors import ConfigError
from kvtier_client.client import Client
from kvtier_client.transformers import Worker
from kvtier_client.transformers.model import describe

log = logging.getLogger(__name__)


def find_device(wanted: str | None) -> torch.device:
    """Raises ConfigError for one that is not there."""
    if wanted is None:
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(f"--device {wanted}: {error}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {wanted}: torch sees {torch.cuda.device_count()} CUDA devices here")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def load(source: str, *, device: torch.device, dtype: str = "auto", revision: str | None = None) -> tuple[Any, Any]:
    """(model, tokenizer). Raises ConfigError where they cannot be had. No code that comes with a model is run."""
    transformers_logging.disable_progress_bar()  # a log is no terminal
    started = time.perf_counter()
    path = Path(source)
    options: dict[str, Any] = {"revision": revision} if revision else {}
    if path.suffix == ".gguf":
        source, options = str(path.parent), {"gguf_file": path.name}
    try:
        if path.suffix == ".gguf" and not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=_dtype(dtype), **options)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"the model {path} cannot be loaded: {error}") from None
    if not getattr(tokenizer, "backend_tokenizer", None):
        raise ConfigError(
            f"the tokenizer of {path} is {type(tokenizer).__name__}, which is none of the tokenizers library"
        )
    tokenizer("")  # clears what its file says of truncation; nothing changes it from here on, so threads may share it
    model = model.to(device).eval()
    log.info("loaded %s (%s, %s) in %.1f s", path, device, model.dtype, time.perf_counter() - started)
    return model, tokenizer


def worker(model: Any, client: Client, *, max_batch: int | None = None, max_length: int | None = None) -> Worker:
    """Not started yet. Its pages are named by the weights, not by what anybody calls the model, so that all who run it
    share them. Raises ConfigError, LayoutError for a model that cannot run on pages, DaemonLost."""
    longest = describe(model).longest
    if max_length is not None and longest is not None and max_length > longest:
        raise ConfigError(f"--max-model-len {max_length}: this model was made for {longest} tokens at most")
    options: dict[str, Any] = {"max_batch": max_batch, "max_length": max_length}
    return Worker(model, client, **{key: value for key, value in options.items() if value is not None})


def _dtype(name: str) -> Any:
    return name if name == "auto" else getattr(torch, name)
