"""What two SGLang servers must have in common: whatever differs in it gives other keys. And the options."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.keys import Namespace
from kvtier_client.sglang.identity import Options, files, namespace, options

CONFIG = {
    "model_name": "served",
    "tp_rank": 0,
    "tp_size": 1,
    "pp_rank": 0,
    "pp_size": 1,
    "attn_cp_rank": 0,
    "attn_cp_size": 1,
    "dcp_rank": 0,
    "dcp_size": 1,
    "is_mla_model": False,
}
POOL = {
    "layout": "page_first",
    "page_size": 64,
    "dtype": "torch.bfloat16",
    "layer_num": 4,
    "start_layer": 0,
    "end_layer": 3,
    "head_num": 2,
    "head_dim": 128,
    "storage_format_tag": None,
}


class OtherPool(SimpleNamespace):
    pass


def space(
    config: dict[str, Any] | None = None,
    pool: dict[str, Any] | None = None,
    *,
    sizes: tuple[int, ...] = (4096, 4096),
    given: Options | None = None,
    facts: dict[str, str] | None = None,
    flat: bool = False,
    kind: type[SimpleNamespace] = SimpleNamespace,
) -> Namespace:
    return namespace(
        SimpleNamespace(**CONFIG | (config or {})),
        kind(**POOL | (pool or {})),
        sizes,
        given or Options(),
        facts or {},
        flat=flat,
    )


def test_whatever_differs_gives_other_keys() -> None:
    """Cases 1 and 3: dtype, rank, width, model and revision, and the order of the bytes."""
    spaces = [
        space(),
        space({"model_name": "other"}),
        *(space({"tp_rank": rank, "tp_size": size}) for rank, size in ((1, 8), (1, 16), (0, 8), (0, 16))),
        *(space({"pp_rank": rank, "pp_size": size}) for rank, size in ((0, 2), (1, 2))),
        *(space({"attn_cp_rank": rank, "attn_cp_size": size}) for rank, size in ((0, 2), (1, 2))),
        *(space({"dcp_rank": rank, "dcp_size": size}) for rank, size in ((0, 2), (1, 2))),
        space({"is_mla_model": True}),
        *(space(None, {"dtype": dtype}) for dtype in ("torch.float16", "torch.float32")),
        *(space(None, {"layout": layout}) for layout in ("layer_first", "page_first_direct", "page_head")),
        space(None, {"page_size": 32}),
        space(None, {"layer_num": 2}),
        space(None, {"start_layer": 4, "end_layer": 7}),
        space(None, {"head_num": 4, "head_dim": 64}),
        space(None, {"storage_format_tag": "packed"}),
        space(kind=OtherPool),
        space(sizes=(8192,)),
        space(flat=True),
        space(given=Options(revision="1")),
        space(given=Options(revision="2")),
        space(given=Options(salt="tenant")),
        *(
            space(None, {"dtype": "torch.uint8"}, facts={"kv_cache_dtype": dtype, "model_path": "m"})
            for dtype in ("fp8_e4m3", "fp8_e5m2")
        ),
        *(
            space(facts={name: value})
            for name, value in (
                ("model_path", "org/one"),
                ("model_path", "org/two"),
                ("revision", "main"),
                ("quantization", "fp8"),
                ("load_format", "dummy"),
                ("json_model_override_args", '{"rope_scaling": 2}'),
                ("files", "1"),
                ("adapters", "one"),
            )
        ),
    ]
    assert len({one.digest() for one in spaces}) == len(spaces)


def test_the_same_settings_give_the_same_keys_and_what_does_not_matter_does_not() -> None:
    assert space().digest() == space().digest()
    assert space(given=Options(timeout=9.0, endpoint="/run/x", copy_threads=3)).digest() == space().digest()
    ranks = [space({"is_mla_model": True, "tp_rank": rank, "tp_size": 4}).digest() for rank in range(4)]
    assert len(set(ranks)) == 1, "MLA pages are the same on every rank"


def test_a_page_is_one_unit_whatever_its_place_in_the_prompt() -> None:
    found = space(None, {"page_size": 1})
    assert found.schedule.top_order == 0 and found.layout.unit_tokens == 1 and found.layout.unit_bytes == 8192


@pytest.mark.parametrize("facts", [{}, {"model_path": "org/model"}])
def test_eight_bit_pages_of_an_unknown_type_are_refused(facts: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="kvtier_kv_dtype"):
        space(None, {"dtype": "torch.uint8"}, facts=facts)
    named = space(None, {"dtype": "torch.uint8"}, facts=facts, given=Options(kv_dtype="fp8_e4m3"))
    assert named.extra["kv_cache_dtype"] == "fp8_e4m3"


def test_a_server_without_a_name_is_known_by_its_path_or_refused() -> None:
    assert space({"model_name": None}, facts={"model_path": "org/model"}).model == "org/model"
    with pytest.raises(ConfigError, match="served-model-name"):
        space({"model_name": None})


def test_options_stand_among_sglangs_own() -> None:
    given = options({"backend_name": "kvtier", "interface_v1": 1, "kvtier_timeout": 5, "kvtier_endpoint": "/run/k"})
    assert given == Options(timeout=5.0, endpoint="/run/k")
    assert options({}) == Options()


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"kvtier_endpont": "/run/k"}, "kvtier_endpoint, kvtier_timeout"),
        ({"kvtier_timeout": "soon"}, "kvtier_timeout"),
        ({"kvtier_timeout": 0}, "above 0"),
        ({"kvtier_copy_threads": 0}, "from 1 to 64"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        options(extra)


def test_the_files_of_a_model_stand_for_its_contents(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    assert files(str(model / "none")) == ""
    empty = files(str(model))
    (model / "model.safetensors").write_bytes(b"weights")
    first = files(str(model))
    (model / "README.md").write_text("of no matter")
    assert files(str(model)) == first != empty
    os.utime(model / "model.safetensors", ns=(1, 1))
    touched = files(str(model))
    (model / "model.safetensors").write_bytes(b"weights!")
    os.utime(model / "model.safetensors", ns=(1, 1))
    longer = files(str(model))
    (model / "part").mkdir()
    (model / "part" / "config.json").write_text("{}")
    assert len({first, touched, longer, files(str(model)), files(str(model / "model.safetensors"))}) == 5
