"""The variants of every kernel that are compiled ahead of time and watched for spills, for a compute capability.

Not every combination of options: one of each kernel, each stored precision, each head dim and unit size, both ends of
the group sizes, and all options at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvtier.layout import AttentionLayout, LatentLayout
from kvtier_kernels import append, copy, decode, merge, mla, mla_prefill, prefill, quantise, tuning
from kvtier_kernels.compiling import Variant

_TRITON = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_ATTENTION: list[dict[str, Any]] = [
    {},
    {"unit_tokens": 16},
    {"query": "float16", "dtype": "float16"},
    {"head_dim": 64},
    {"head_dim": 80},
    {"head_dim": 96},
    {"head_dim": 256},
    {"group": 1},
    {"group": 64},
    {"dtype": "float8_e4m3fn"},
    {"dtype": "float8_e4m3fn", "unit_tokens": 16},
    {"dtype": "int8"},
    {"dtype": "int8", "unit_tokens": 16},
    {"dtype": "int4"},
    {"dtype": "int4", "unit_tokens": 16},
    {"dtype": "int8", "head_dim": 80, "query": "float16"},
    {"dtype": "int4", "head_dim": 256},
    {"mixed": True},
    {"mixed": True, "dtype": "int4"},
    {"options": True, "tokens": 2},
]


def variants(capability: int) -> Iterator[Variant]:
    """All of them, for a GPU of compute `capability`."""
    for case in (*_ATTENTION, {"batch": 1}):
        yield attention_variant("decode", capability, **case)
    for case in _ATTENTION:
        yield attention_variant("prefill", capability, **case)
    if tuning.prefill_warpgroups(_layout(), capability):
        for case in ({}, {"unit_tokens": 16}, {"head_dim": 64}, {"group": 1}):
            yield prefill_hopper_variant(capability, **case)
    for heads in (16, 128):
        for unit in (16, 64):
            yield mla_variant(capability, heads, unit, gluon=False)
    if tuning.warpgroups(LatentLayout(layers=60), capability):
        for unit in (16, 64):
            yield mla_variant(capability, 128, unit, gluon=True)
    yield combine_variant(capability)
    yield merge_variant()
    float_layout = _layout()
    for dtype in ("float8_e4m3fn", "int8", "int4"):
        for pair in ((float_layout, _layout(dtype=dtype)), (_layout(dtype=dtype), float_layout)):
            yield convert_variant(*pair)
        yield append_variant(_layout(dtype=dtype), rotary=0)
    yield append_variant(float_layout, rotary=128)
    yield append_latent_variant()
    yield gather_latents_variant()
    for into in (True, False):
        yield blocks_variant(float_layout, into)
        yield blocks_variant(_layout(dtype="int8"), into)
    yield Variant(
        "copy pieces", copy.pieces_kernel, _types(SOURCES="*i64", TARGETS="*i64", pieces="i32", words="i32"),
        {"CHUNK": copy.CHUNK}, {"num_warps": 8},
    )  # fmt: skip


def attention_variant(
    kernel: str, capability: int, *, group: int = 8, tokens: int = 1, query: str = "bfloat16", mixed: bool = False,
    options: bool = False, batch: int = 64, **layout_options: Any,
) -> Variant:  # fmt: skip
    """Decode (of `batch` sequences) or prefill over a layout of 8 kv heads."""
    layout = _layout(**layout_options)
    q, out = "*" + _TRITON[query], "*fp32" if mixed else "*" + _TRITON[query]
    types = _types(Q=q, TABLE="*i64", LENGTHS="*i32", OUT=out, LSE="*fp32", scale="fp32", softcap="fp32")
    types |= _types(
        window="i32", layer="i32", layers="i32", width="i32", s_qt="i32", s_qh="i32", s_ot="i32", s_oh="i32"
    )
    types |= _types(s_table="i32")
    flags = {"MIXED": mixed, "WINDOW": options, "SOFTCAP": options, "ALIBI": options, "SINK": options}
    constants: dict[str, Any] = dict(flags)
    if options:
        types |= _types(SINKS="*fp32", SLOPES="*fp32")
    else:
        constants |= {"SINKS": None, "SLOPES": None}
    if kernel == "decode":
        choice = tuning.decode(layout, tokens * group, capability, batch)
        constants |= decode.shape(layout, tokens, group, batch, choice, capability)
        constants["CHAIN"] = tuning.chains(capability)
        types |= _types(PARTS="*fp32", PART_LSE="*fp32", batch="i32", s_qb="i32", s_ob="i32")
        function: Any = decode.decode_kernel
    else:
        choice = tuning.prefill(layout, group, capability)
        constants |= prefill.shape(layout, group, choice, capability)
        types |= _types(CU="*i32")
        function = prefill.prefill_kernel
    words = [kernel, layout.dtype, f"dim {layout.head_dim}", f"unit {layout.unit_tokens}", f"group {group}", query]
    words += ["mixed"] * mixed + ["all options"] * options + [f"batch {batch}"] * (batch != 64)
    return Variant(" ".join(words), function, types, constants | {"STAGES": choice.stages}, {"num_warps": choice.warps})


def prefill_hopper_variant(capability: int, *, group: int = 8, **layout_options: Any) -> Variant:
    from kvtier_kernels import prefill_hopper

    layout = _layout(**layout_options)
    choice = tuning.prefill(layout, group, capability, plain=True)
    form = prefill.shape(layout, group, choice, capability)
    types = _types(
        Q="*bf16", CU="*i32", TABLE="*i64", LENGTHS="*i32", OUT="*bf16", LSE="*fp32", scale="fp32", layer="i32"
    )
    types |= _types(width="i32", s_qt="i32", s_qh="i32", s_ot="i32", s_oh="i32", s_table="i32")
    name = f"prefill bfloat16 dim {layout.head_dim} unit {layout.unit_tokens} group {group} bfloat16 gluon"
    constants = {name: form[name] for name in prefill_hopper.FORM} | {"STAGES": choice.stages}
    return Variant(name, prefill_hopper.prefill_kernel, types, constants, {"num_warps": choice.warps})


def mla_variant(capability: int, heads: int, unit: int, *, gluon: bool) -> Variant:
    layout = LatentLayout(layers=60, unit_tokens=unit)
    choice = tuning.mla(layout, heads, capability)
    types = _types(QL="*bf16", QR="*bf16", TABLE="*i64", LENGTHS="*i32", OUT="*bf16", LSE="*fp32", PARTS="*fp32")
    types |= _types(PART_LSE="*fp32", scale="fp32", layer="i32", batch="i32", width="i32", s_table="i32")
    types |= {f"s_{tensor}{axis}": "i32" for tensor in "lro" for axis in "bth"}
    form, chain = mla.shape(layout, 1, heads, 8, choice), {"CHAIN": tuning.chains(capability)}
    name, options = f"mla heads {heads} unit {unit}", {"num_warps": choice.warps}
    if gluon:
        from kvtier_kernels import mla_hopper

        constants = {name: form[name] for name in mla_hopper.FORM} | chain
        return Variant(f"{name} gluon", mla_hopper.mla_kernel, types, constants, {"num_warps": mla_hopper.WARPS})
    return Variant(name, mla.mla_kernel, types, form | chain | {"STAGES": choice.stages}, options)


def combine_variant(capability: int) -> Variant:
    layout = _layout()
    form = decode.shape(layout, 1, 8, 64, tuning.decode(layout, 8, 90), 90)
    constants = {name: form[name] for name in decode.SHARED} | {
        "WINDOW": False,
        "SINK": False,
        "SINKS": None,
        "CHUNK": 32,
        "CHAIN": tuning.chains(capability),
        "ALIKE": True,
    }
    types = _types(LENGTHS="*i32", OUT="*bf16", LSE="*fp32", PARTS="*fp32", PART_LSE="*fp32", window="i32", batch="i32")
    types |= _types(width="i32", programs="i32", s_ob="i32", s_ot="i32", s_oh="i32")
    return Variant("decode combine", decode.combine_kernel, types, constants, {"num_warps": 1})


def merge_variant() -> Variant:
    types = _types(PARTS="*fp32", LSES="*fp32", OUT="*bf16", LSE="*fp32", parts="i32", rows="i32")
    types |= _types(s_pp="i32", s_pr="i32", s_ph="i32")
    constants = {"SINKS": None, "H": 64, "D": 128, "W": 128, "SINK": False}
    return Variant("merge", merge.merge_kernel, types, constants, {"num_warps": 1})


def convert_variant(source: AttentionLayout, target: AttentionLayout) -> Variant:
    types = _types(SOURCES="*i64", TARGETS="*i64", TOKENS="*i32", layers="i32")
    name = f"convert {source.dtype} to {target.dtype}"
    return Variant(name, quantise.convert_kernel, types, quantise.shape(source, target), {"num_warps": 4})


def append_variant(layout: AttentionLayout, *, rotary: int) -> Variant:
    types = _types(
        K="*bf16", V="*bf16", CU="*i32", TABLE="*i64", LENGTHS="*i32", layer="i32", layers="i32", width="i32"
    )
    types |= _types(most_units="i32", s_kt="i32", s_kh="i32", s_vt="i32", s_vh="i32", s_table="i32")
    constants = append.shape(layout) | {"R": rotary, "INTERLEAVED": False}
    if rotary:
        types |= _types(COS="*fp32", SIN="*fp32")
    else:
        constants |= {"COS": None, "SIN": None}
    return Variant(f"append {layout.dtype} rotary {rotary}", append.append_kernel, types, constants, {"num_warps": 4})


def append_latent_variant() -> Variant:
    types = _types(LATENT="*bf16", ROPE="*bf16", CU="*i32", TABLE="*i64", LENGTHS="*i32", layer="i32", width="i32")
    types |= _types(most_new="i32", s_lt="i32", s_rt="i32", s_table="i32")
    constants = append.latent_shape(LatentLayout(layers=60))
    return Variant("append latent", append.append_latent_kernel, types, constants, {"num_warps": 2})


def gather_latents_variant() -> Variant:
    types = _types(TABLE="*i64", LENGTHS="*i32", CU="*i32", OUT="*bf16", layer="i32", width="i32", most_units="i32")
    constants = {"ROW": 576, "PADDED": 1024, "U": 64, "STORED": tuning.FLOATS["bfloat16"]}
    kernel = mla_prefill.gather_latents_kernel
    return Variant("gather latents", kernel, types | _types(s_table="i32"), constants, {"num_warps": 4})


def blocks_variant(layout: AttentionLayout, into: bool) -> Variant:
    types = _types(UNITS="*i64", SLOTS="*i64", PLANES="*i64", units="i32", layers="i32", s_block="i32", s_token="i32")
    types |= _types(s_head="i32")
    constants: dict[str, Any] = copy.shape(layout, 16) | {"INTO": into}
    if layout.scales_bytes:
        types |= _types(SCALES="*fp32")
    else:
        constants |= {"SCALES": None}
    name = f"copy {'gather' if into else 'scatter'} {layout.dtype}"
    return Variant(name, copy.blocks_kernel, types, constants, {"num_warps": 4})


def _layout(**changes: Any) -> AttentionLayout:
    return AttentionLayout(**({"layers": 32, "kv_heads": 8, "head_dim": 128, "unit_tokens": 64} | changes))


def _types(**types: str) -> dict[str, str]:
    return types
