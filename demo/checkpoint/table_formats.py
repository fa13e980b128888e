"""A checkpoint's n-gram table in each of the published layouts, encoded independently of the code that reads them.

    python -m demo.checkpoint.table_formats CHECKPOINT OUT FORM     FORM: scaled, row-scaled, nvfp4, …

`OUT` then also has `OUT/dequantized`, the same values as plain bf16 rows, which transformers can read.
"""

import json
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from demo.checkpoint.formats import modelopt
from demo.checkpoint.layout import INDEX

FORMS = ["scaled", "scaled-f32", "row-scaled", "row-scaled-int8", "nvfp4"]


@dataclass
class Coded:
    """Tensors by last name, and ``values``: float32 ``[rows, dim]`` that they stand for (plain: as stored)."""

    values: torch.Tensor
    by_row: dict[str, torch.Tensor]
    single: dict[str, torch.Tensor] = field(default_factory=dict)


def encode(values: torch.Tensor, form: str, dtype: torch.dtype = torch.bfloat16) -> Coded:
    """``values`` float32 ``[rows, dim]`` in the layout ``form``; ``dtype`` is that of plain rows."""
    if form == "plain":
        stored = values.to(dtype)
        return Coded(stored, {"weight": stored})
    if form in ("scaled", "scaled-f32"):
        # The released table's scale is bf16 of shape [1]; 0.0002 there.
        scale = (values.abs().max() / 448).reshape(1)
        scale = scale if form == "scaled-f32" else scale.bfloat16()
        codes = (values / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        return Coded(codes.float() * scale.float(), {"weight": codes}, {"weight_scale": scale})
    if form.startswith("row-scaled"):
        int8 = form.endswith("int8")
        top = 127 if int8 else 448
        scale = (values.abs().amax(1, keepdim=True) / top).to(torch.bfloat16 if int8 else torch.float32)
        codes = (values / scale.float()).clamp(-top, top)
        codes = codes.round().to(torch.int8) if int8 else codes.to(torch.float8_e4m3fn)
        return Coded(codes.float() * scale.float(), {"weight": codes, "weight_scale": scale})
    assert form == "nvfp4", form
    over = modelopt.overall([values])
    codes, scale, numbers = modelopt.rounded(values, over)
    return Coded(numbers, {"weight": codes, "weight_scale": scale}, {"weight_scale_2": over.reshape(1)})


_SHARD = re.compile(r"(?P<layer>.*ngram_embedding)\.shard_(?P<index>\d+)\.weight$")


def recode(source: Path, out: Path, form: str) -> Path:
    """Copy a checkpoint with its table in another layout; returns the copy with the dequantized table.

    The table's shards move into two files that hold nothing else, as in some published checkpoints; numbers for the
    whole table stay in the file where shard 0 was.
    """
    names: dict[int, str] = {}
    shards: dict[int, torch.Tensor] = {}
    rest: dict[str, dict[str, torch.Tensor]] = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors = load_file(path)
        for name in [name for name in tensors if _SHARD.match(name)]:
            index = int(_SHARD.match(name)["index"])
            names[index], shards[index] = name, tensors.pop(name)
            if index == 0:
                home = path.name
        rest[path.name] = tensors
    layer = _SHARD.match(names[0])["layer"]
    rows = [len(shards[index]) for index in sorted(shards)]
    coded = encode(torch.cat([shards[index] for index in sorted(shards)]).float(), form)
    twin = encode(coded.values, "plain")
    for folder, table in ((out, coded), (out / "dequantized", twin)):
        folder.mkdir(parents=True, exist_ok=True)
        for path in source.iterdir():
            if path.suffix != ".safetensors" and path.is_file():
                shutil.copy(path, folder / path.name)
        files = {name: dict(tensors) for name, tensors in rest.items()}
        files[home] |= {f"{layer}.{leaf}": tensor for leaf, tensor in table.single.items()}
        for leaf, tensor in table.by_row.items():
            for index, part in enumerate(tensor.split(rows)):
                file = f"table-{1 + index * 2 // len(rows)}-of-2.safetensors"
                files.setdefault(file, {})[f"{layer}.shard_{index}.{leaf}"] = part.contiguous()
        weight_map = {}
        for file, tensors in files.items():
            if tensors:
                save_file(tensors, folder / file, metadata={"format": "pt"})
                weight_map |= dict.fromkeys(tensors, file)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return out / "dequantized"


if __name__ == "__main__":
    print(recode(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
