# SPDX-License-Identifier: Apache-2.0
"""Triton on a machine without a GPU: its interpreter, switched on in time and repaired.

vLLM's V2 model runner prepares inputs and samples with small Triton kernels.  Where
Triton has no CPU backend its interpreter can run them, on two conditions:

* ``TRITON_INTERPRET`` is set before Triton is first imported (``switch_on``);
* bfloat16 is computed as numbers.  Triton 3.9 keeps it as 16-bit integers and adds,
  multiplies and ``tl.dot``s those, and it truncates where a GPU rounds: no error,
  wrong results.  A comparison also keeps its operands' type, so that ``a < b`` of
  floats cannot be combined with ``&`` (``repair``).
"""

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

_SWITCH = "TRITON_INTERPRET"
_COMPARISONS = "less less_equal greater greater_equal equal not_equal".split()


def _is_cpu_build() -> bool:
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False


def switch_on() -> None:
    """Make this process, and those it starts, interpret Triton kernels.

    Does nothing on a GPU build, where Triton has a CPU backend, or where the user
    has set ``TRITON_INTERPRET``.  Must run before anything imports Triton.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None or not _is_cpu_build():
        return
    if not (Path(spec.origin).parent / "backends" / "cpu").is_dir():
        os.environ.setdefault(_SWITCH, "1")


def interprets() -> bool:
    """Whether kernels that this process defines are interpreted."""
    if importlib.util.find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def cpu_drivers(backends: dict[str, Any], active: list[Any]) -> tuple[list[Any], bool]:
    """The drivers a CPU build may use, and whether Triton can be used at all.

    Args:
        backends: Triton's backends by name.
        active: drivers of GPUs that are present.

    Returns ``(drivers, usable)`` for vLLM's own check, which wants exactly one.

    """
    if "cpu" in backends:
        return active or [backends["cpu"].driver], True
    from triton import knobs

    if not knobs.runtime.interpret:
        return active, False
    repair()
    return ["interpreter"], True


def _bf16_to_float(data: Any) -> Any:
    import numpy as np

    return (data.astype(np.uint32) << 16).view(np.float32)


def _float_to_bf16(data: Any) -> Any:
    """Round float32 to the nearest bfloat16, ties to even; NaN stays NaN."""
    import numpy as np

    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)


def repair() -> None:
    """Make the interpreter compute bfloat16 and comparisons as a GPU does.

    Idempotent.  Raises RuntimeError where a known product still comes out wrong
    (a later Triton that changed its interpreter): wrong numbers are worse than none.
    """
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if not getattr(builder, "_computes_bf16", False):
        _install(interpreter, builder)
        builder._computes_bf16 = True
    _prove(interpreter)


def _install(interpreter: Any, builder: Any) -> None:
    import numpy as np
    import triton.language as tl

    handle = interpreter.TensorHandle

    def is_bf16(x: Any) -> bool:
        return isinstance(x, handle) and x.dtype.scalar == tl.bfloat16

    def widen(x: Any) -> Any:
        return handle(_bf16_to_float(x.data), tl.float32) if is_bf16(x) else x

    def narrow(x: Any) -> Any:
        return handle(_float_to_bf16(x.data), tl.bfloat16)

    def through_float(method: Callable, result_is_bf16: bool = True) -> Callable:
        """Run ``method`` on float32 copies of its bfloat16 operands."""

        @wraps(method)
        def run(self: Any, *args: Any) -> Any:
            if not any(map(is_bf16, args)):
                return method(self, *args)
            result = method(self, *map(widen, args))
            return narrow(result) if result_is_bf16 else result

        return run

    binary_op = builder.binary_op

    def compare_or_compute(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if getattr(op, "__name__", "") in _COMPARISONS:
            return handle(op(widen(lhs).data, widen(rhs).data), tl.int1)
        if is_bf16(lhs) and not op.__name__.startswith("bitwise"):
            return narrow(binary_op(self, widen(lhs), widen(rhs), op))
        return binary_op(self, lhs, rhs, op)

    cast_impl = builder.cast_impl

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar == tl.bfloat16 and not is_bf16(src):
            return narrow(handle(src.data.astype(np.float32), tl.float32))
        return cast_impl(self, widen(src), dst_type)

    fp_to_fp = builder.create_fp_to_fp

    def convert(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        wide = src.dtype.scalar in (tl.float32, tl.float64)
        if dst_type.scalar == tl.bfloat16 and wide:
            return narrow(handle(src.data.astype(np.float32), tl.float32))
        return fp_to_fp(self, src, dst_type, rounding_mode)

    ternary_op = builder.ternary_op

    def choose_or_clip(self: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        if op is np.where or not is_bf16(other):
            return ternary_op(self, lhs, rhs, other, op)
        return narrow(ternary_op(self, widen(lhs), widen(rhs), widen(other), op))

    builder.binary_op = compare_or_compute
    builder.cast_impl = cast
    builder.create_fp_to_fp = convert
    builder.ternary_op = choose_or_clip
    for name in ("unary_op", "create_fma", "create_rsqrt", "create_erf"):
        setattr(builder, name, through_float(getattr(builder, name)))
    # The accumulator, not the operands, has the result's type.
    builder.create_dot = through_float(builder.create_dot, result_is_bf16=False)


def _prove(interpreter: Any) -> None:
    """1.5 * 2.5 + 3 * -1 in bfloat16, as a product, a dot and a comparison."""
    import numpy as np
    import triton.language as tl

    def bf16(*values: float) -> Any:
        bits = _float_to_bf16(np.array(values, dtype=np.float32))
        return interpreter.TensorHandle(bits, tl.bfloat16)

    build = interpreter.interpreter_builder
    product = build.create_fmul(bf16(1.5, 3.0), bf16(2.5, -1.0))
    less = build.create_fcmpOLT(bf16(-2.0, 1.0), bf16(1.0, -2.0))
    row, column = bf16(1.5, 3.0), bf16(2.5, -1.0)
    row.data, column.data = row.data[None], column.data[:, None]
    zero = interpreter.TensorHandle(np.zeros((1, 1), np.float32), tl.float32)
    dot = build.create_dot(row, column, zero, None, None)
    right = (
        _bf16_to_float(product.data).tolist() == [3.75, -3.0]
        and less.data.tolist() == [True, False]
        and dot.data.item() == 0.75
    )
    if not right:
        version = getattr(sys.modules.get("triton"), "__version__", "unknown")
        raise RuntimeError(
            f"Triton {version} cannot be interpreted correctly: bfloat16 1.5 * 2.5 "
            f"gave {_bf16_to_float(product.data).tolist()[0]}, expected 3.75; install "
            "the Triton release that this build names in its requirements"
        )
