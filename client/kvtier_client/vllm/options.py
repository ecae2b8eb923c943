"""What a user may set in `kv_connector_extra_config`, and how a mistake in it is refused."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from kvtier.errors import ConfigError


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """endpoint: runtime directory of kvtierd; empty: `KVTIER_ENDPOINT`, the user's own daemon, the system's.
    revision: names the contents of the weights, where kvtier cannot see them or you know better.
    salt: engines with different ones share nothing.
    cap_tokens: tokens of the largest page; rounded down to blocks times a power of two.
    wait: seconds that a load waits for pages on their way from a slower tier; what is not there by then is computed.
    """

    endpoint: str = ""
    revision: str = ""
    salt: str = ""
    cap_tokens: int = 256
    wait: float = 5.0

    def __post_init__(self) -> None:
        if self.cap_tokens < 1:
            raise ConfigError(f"kv_connector_extra_config: cap_tokens is {self.cap_tokens}: it must be at least 1")
        if not 0 < self.wait <= 60:
            raise ConfigError(
                f"kv_connector_extra_config: wait is {self.wait:g}: it must be above 0, and at most 60 seconds"
            )


def parse(given: Mapping[str, Any] | None) -> Options:
    """The options. Raises ConfigError, naming the key and what to write instead."""
    given = dict(given or {})
    known = Options.__struct_fields__
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
            raise ConfigError(f"kv_connector_extra_config: {key} is no option; {hint}")
    try:
        return msgspec.convert(given, Options)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from error
