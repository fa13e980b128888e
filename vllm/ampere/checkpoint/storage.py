# SPDX-License-Identifier: Apache-2.0
"""How a module's weight is stored, from the dtypes and shapes of its tensors alone.

    plain    weight                                                         BF16, F16, F32
    pack     weight_packed I32 [out, words], weight_scale [out, groups]     compressed-tensors
    gptq     qweight I32 [words, out], scales [groups, out]                 gptqmodel, AutoRound
    fp8      weight F8_E4M3, weight_scale [], [out] or [out, 1], or one (also weight_scale_inv) for each block
    int8     weight I8, weight_scale
    awq      qweight I32 [in, words], scales [groups, out]
    nvfp4    weight or weight_packed U8 [out, in / 2], weight_scale F8_E4M3 [out, in / 16]
    mxfp4    the same with scales of another dtype [out, in / 32]

A width of six bits is packed in two ways: five to a word with two bits unused (compressed-tensors), or without a gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from vllm.ampere.checkpoint.headers import BITS, Tensor

PLAIN = frozenset({"BF16", "F16", "F32", "F64"})
_NVFP4_GROUP, _MXFP4_GROUP = 16, 32
#: sides of FP8 blocks
_BLOCKS = tuple(2**power for power in range(3, 15))
#: tried in this order where nothing is declared: powers of two first, since a width may fit two of them
_WIDTHS = (4, 8, 6, 5, 3, 2, 7)


@dataclass(frozen=True)
class Storage:
    """A module's form on disk.

    Attributes:
        kind: as above, or "other"
        bits: of one weight, without scales; 0 if no width fits
        group: inputs per scale; 0 for none, or of FP8 for one scale in all, -1 for one scale per output
        blocks: of FP8, the numbers of scales along outputs and inputs; empty where `group` says it
        loose: packed with unused bits in every word
        symmetric: no zero points (GPTQ's qzeros say nothing about that, see `declared`)
        inputs, outputs: the weight's logical shape, as far as the tensors show it (0: they do not)
        weights: number of weights
        fault: "" or why the tensors do not fit each other: "packed", "scale", "group", "no scale"
        detail: (tensor's suffix, expected, found) of the fault
    """

    kind: str
    bits: int
    group: int = 0
    loose: bool = False
    symmetric: bool = True
    inputs: int = 0
    outputs: int = 0
    weights: int = 0
    fault: str = ""
    detail: tuple[str, str, str] = ("", "", "")
    blocks: tuple[int, ...] = ()

    @property
    def repackable(self) -> bool:
        """Whether the loader takes the unused bits out (vllm/model_executor/model_loader/gapped_weights.py)."""
        return self.kind == "pack" and self.loose and self.symmetric and not self.fault

    def __str__(self) -> str:
        if self.kind == "plain":
            return {16: "BF16", 32: "F32", 64: "F64"}.get(self.bits, f"{self.bits} bits")
        if self.kind in ("fp8", "nvfp4", "mxfp4"):
            return self.kind.upper()
        if self.kind == "other":
            return f"{self.bits} bits"
        group = {0: "", -1: " per channel"}.get(self.group, f" g{self.group}")
        return f"INT{self.bits or '?'}{group}"

    @property
    def exactly(self) -> str:
        """With the scales of a floating-point format, which `str` leaves out."""
        if self.kind == "fp8":
            form = "a scale per channel" if self.group == -1 else "one scale"
            return "FP8, " + (f"{self.blocks[0]} x {self.blocks[1]} scales" if self.blocks else form)
        return f"NVFP4 g{self.group}" if self.kind == "nvfp4" else str(self)


Signature = tuple[tuple[str, str, tuple[int, ...]], ...]


def signature(tensors: dict[str, Tensor]) -> Signature:
    """What `observe` looks at; equal for the tens of thousands of experts."""
    return tuple([(suffix, tensor.dtype, tensor.shape) for suffix, tensor in tensors.items()])


@lru_cache(maxsize=4096)
def observe(found: Signature, inputs: int = 0, declared_bits: int = 0, declared_kind: str = "int") -> Storage:
    """The storage of one module.

    Args:
        found: its tensors
        inputs: the weight's inputs after the config; 0 where the config does not say (the vision tower)
        declared_bits: the width to prefer where more than one fits
        declared_kind: what bytes without a scale were meant to be (`Scheme.kind`)
    """
    tensors = {suffix: (dtype, shape) for suffix, dtype, shape in found}
    if "weight_packed" in tensors and tensors["weight_packed"][0] in ("I32", "U32"):
        return _pack(tensors, inputs, declared_bits)
    if "qweight" in tensors:
        return _gptq(tensors, inputs, declared_bits)
    name = next((name for name in ("weight", "weight_packed", "") if name in tensors), None)
    if name is None:
        return Storage("other", 0)
    dtype, shape = tensors[name]
    outputs, width = (shape[0], prod(shape[1:])) if len(shape) > 1 else (prod(shape), 1)
    if dtype == "U8" and ("weight_scale" in tensors or declared_kind == "nvfp4"):
        return _four_bits(tensors, outputs, inputs or 2 * width)
    if dtype in ("F8_E4M3", "I8"):
        return _eight_bits(tensors, dtype, outputs, width)
    kind = "plain" if dtype in PLAIN else "other"
    return Storage(kind, BITS.get(dtype, 0), inputs=width, outputs=outputs, weights=prod(shape))


def words(inputs: int, bits: int, loose: bool) -> int:
    """32-bit words that `inputs` weights take."""
    return -(-inputs // (32 // bits)) if loose else -(-inputs * bits // 32)


def _width(packed: int, inputs: int, declared: int) -> tuple[int, bool]:
    """(bits, loose) for which `inputs` weights take `packed` words; (0, False) if there is none."""
    for bits in dict.fromkeys((declared, *_WIDTHS) if 1 <= declared <= 8 else _WIDTHS):
        for loose in (False, True):
            if words(inputs, bits, loose) == packed:
                return bits, loose
    return 0, False


def _grouped(inputs: int, groups: int) -> int:
    """Inputs per scale; -1 for a single one, 0 where `groups` does not divide."""
    if groups == 1:
        return -1
    return inputs // groups if groups and inputs % groups == 0 else 0


def _pack(tensors: dict, inputs: int, declared: int) -> Storage:
    _, packed = tensors["weight_packed"]
    outputs, columns = packed if len(packed) == 2 else (0, 0)
    known = inputs or _inputs_from_scale(tensors, columns)
    bits, loose = _width(columns, known, declared)
    form = dict(kind="pack", bits=bits, loose=loose, inputs=known, outputs=outputs, weights=outputs * known)
    form["symmetric"] = "weight_zero_point" not in tensors
    if not bits:
        return Storage(
            **form, fault="packed", detail=("weight_packed", f"[{outputs}, {_widths(known)}]", str([*packed]))
        )
    if "weight_scale" not in tensors:
        return Storage(**form, fault="no scale", detail=("weight_scale", "a scale for every group", "no such tensor"))
    _, scale = tensors["weight_scale"]
    return _with_groups(form, "weight_scale", scale, scale[0] if scale else 0, scale[1] if len(scale) == 2 else 1)


def _gptq(tensors: dict, inputs: int, declared: int) -> Storage:
    _, packed = tensors["qweight"]
    rows, outputs = packed if len(packed) == 2 else (0, 0)
    if rows and rows == inputs and "scales" in tensors:
        return _awq(tensors, inputs, outputs)
    known = inputs or rows * 32 // (declared or 4)
    bits, loose = _width(rows, known, declared)
    form = dict(kind="gptq", bits=bits, loose=loose, inputs=known, outputs=outputs, weights=outputs * known)
    if not bits:
        return Storage(**form, fault="packed", detail=("qweight", f"[{_widths(known)}, {outputs}]", str([*packed])))
    if "scales" not in tensors:
        return Storage(**form, fault="no scale", detail=("scales", "a scale for every group", "no such tensor"))
    _, scale = tensors["scales"]
    made = _with_groups(form, "scales", scale, scale[1] if len(scale) == 2 else 0, scale[0] if scale else 0)
    if not made.fault and (zeros := tensors.get("qzeros")):
        expected = (scale[0], words(outputs, bits, loose))
        if zeros[1] != expected:
            return Storage(
                **form, group=made.group, fault="scale", detail=("qzeros", str([*expected]), str([*zeros[1]]))
            )
    return made


def _awq(tensors: dict, inputs: int, columns: int) -> Storage:
    """Packed along the outputs, so the scales say how many of these there are."""
    _, scale = tensors["scales"]
    groups, outputs = scale if len(scale) == 2 else (1, 0)
    bits = columns * 32 // outputs if outputs else 0
    group = _grouped(inputs, groups)
    return Storage("awq", bits, group, inputs=inputs, outputs=outputs, weights=inputs * outputs)


def _with_groups(form: dict, suffix: str, scale: tuple[int, ...], outputs: int, groups: int) -> Storage:
    if outputs != form["outputs"]:
        return Storage(**form, fault="scale", detail=(suffix, f"scales of {form['outputs']} outputs", str([*scale])))
    group = _grouped(form["inputs"], groups)
    if not group:
        detail = (suffix, f"a number of groups that divides {form['inputs']} inputs", f"{groups} groups")
        return Storage(**form, fault="group", detail=detail)
    return Storage(**form, group=group)


def _eight_bits(tensors: dict, dtype: str, outputs: int, inputs: int) -> Storage:
    kind = "fp8" if dtype == "F8_E4M3" else "int8"
    form = dict(kind=kind, bits=8, inputs=inputs, outputs=outputs, weights=outputs * inputs)
    suffix = next((name for name in ("weight_scale", "weight_scale_inv") if name in tensors), None)
    if suffix is None:
        return Storage(**form, fault="no scale", detail=("weight_scale", "a scale", "no such tensor"))
    shape = tensors[suffix][1]
    if prod(shape) == 1:
        return Storage(**form)
    if shape in ((outputs,), (outputs, 1)):
        return Storage(**form, group=-1)
    if kind == "fp8" and len(shape) == 2 and _blocked(outputs, inputs, *shape):
        return Storage(**form, blocks=shape)
    expected = f"one scale, {outputs}, or one for each block of [{outputs}, {inputs}]"
    return Storage(**form, fault="scale", detail=(suffix, expected, str([*shape])))


def _blocked(outputs: int, inputs: int, rows: int, columns: int) -> bool:
    """Whether square blocks, or pieces of single rows, are so many; the last ones may be short."""
    square = any((-(-outputs // side), -(-inputs // side)) == (rows, columns) for side in _BLOCKS)
    return square or (rows == outputs and inputs % columns == 0)


def _four_bits(tensors: dict, outputs: int, inputs: int) -> Storage:
    form = dict(bits=4, inputs=inputs, outputs=outputs, weights=outputs * inputs)
    if "weight_scale" not in tensors:
        return Storage("nvfp4", **form, fault="no scale", detail=("weight_scale", "a scale", "no such tensor"))
    dtype, scale = tensors["weight_scale"]
    kind, group = ("nvfp4", _NVFP4_GROUP) if dtype == "F8_E4M3" else ("mxfp4", _MXFP4_GROUP)
    if len(scale) != 2 or kind == "mxfp4":
        # No method whose config is compared has these.
        return Storage(kind, group=group, **form)
    return _with_groups(form | {"kind": kind}, "weight_scale", scale, scale[0], scale[1])


def _inputs_from_scale(tensors: dict, columns: int) -> int:
    """Where the config does not say: four bits if that divides into the scale's groups, else eight."""
    return columns * 8 if "weight_scale" in tensors else columns * 4


def _widths(inputs: int) -> str:
    """The numbers of words that would do: "320 (4 bits) or 640 (8 bits)"."""
    return " or ".join(f"{words(inputs, bits, False)} ({bits} bits)" for bits in (4, 6, 8))
