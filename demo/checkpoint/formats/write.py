"""Put a quantized checkpoint on disk, and its dequantized twin."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from demo.checkpoint.formats import compressed, gptq, modelopt, mtp
from demo.checkpoint.formats.recipes import Recipe
from demo.checkpoint.formats.rounding import Scheme, round_weight
from demo.checkpoint.layout import INDEX

#: name prefix of the text model's tensors: in transformers' own files, and in those of the multimodal releases
PLAIN, MULTIMODAL = "model.", "model.language_model."


@dataclass(frozen=True)
class Pair:
    quantized: Path
    #: the same model in bfloat16, with what the quantized weights stand for
    dequantized: Path


def quantize(source: Path, out: Path, recipe: Recipe, *, prefix: str = PLAIN, with_mtp: bool = False) -> Pair:
    """Write `out`/quantized and `out`/dequantized from the bfloat16 checkpoint `source`.

    Args:
        source: a checkpoint of demo.checkpoint
        recipe: what becomes of which module
        prefix: what tensor names of the text model begin with in the quantized files
        with_mtp: add a draft module, quantized by the same rules, to the quantized files
    """
    pair = Pair(out / "quantized", out / "dequantized")
    config = json.loads((source / "config.json").read_text())
    files = {path.name: load_file(path) for path in sorted(source.glob("*.safetensors"))}
    if with_mtp:
        everything = {name: tensor for held in files.values() for name, tensor in held.items()}
        files[mtp.FILE] = mtp.tensors(everything, config)

    def scheme_of(name: str, tensor: torch.Tensor) -> Scheme | None:
        module, _, kind = name.rpartition(".")
        return recipe.scheme(module) if kind == "weight" and tensor.dim() == 2 else None

    pack = _packer(
        recipe, [tensor for held in files.values() for name, tensor in held.items() if scheme_of(name, tensor)]
    )
    packed_files: dict[str, dict[str, torch.Tensor]] = {}
    plain_files: dict[str, dict[str, torch.Tensor]] = {}
    left: list[str] = []
    for file, held in files.items():
        packed, plain = packed_files.setdefault(file, {}), plain_files.setdefault(file, {})
        for name, tensor in held.items():
            module, _, kind = name.rpartition(".")
            stored = prefix + name.removeprefix(PLAIN) if name.startswith(PLAIN) else name
            scheme = scheme_of(name, tensor)
            if scheme is None:
                packed[stored] = plain[name] = tensor
                if kind == "weight" and tensor.dim() == 2 and "ngram_embedding" not in module:
                    left.append(stored.removesuffix(".weight"))
                continue
            parts, plain[name] = pack(tensor, scheme)
            stem = stored.removesuffix("weight")
            packed |= {stem + part: value for part, value in parts.items()}
    plain_files.pop(mtp.FILE, None)

    details, beside = _config(recipe, sorted(left))
    _save(pair.quantized, source, packed_files, lambda c: c | {"quantization_config": details} if details else c)
    for file, document in beside.items():
        (pair.quantized / file).write_text(json.dumps(document, indent=2))
    if with_mtp:
        _edit_config(pair.quantized, lambda c: c | {"mtp_num_hidden_layers": 1})
    _save(pair.dequantized, source, plain_files, lambda c: c)
    return pair


def _packer(
    recipe: Recipe, weights: list[torch.Tensor]
) -> Callable[[torch.Tensor, Scheme], tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """What makes a module's tensors, and the weight that they stand for, of one of `weights`."""
    if recipe.layout in ("modelopt", "nvfp4-pack-quantized"):
        over = modelopt.overall(weights)

        def pack_nvfp4(weight: torch.Tensor, scheme: Scheme) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
            tensors, plain = modelopt.packed(weight, over)
            return (tensors if recipe.layout == "modelopt" else compressed.nvfp4(tensors)), plain

        return pack_nvfp4
    layout = {"gptq": gptq, "compressed-tensors": compressed}[recipe.layout]

    def pack(weight: torch.Tensor, scheme: Scheme) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        rounded = round_weight(weight, scheme, layout.SCALE_DTYPE)
        return layout.tensors(rounded), rounded.dequantized()

    return pack


def _config(recipe: Recipe, unquantized: list[str]) -> tuple[dict | None, dict[str, dict]]:
    """`quantization_config` of config.json, and documents beside it by file name."""
    if recipe.layout == "modelopt":
        document = {"producer": {"name": "modelopt", "version": "0.40.0"}, "quantization": modelopt.config(unquantized)}
        return None, {"hf_quant_config.json": document}
    if recipe.layout == "gptq":
        details = gptq.config(recipe)
        return details, {"quantize_config.json": details}
    return compressed.config(recipe, unquantized), {}


def _save(out: Path, source: Path, files: dict[str, dict[str, torch.Tensor]], edit: Callable[[dict], dict]) -> None:
    out.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name != INDEX:
            shutil.copy(path, out)
    for file, held in files.items():
        save_file(held, out / file, metadata={"format": "pt"})
    weight_map = {name: file for file, held in files.items() for name in held}
    size = sum(tensor.nbytes for held in files.values() for tensor in held.values())
    (out / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2))
    _edit_config(out, edit)


def _edit_config(folder: Path, edit: Callable[[dict], dict]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(edit(json.loads(file.read_text())), indent=2))
