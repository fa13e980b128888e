"""Checkpoints of any size that are headers only: the weights are holes in sparse files, and nothing can be served.

`vllm ampere check` reads headers, so a file of 190 GB that takes 40 MB of disk is as good as a real one for its tests
and its measurement.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from vllm.ampere.checkpoint.config import text_config
from vllm.ampere.checkpoint.documents import CONFIG, INDEX
from vllm.ampere.checkpoint.geometry import LINEAR, Part, parts
from vllm.ampere.checkpoint.headers import BITS
from vllm.ampere.checkpoint.names import class_of, template
from vllm.ampere.checkpoint.storage import words
from vllm.ampere.checkpoint.table import shard_rows, table_rows

Entry = tuple[str, tuple[int, ...]]  # dtype, shape


@dataclass(frozen=True)
class Packed:
    """compressed-tensors pack-quantized, symmetric.

    `loose` is how its releases up to 0.17 pack widths that do not divide 32: bits that hold no whole weight are left
    unused, so that six bits take 32 / 5.
    """

    bits: int
    group: int
    loose: bool = False

    def tensors(self, outputs: int, inputs: int) -> dict[str, Entry]:
        return {
            "weight_packed": ("I32", (outputs, words(inputs, self.bits, self.loose))),
            "weight_scale": ("BF16", (outputs, inputs // self.group)),
            "weight_shape": ("I64", (2,)),
        }

    def group_of_config(self, *targets: str) -> dict[str, Any]:
        weights = dict(num_bits=self.bits, group_size=self.group, type="int", symmetric=True, strategy="group")
        return {"targets": list(targets), "weights": weights, "input_activations": None}


@dataclass(frozen=True)
class Gptq:
    """gptqmodel, symmetric, without activation order."""

    bits: int
    group: int

    def tensors(self, outputs: int, inputs: int) -> dict[str, Entry]:
        per_word = 32 // self.bits
        return {
            "qweight": ("I32", (inputs // per_word, outputs)),
            "qzeros": ("I32", (inputs // self.group, outputs // per_word)),
            "scales": ("F16", (inputs // self.group, outputs)),
            "g_idx": ("I32", (inputs,)),
        }


@dataclass(frozen=True)
class Fp8:
    """e4m3 with one fp32 scale, or one for each block of so many outputs and inputs, as the published FP8 release has."""

    block: int = 0
    #: with a scale of the activations, which a static scheme and ModelOpt write
    static: bool = False

    def tensors(self, outputs: int, inputs: int) -> dict[str, Entry]:
        made: dict[str, Entry] = {"weight": ("F8_E4M3", (outputs, inputs))}
        if self.block:
            made["weight_scale_inv"] = ("F32", (-(-outputs // self.block), -(-inputs // self.block)))
        else:
            made["weight_scale"] = ("F32", ())
        return made | ({"input_scale": ("F32", ())} if self.static else {})


@dataclass(frozen=True)
class Nvfp4:
    """ModelOpt's: two weights a byte, an e4m3 scale for sixteen, and one fp32 scale of these and of the activations."""

    group: int = 16

    def tensors(self, outputs: int, inputs: int) -> dict[str, Entry]:
        return {
            "weight": ("U8", (outputs, inputs // 2)),
            "weight_scale": ("F8_E4M3", (outputs, inputs // self.group)),
            "weight_scale_2": ("F32", ()),
            "input_scale": ("F32", ()),
        }


class Plain:
    """One tensor of one dtype."""

    def __init__(self, dtype: str = "BF16") -> None:
        self.dtype = dtype

    def tensors(self, *shape: int) -> dict[str, Entry]:
        return {"weight": (self.dtype, shape)}


Form = Packed | Gptq | Fp8 | Nvfp4 | Plain


def published(
    config: dict[str, Any], form: Callable[[str, str], Form] = lambda kind, module: Plain(), prefix: str = "model."
) -> dict[str, Entry]:
    """Every tensor of a checkpoint, in the published layout.

    Args:
        config: a config.json of either form
        form: (class of module, canonical module name) -> how the module is stored
        prefix: what stands before the layers, "model.language_model." in multimodal checkpoints
    """
    text = text_config(config)
    made: dict[str, Entry] = {}
    for module, part in parts(text).items():
        kind = class_of(template(module))
        at = module if module == "lm_head" or module.startswith("mtp.") else prefix + module
        made |= {f"{at}{suffix}": entry for suffix, entry in _module(module, part, form(kind, module))}
    for index, one_based in enumerate(text.ple_layer_ids):
        rows = table_rows(text, index)
        for shard in range(text.split_ngram_parts):
            name = f"layers.{one_based - 1}.ple.ple_embedding.ngram_embedding.shard_{shard}"
            width = text.ple_embed_dim // text.ngram_heads
            tensors = form("ngram_table", name).tensors(shard_rows(rows, text.split_ngram_parts, shard), width)
            made |= {f"{prefix}{name}.{suffix}": entry for suffix, entry in tensors.items()}
    return made


def _module(module: str, part: Part, form: Form) -> Iterator[tuple[str, Entry]]:
    leaf = module.rsplit(".", 1)[-1]
    if leaf in ("A_log", "dt_bias"):
        yield "", ("BF16", part.shape)
    elif part.kind == "buffer":
        yield "", ("I64", part.shape)
    else:
        quantizable = part.kind == LINEAR or module == "embed_tokens"
        for suffix, entry in (form if quantizable else Plain()).tensors(*part.shape).items():
            yield f".{suffix}", entry


def write(out: Path, config: dict[str, Any], tensors: dict[str, Entry], *, files: int = 8) -> None:
    """config.json, sparse weight files of about equal size, and their index."""
    out.mkdir(parents=True, exist_ok=True)
    (out / CONFIG).write_text(json.dumps(config, indent=1))
    total = sum(nbytes(entry) for entry in tensors.values())
    groups: list[dict[str, Entry]] = [{}]
    size = 0
    for name, entry in tensors.items():
        if size >= total / files and groups[-1]:
            groups.append({})
            size = 0
        groups[-1][name] = entry
        size += nbytes(entry)
    weight_map = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_file(out / file, group)
        weight_map |= dict.fromkeys(group, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / INDEX).write_text(json.dumps(index))


def nbytes(entry: Entry) -> int:
    dtype, shape = entry
    return prod(shape) * BITS[dtype] // 8


def write_file(path: Path, tensors: dict[str, Entry]) -> None:
    """One safetensors file whose data is a hole."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in tensors.items():
        end = offset + nbytes((dtype, shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
