"""Page keys: equal where KV can be reused, and nowhere else; the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import InvalidRequest
from kvtier.keys import KEY_BYTES, Namespace, chain, split
from kvtier.layout import AttentionLayout, EngineLayout, LatentLayout

LAYOUT = AttentionLayout(layers=2, kv_heads=8, head_dim=64)
SPACE = Namespace(layout=LAYOUT, model="org/model")
TOKENS = list(range(600))

OTHERS: dict[str, dict[str, Any]] = {
    "model": {"model": "org/model2"},
    "revision": {"revision": "abc"},
    "other revision": {"revision": "abd"},
    "rank 1 of 8": {"tp_rank": 1, "tp_size": 8},
    "rank 1 of 16": {"tp_rank": 1, "tp_size": 16},
    "rank 0 of 8": {"tp_rank": 0, "tp_size": 8},
    "pp 1 of 8": {"pp_rank": 1, "pp_size": 8},
    "lora": {"lora": "abc"},
    "other lora": {"lora": "abd"},
    "rope": {"rope": "abc"},
    "salt": {"salt": "abc"},
    "extra": {"extra": {"a": "b"}},
    "extra's name": {"extra": {"b": "a"}},
    "extra in one": {"extra": {"a": "b", "c": ""}},
    "extra in two": {"extra": {"a": "", "bc": ""}},
    "cap": {"cap_tokens": 128},
    "dtype": {"layout": AttentionLayout(layers=2, kv_heads=8, head_dim=64, dtype="float8_e4m3fn")},
    "other dtype of the width": {"layout": AttentionLayout(layers=2, kv_heads=8, head_dim=64, dtype="float16")},
    "heads": {"layout": AttentionLayout(layers=2, kv_heads=4, head_dim=128)},
    "layers": {"layout": AttentionLayout(layers=4, kv_heads=4, head_dim=64)},
    "unit": {"layout": AttentionLayout(layers=2, kv_heads=8, head_dim=64, unit_tokens=64)},
    "latent": {"layout": LatentLayout(layers=2)},
    "engine": {"layout": EngineLayout(unit_bytes=65536, arrangement="a")},
    "other arrangement": {"layout": EngineLayout(unit_bytes=65536, arrangement="b")},
}


def test_other_namespaces_share_nothing() -> None:
    chains = [chain(SPACE, TOKENS)] + [
        chain(msgspec.structs.replace(SPACE, **fields), TOKENS) for fields in OTHERS.values()
    ]
    keys = [key for keys in chains for key in keys]
    assert len(set(keys)) == len(keys)


def test_fields_do_not_run_into_each_other() -> None:
    one = Namespace(layout=LAYOUT, model="ab", revision="c")
    assert one.digest() != Namespace(layout=LAYOUT, model="a", revision="bc").digest()
    assert one.digest() != Namespace(layout=LAYOUT, model="ab", lora="c").digest()
    assert one.digest() == Namespace(layout=LAYOUT, model="ab", revision="c").digest()


def test_the_order_of_extras_is_nothing() -> None:
    one = msgspec.structs.replace(SPACE, extra={"a": "1", "b": "2"})
    assert one.digest() == msgspec.structs.replace(SPACE, extra={"b": "2", "a": "1"}).digest()


def test_only_whole_pages_have_keys() -> None:
    assert len(chain(SPACE, range(1056))) == 48
    assert chain(SPACE, range(1040)) == chain(SPACE, range(1056)) == chain(SPACE, range(1024))
    assert chain(SPACE, range(15)) == []


@given(st.lists(st.integers(0, 2**32 - 1), min_size=64, max_size=200), st.data())
def test_a_key_names_all_that_came_before(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = list(tokens)
    other[at] ^= 1 << data.draw(st.integers(0, 31))
    before, after = chain(SPACE, tokens), chain(SPACE, other)
    page = at // 16
    assert before[:page] == after[:page]
    assert not set(before[page:]) & set(after[page:])
    assert chain(SPACE, tokens, seed=SPACE.digest()) == before


def test_images_are_told_apart_by_all_of_their_digest() -> None:
    """Sixteen bits of it would leave 51,275 of 100,000."""
    tokens = [7] * 16
    digests = [number.to_bytes(32, "little") for number in range(100_000)]
    assert len({chain(SPACE, tokens, [(3, digest)])[0] for digest in digests}) == 100_000


def test_an_image_enters_the_page_it_starts_in_and_all_after() -> None:
    tokens = [7] * 64
    plain = chain(SPACE, tokens)
    image = chain(SPACE, tokens, [(20, b"x" * 32)])
    assert image[0] == plain[0] and not set(image[1:]) & set(plain)
    assert chain(SPACE, tokens, [(21, b"x" * 32)])[1] != image[1], "its place counts"
    two = chain(SPACE, tokens, [(40, b"y"), (20, b"x" * 32)])
    assert two[1] == image[1] and two[2] != image[2]
    assert two == chain(SPACE, tokens, [(20, b"x" * 32), (40, b"y")])
    assert chain(SPACE, tokens, [(20, b"xy")]) != chain(SPACE, tokens, [(20, b"x"), (20, b"y")])


@pytest.mark.parametrize("place", [-1, 64, 1000])
def test_images_outside_the_tokens(place: int) -> None:
    with pytest.raises(InvalidRequest, match="outside the 64 tokens"):
        chain(SPACE, [7] * 64, [(0, b"a"), (place, b"b")])


@pytest.mark.parametrize("token", [-1, 2**32, 1.5, "a", None])
def test_tokens_that_are_none(token: Any) -> None:
    with pytest.raises(InvalidRequest, match="token ids"):
        chain(SPACE, [1, 2, token])


@pytest.mark.parametrize("fields", [{"tp_rank": 1}, {"tp_rank": -1}, {"pp_rank": 2, "pp_size": 2}])
def test_ranks_that_are_none(fields: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match="is not below"):
        Namespace(layout=LAYOUT, model="m", **fields)  # type: ignore[arg-type]


def test_keys_are_the_same_in_every_process_and_forever() -> None:
    code = (
        "from kvtier.keys import *; from kvtier.layout import *;"
        "n = Namespace(layout=AttentionLayout(layers=2, kv_heads=8, head_dim=64), model='org/model',"
        " extra={'b': '1', 'a': '2'});"
        "print(b''.join(chain(n, range(600), [(5, b'image')])).hex())"
    )
    printed = set()
    for seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        printed.add(
            subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout
        )
    assert len(printed) == 1
    # Written down, so that no later release changes them without raising FORMAT.
    assert printed.pop()[:32].decode() == RECORDED


RECORDED = "a2b3273f6c7a85411b4dce4e8fef0821"


@given(st.integers(0, 700))
def test_packed_keys(count: int) -> None:
    keys = [os.urandom(KEY_BYTES) for _ in range(count)]
    assert split(b"".join(keys)) == keys
    if count:
        with pytest.raises(InvalidRequest, match="not a multiple of 16"):
            split(b"".join(keys)[:-1])
