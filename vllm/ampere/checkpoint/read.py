# SPDX-License-Identifier: Apache-2.0
"""Read a checkpoint: every header once, every JSON file once."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from vllm.ampere.checkpoint import documents
from vllm.ampere.checkpoint.config import TextConfig, text_config
from vllm.ampere.checkpoint.declared import Declared, Scheme, declared
from vllm.ampere.checkpoint.errors import NoSuchCheckpoint
from vllm.ampere.checkpoint.geometry import Part, parts
from vllm.ampere.checkpoint.headers import Shard, Tensor, fetch, parse
from vllm.ampere.checkpoint.names import class_of, split, template
from vllm.ampere.checkpoint.resolve import resolve
from vllm.ampere.checkpoint.storage import Storage, observe, signature


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection: hundreds of thousands of objects are made and none dropped, and looking through
    them again and again took half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Module(NamedTuple):
    """A module of the checkpoint: its tensors by what stands after its name ("" for the name alone)."""

    name: str
    template: str
    kind: str
    tensors: dict[str, Tensor]

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors.values())


@dataclass
class Checkpoint:
    """What `read` found.

    Attributes:
        path: the directory
        config, generation_config, index: the JSON objects; None for a file that is not there
        weight_map: tensor to file after the index; None without one
        text: the text config
        declared: the quantization config
        shards: the files that a server would open, by name; a file that is not there is in `absent` instead
        absent: files that the index names and that are not there
        strays: safetensors files that the index does not name; nothing reads them
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    index: dict[str, Any] | None
    weight_map: dict[str, str] | None
    text: TextConfig
    declared: Declared
    shards: dict[str, Shard]
    absent: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)

    @cached_property
    def parts(self) -> dict[str, Part]:
        """Every module that the config calls for, by canonical name."""
        return parts(self.text)

    @cached_property
    def modules(self) -> dict[str, Module]:
        """Every module that the files hold, by canonical name. Of a tensor that is there twice, the last file's."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.tensors():
            module, suffix = split(name)
            found.setdefault(module, {})[suffix] = tensor
        made = {}
        for name, tensors in found.items():
            shape = template(name)
            made[name] = Module(name, shape, class_of(shape), tensors)
        return made

    @cached_property
    def schemes(self) -> dict[str, Scheme | None]:
        """How each module of the decoder is said to be stored; None for not quantized."""
        scheme, parts = self.declared.scheme, self.parts
        return {name: scheme(name, parts.get(name), module.template) for name, module in self.modules.items()}

    @cached_property
    def storages(self) -> dict[str, Storage]:
        """How each module is stored."""
        made = {}
        for name, module in self.modules.items():
            part = self.parts.get(name)
            inputs = part.shape[1] if part is not None and len(part.shape) == 2 else 0
            scheme = self.schemes[name]
            bits, kind = (scheme.bits, scheme.kind) if scheme else (0, "int")
            made[name] = observe(signature(module.tensors), inputs, bits, kind)
        return made

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of every file, under its own name."""
        for shard in self.shards.values():
            yield from shard.tensors.items()

    @property
    def complete(self) -> bool:
        """Whether every header could be read; what is missing says little where one could not."""
        return not self.absent and all(shard.tensors or not shard.faults for shard in self.shards.values())


def read(checkpoint: str | os.PathLike[str]) -> Checkpoint:
    """Read the headers and JSON files of a directory, or of a hub id's snapshot on this machine.

    Raises:
        Finding: where there is nothing to look at: NoSuchCheckpoint, NotDownloaded, AnotherModel, BrokenJson,
            FileUnreadable (of a JSON file), ConfigKeyMissing, ConfigValueUnusable. What is wrong with single weight
            files is kept in their `faults`.
    """
    path = resolve(checkpoint)
    config = documents.load(path / documents.CONFIG)
    if config is None:
        raise NoSuchCheckpoint(path, f"a {documents.CONFIG}", "none")
    text = text_config(config)
    index = documents.load(path / documents.INDEX)
    weight_map = documents.weight_map(index)
    there = {entry.name for entry in path.glob("*.safetensors")}
    wanted = sorted(there if weight_map is None else set(weight_map.values()))
    if not wanted:
        raise NoSuchCheckpoint(path, "*.safetensors files", "none")
    # A dangling link is no file, yet a glob lists it: `exists` follows it.
    present = [name for name in wanted if (path / name).exists()]
    # Threads, since on a cold disk or a network share a header is mostly waited for. Parsing would only take turns.
    with ThreadPoolExecutor(8) as pool, uncollected():
        shards = {name: parse(found) for name, found in zip(present, pool.map(fetch, (path / n for n in present)))}
    return Checkpoint(
        path=path,
        config=config,
        generation_config=documents.load(path / documents.GENERATION_CONFIG),
        index=index,
        weight_map=weight_map,
        text=text,
        declared=declared(config, documents.load(path / documents.MODELOPT_CONFIG)),
        shards=shards,
        absent=[name for name in wanted if name not in shards],
        strays=sorted(there - set(wanted)),
    )
