"""Put a quantized checkpoint on disk, and its dequantized twin."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from demo.checkpoint.formats import compressed, gptq, mtp
from demo.checkpoint.formats.recipes import Recipe
from demo.checkpoint.formats.rounding import round_weight
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

    layout = {"gptq": gptq, "compressed-tensors": compressed}[recipe.layout]
    packed_files: dict[str, dict[str, torch.Tensor]] = {}
    plain_files: dict[str, dict[str, torch.Tensor]] = {}
    left: list[str] = []
    for file, held in files.items():
        packed, plain = packed_files.setdefault(file, {}), plain_files.setdefault(file, {})
        for name, tensor in held.items():
            module, _, kind = name.rpartition(".")
            stored = prefix + name.removeprefix(PLAIN) if name.startswith(PLAIN) else name
            scheme = recipe.scheme(module) if kind == "weight" and tensor.dim() == 2 else None
            if scheme is None:
                packed[stored] = plain[name] = tensor
                if kind == "weight" and tensor.dim() == 2 and "ngram_embedding" not in module:
                    left.append(stored.removesuffix(".weight"))
                continue
            rounded = round_weight(tensor, scheme, layout.SCALE_DTYPE)
            stem = stored.removesuffix("weight")
            packed |= {stem + part: value for part, value in layout.tensors(rounded).items()}
            plain[name] = rounded.dequantized()
    plain_files.pop(mtp.FILE, None)

    details = gptq.config(recipe) if layout is gptq else compressed.config(recipe, sorted(left))
    _save(pair.quantized, source, packed_files, lambda c: c | {"quantization_config": details})
    if layout is gptq:
        (pair.quantized / "quantize_config.json").write_text(json.dumps(details, indent=2))
    if with_mtp:
        _edit_config(pair.quantized, lambda c: c | {"mtp_num_hidden_layers": 1})
    _save(pair.dequantized, source, plain_files, lambda c: c)
    return pair


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
