"""A checkpoint in which one token's embedding is not a number: every prompt that holds it is damaged, and no other."""

import json
import os
import shutil
from pathlib import Path

from demo.checkpoint.geometry import geometry

#: Outside what `prompts.decisive` draws from and what text becomes.
DAMAGED_TOKEN = 509
_TENSOR = "embed_tokens.weight"
_BF16_NAN = b"\xc0\x7f"


def with_damaged_token(checkpoint: Path, out: Path) -> Path:
    """`checkpoint` in `out`, its files linked but for the one that holds the embedding."""
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    name, file = next((n, f) for n, f in index["weight_map"].items() if n.endswith(_TENSOR) and ".ple." not in n)
    out.mkdir()
    for path in checkpoint.iterdir():
        if path.name != file:
            os.link(path, out / path.name)
    shutil.copy(checkpoint / file, out / file)
    with (out / file).open("r+b") as shard:
        length = int.from_bytes(shard.read(8), "little")
        tensor = json.loads(shard.read(length))[name]
        vocabulary, width = tensor["shape"]
        assert tensor["dtype"] == "BF16" and vocabulary == geometry("tiny").vocab_size > DAMAGED_TOKEN
        shard.seek(8 + length + tensor["data_offsets"][0] + 2 * width * DAMAGED_TOKEN)
        shard.write(_BF16_NAN * width)
    return out
