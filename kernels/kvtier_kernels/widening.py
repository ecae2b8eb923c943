"""Device code that widens stored codes in registers: float8 and int8 to float16, int4 to bfloat16, all exactly.

int4 comes two ways: as its values, and *bare*, as the excess code in the lowest bits of a bfloat16, a subnormal number
that is the code times 2**-133 (low codes of bytes) or 2**-129 (high ones), at half the instructions.

Conversions that the language offers take several slow instructions a code; these permute bits, two or four codes at a
time. FAST asks for the hand-written instructions, which Triton's interpreter lacks; the plain ways beside them give the
same values.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLOAT = tl.constexpr(0)
FLOAT8 = tl.constexpr(1)
INT8 = tl.constexpr(2)
INT4 = tl.constexpr(3)


@triton.jit
def widen(x, KIND: tl.constexpr, TO: tl.constexpr, FAST: tl.constexpr):
    """Codes of a tile as `TO`, exactly. float8 codes come as float8 where the device converts them, else as bytes."""
    if KIND == FLOAT8:
        if x.dtype == tl.uint8:
            # The bits of e4m3, moved into those of float16, are the value times 2**-8: one exponent bias for another.
            bits = ((x & 0x80).to(tl.uint16) << 8) | ((x & 0x7F).to(tl.uint16) << 7)
            return (bits.to(tl.float16, bitcast=True) * 256.0).to(TO)
        else:
            return x.to(tl.float16).to(TO)
    elif KIND == INT8:
        if FAST:
            # 0x6400 | u is 1024 + u in float16: four codes in five instructions, where a conversion takes four slow ones.
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 u, bias;
                xor.b32 u, $2, 0x80808080;
                mov.b32 bias, 0x64806480;
                prmt.b32 $0, u, 0x64646464, 0x4140;
                prmt.b32 $1, u, 0x64646464, 0x4342;
                sub.f16x2 $0, $0, bias;
                sub.f16x2 $1, $1, bias;
                }""",
                "=r,=r,r",
                [x],
                dtype=tl.float16,
                is_pure=True,
                pack=4,
            ).to(TO)
        else:
            return x.to(tl.float32).to(TO)
    else:
        return x.to(TO)


@triton.jit
def widen_nibbles(x, FAST: tl.constexpr):
    """The low and the high codes of bytes of int4, as bfloat16."""
    if FAST:
        # 0x4300 | u is 128 + u in bfloat16; subtracting 136 takes off the excess of 8 as well, exactly.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, one, bias;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            mov.b32 one, 0x3F803F80;
            mov.b32 bias, 0xC308C308;
            lop3.b32 $0, a, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA;
            shr.b32 a, a, 4;
            shr.b32 b, b, 4;
            lop3.b32 $2, a, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $3, b, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, $0, one, bias;
            fma.rn.bf16x2 $1, $1, one, bias;
            fma.rn.bf16x2 $2, $2, one, bias;
            fma.rn.bf16x2 $3, $3, one, bias;
            }""",
            "=r,=r,=r,=r,r",
            [x],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = ((x & 15).to(tl.float32) - 8.0).to(tl.bfloat16)
        high = ((x >> 4).to(tl.float32) - 8.0).to(tl.bfloat16)
        return low, high


@triton.jit
def nibbles(x, FAST: tl.constexpr):
    """The low and the high codes of bytes of int4, bare."""
    if FAST:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            and.b32 $0, a, 0x000F000F;
            and.b32 $1, b, 0x000F000F;
            and.b32 $2, a, 0x00F000F0;
            and.b32 $3, b, 0x00F000F0;
            }""",
            "=r,=r,=r,=r,r",
            [x],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = (x & 0x0F).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        high = (x & 0xF0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        return low, high


@triton.jit
def split_words(x, KIND: tl.constexpr, NATIVE: tl.constexpr, FAST: tl.constexpr):
    """Four tensors of codes from words that hold four codes of a row each: dims 4c + i, or for int4, bare, of both halves.

    A product over tokens needs pairs of tokens in a register. Bytes of V would be fetched one by one for that; words
    are fetched whole, and the pairs made by permuting two of them.
    """
    if KIND == INT4:
        if FAST:
            # A word of two bytes, two tokens a register: dims 2c (+ half) in byte 0, dims 2c + 1 (+ half) in byte 1.
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 a, b;
                prmt.b32 a, $4, 0, 0x4240;
                prmt.b32 b, $4, 0, 0x4341;
                and.b32 $0, a, 0x000F000F;
                and.b32 $1, b, 0x000F000F;
                and.b32 $2, a, 0x00F000F0;
                and.b32 $3, b, 0x00F000F0;
                }""",
                "=r,=r,=r,=r,r",
                [x],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
        else:
            a, b = nibbles(x & 0xFF, FAST)
            c, e = nibbles((x >> 8) & 0xFF, FAST)
            return a, c, b, e
    elif KIND == INT8:
        if FAST:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 a, b, t, bias;
                prmt.b32 a, $4, $5, 0x5140;
                prmt.b32 b, $4, $5, 0x7362;
                xor.b32 a, a, 0x80808080;
                xor.b32 b, b, 0x80808080;
                mov.b32 bias, 0x64806480;
                prmt.b32 $0, a, 0x64646464, 0x4140;
                prmt.b32 $1, a, 0x64646464, 0x4342;
                prmt.b32 $2, b, 0x64646464, 0x4140;
                prmt.b32 $3, b, 0x64646464, 0x4342;
                sub.f16x2 $0, $0, bias;
                sub.f16x2 $1, $1, bias;
                sub.f16x2 $2, $2, bias;
                sub.f16x2 $3, $3, bias;
                }""",
                "=r,=r,=r,=r,r,r",
                [x],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            a = x.to(tl.int8).to(tl.float16)
            b = (x >> 8).to(tl.int8).to(tl.float16)
            c = (x >> 16).to(tl.int8).to(tl.float16)
            e = (x >> 24).to(tl.int8).to(tl.float16)
            return a, b, c, e
    else:
        if NATIVE:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 a, b;
                .reg .b16 p, q, r, s;
                prmt.b32 a, $4, $5, 0x5140;
                prmt.b32 b, $4, $5, 0x7362;
                mov.b32 {p, q}, a;
                mov.b32 {r, s}, b;
                cvt.rn.f16x2.e4m3x2 $0, p;
                cvt.rn.f16x2.e4m3x2 $1, q;
                cvt.rn.f16x2.e4m3x2 $2, r;
                cvt.rn.f16x2.e4m3x2 $3, s;
                }""",
                "=r,=r,=r,=r,r,r",
                [x],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            a = widen((x & 0xFF).to(tl.uint8), KIND, tl.float16, FAST)
            b = widen(((x >> 8) & 0xFF).to(tl.uint8), KIND, tl.float16, FAST)
            c = widen(((x >> 16) & 0xFF).to(tl.uint8), KIND, tl.float16, FAST)
            e = widen(((x >> 24) & 0xFF).to(tl.uint8), KIND, tl.float16, FAST)
            return a, b, c, e
