from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        *(("4GiB", 4 << 30), ("500MB", 500_000_000), ("1.5 TB", 1_500_000_000_000), ("1.5 KiB", 1536), ("0", 0)),
        *(("4096", 4096), (4096, 4096), (" 2 gib ", 2 << 30), ("2G", 2 * 10**9), ("2Gi", 2 << 30), ("7B", 7)),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", -1, "1 XiB", "1e9", "0x10", "1.2.3", "nan", "inf", "4 GiB 2", True])
def test_what_is_no_size(text: str | int) -> None:
    with pytest.raises(ValueError, match='write it as "4GiB"'):
        parse_size(text)


@given(st.integers(0, 2**53))
def test_a_printed_size_is_near(nbytes: int) -> None:
    assert abs(parse_size(format_size(nbytes)) - nbytes) <= max(1, nbytes * 0.051)
