"""The examples of docs/transformers.md, run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.system.conftest import Daemon
from tests.transformers.conftest import Plain

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_the_examples_run(smol: Plain, served: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_ENDPOINT", served.endpoint)
    text = "A river is a stream of water that flows through a channel in the surface of the ground. " * 2
    names: dict[str, Any] = {"model": smol.model, "tokenizer": smol.tokenizer, "text": text}
    names["token_ids"] = smol.tokens(text)[:30]
    first, second = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(first.replace("=100", "=8"), names)  # noqa: S102 - our own page
    assert names["cache"].cached_tokens == [0]
    exec(second.replace("=200", "=8"), names)  # noqa: S102
    assert names["request"].cached_tokens == 16 and set(names["request"].finish) <= {"stop", "length"}
    names["client"].close()
