"""Sizes as people write and read them: "4GiB" to bytes and back."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{prefix}b": factor for prefix, factor in _UNITS.items() if prefix not in ("", "b")}
_UNITS |= {
    f"{prefix}i{end}": 1 << shift for prefix, shift in zip("kmgt", (10, 20, 30, 40), strict=True) for end in ("", "b")
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(text: str | int) -> int:
    """Bytes of "4GiB", "1.5 TB" or 4096. Raises ValueError with an example for anything else."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _SIZE.fullmatch(str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f'{text!r} is not a size; write it as "4GiB", "500MB" or a number of bytes')
    number = float(match[1]) if "." in match[1] else int(match[1])
    return int(number * _UNITS[match[2].lower()])


def format_size(nbytes: float) -> str:
    """`nbytes` in the largest binary unit that leaves a number of at least 1: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
