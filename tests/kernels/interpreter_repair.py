"""Makes Triton's CPU interpreter compute bfloat16 and float8 as a GPU does. Tests only.

The interpreter of Triton 3.6 keeps these types as bit patterns in unsigned NumPy arrays and then adds, compares and
multiplies the *patterns*; it truncates when it narrows float32 to bfloat16, and its float8 overflows to NaN. Here
every operation on such a value decodes its operands to float32 first and encodes its result after, with PyTorch's
conversions (round to nearest even, float8 saturating as `cvt.rn.satfinite` does).

Covers what these kernels use: arithmetic, comparison, unary functions, fused multiply-add, dot, casts and reductions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as it

_TORCH = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}
_CARRIER = {tl.bfloat16: np.uint16, tl.float8e4nv: np.uint8}
_LARGEST = {tl.float8e4nv: 448.0}


def is_pattern(handle: Any) -> bool:
    """The handle holds bit patterns of a type that NumPy lacks."""
    scalar = getattr(handle.dtype, "scalar", handle.dtype)
    return scalar in _TORCH and handle.data.dtype == _CARRIER[scalar]


def decode(data: np.ndarray, scalar: Any) -> np.ndarray:
    """float32 values of the patterns, or of an array of any other type."""
    if scalar not in _TORCH:
        return data.astype(np.float32)
    flat = torch.from_numpy(np.ascontiguousarray(data)).view(_TORCH[scalar])
    return flat.float().numpy().reshape(np.shape(data))


def encode(values: np.ndarray, scalar: Any) -> np.ndarray:
    """The array in which the interpreter carries `scalar`, from float values."""
    if scalar not in _TORCH:
        return np.asarray(values).astype(it._get_np_dtype(scalar))
    wide = torch.from_numpy(np.array(values, dtype=np.float32))
    top = _LARGEST.get(scalar)
    if top is not None:
        wide = torch.where(wide.isnan(), wide, wide.clamp(-top, top))
    carrier = torch.uint8 if _CARRIER[scalar] is np.uint8 else torch.uint16
    return wide.to(_TORCH[scalar]).view(carrier).numpy().reshape(np.shape(values))


def plain(handle: Any) -> np.ndarray:
    return decode(handle.data, handle.dtype.scalar) if is_pattern(handle) else handle.data


def rewrap(values: np.ndarray, scalar: Any) -> Any:
    if values.dtype == np.bool_:
        return it.TensorHandle(values, tl.int1)
    return it.TensorHandle(encode(values, scalar), scalar)


def apply() -> None:
    """Install the repair, once a process."""
    builder = it.InterpreterBuilder
    if getattr(builder, "repaired", False):
        return
    builder.repaired = True
    kept = {name: getattr(builder, name) for name in ("binary_op", "unary_op", "create_fma", "create_dot", "cast_impl")}
    kept_float, kept_sum = it._convert_float, it.ReduceOps.sum

    def binary_op(self: Any, a: Any, b: Any, op: Any) -> Any:
        if is_pattern(a) or is_pattern(b):
            return rewrap(op(plain(a), plain(b)), a.dtype.scalar)
        return kept["binary_op"](self, a, b, op)

    def unary_op(self: Any, a: Any, op: Any) -> Any:
        return rewrap(op(plain(a)), a.dtype.scalar) if is_pattern(a) else kept["unary_op"](self, a, op)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if is_pattern(z):
            return rewrap(plain(x) * plain(y) + plain(z), z.dtype.scalar)
        return kept["create_fma"](self, x, y, z)

    def create_dot(self: Any, a: Any, b: Any, acc: Any, *rest: Any) -> Any:
        if is_pattern(a) or is_pattern(b) or a.data.dtype == np.float16:
            product = np.matmul(plain(a).astype(np.float32), plain(b).astype(np.float32))
            return it.TensorHandle(product.astype(acc.data.dtype) + acc.data, acc.dtype.scalar)
        return kept["create_dot"](self, a, b, acc, *rest)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if target.scalar in _TORCH:
            return it.TensorHandle(encode(plain(source), target.scalar), target.scalar)
        if is_pattern(source):
            return it.TensorHandle(plain(source).astype(it._get_np_dtype(target.scalar)), target.scalar)
        return kept["cast_impl"](self, source, target)

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        known = (*_TORCH, tl.float32, tl.float16)
        if (source in _TORCH or target in _TORCH) and source in known and target in known:
            return encode(decode(data, source), target).reshape(data.shape)
        return kept_float(data, source, target, rounding)

    def reduce_sum(self: Any, operand: Any) -> Any:
        if is_pattern(operand.handle):
            total = np.sum(plain(operand.handle), axis=self.axis, keepdims=self.keep_dims, dtype=np.float32)
            return self.to_tensor(encode(np.asarray(total), operand.dtype.scalar), operand.dtype)
        return kept_sum(self, operand)

    for function in (binary_op, unary_op, create_fma, create_dot, cast_impl):
        setattr(builder, function.__name__, function)
    builder.get_bf16 = lambda self, value: it.TensorHandle(encode(np.array([value]), tl.bfloat16), tl.bfloat16)
    it._convert_float = convert_float
    it.ReduceOps.sum = reduce_sum
