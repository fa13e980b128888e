# SPDX-License-Identifier: Apache-2.0
"""The n-gram table: every shard there, with the rows that its number calls for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vllm.ampere.checkpoint import Checkpoint
from vllm.ampere.checkpoint.names import layer_of
from vllm.ampere.checkpoint.read import Module
from vllm.ampere.checkpoint.table import shard_rows, table_rows
from vllm.ampere.finding import Finding

_SHARD = re.compile(r"layers\.(\d+)\.ple\.ple_embedding\.ngram_embedding(?:\.shard_(\d+))?$")


class NgramTableMissing(Finding):
    what = "The n-gram table is not in the files"
    remedy = "Download the whole checkpoint: the table is most of its size."


class NgramShardMissing(Finding):
    what = "Shards of the n-gram table are missing"
    remedy = "Download the whole checkpoint; rows of a missing shard would be noise."


class NgramShardOverlap(Finding):
    what = "Shards of the n-gram table hold the same rows"
    remedy = "Keep one form of the table; the config's split_ngram_parts says how many shards it has."


class NgramShardOutOfOrder(Finding):
    what = "Shards of the n-gram table are out of order"
    remedy = "Export again: rows are found by their number, and all of these would be wrong."


class NgramShardRows(Finding):
    what = "A shard of the n-gram table has the wrong number of rows"
    remedy = "Config and weights are not of one model, or the export cut the table differently."


class NgramRowWidth(Finding):
    what = "Rows of the n-gram table have the wrong width"
    remedy = "Config and weights are not of one model (ple_embed_dim, ngram_size, heads_per_ngram)."


class NgramDtypesDiffer(Finding):
    what = "Shards of the n-gram table have different dtypes"
    remedy = "Export the table again, in one dtype."


class NgramScaleMissing(Finding):
    what = "The n-gram table is FP8 and has no scale"
    remedy = "Export again with the table's weight_scale; without it every row would be off by one factor."


class PleLayerElsewhere(Finding):
    what = "The n-gram table hangs on another layer than the config says"
    remedy = "ple_layer_ids counts from one: tensors layers.1.ple.* are 2. vllm ampere check --repair OUT writes it."


def ple_layers(checkpoint: Checkpoint) -> list[int]:
    """Layers with PLE tensors, counted from zero."""
    found = (layer_of(name) for name in checkpoint.modules if ".ple." in name)
    return sorted({layer for layer in found if layer is not None})


def check(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Each table of the config against the tensors of its layer."""
    tables: dict[int, dict[int | None, Module]] = {}
    for name, module in checkpoint.modules.items():
        if module.kind == "ngram_table" and (match := _SHARD.match(name)):
            tables.setdefault(int(match[1]), {})[match[2] and int(match[2])] = module
    wanted = [one_based - 1 for one_based in checkpoint.text.ple_layer_ids]
    there = ple_layers(checkpoint)
    if there and there != wanted:
        yield PleLayerElsewhere("config.json, ple_layer_ids", str([n + 1 for n in there]), str([n + 1 for n in wanted]))
        return
    for index, layer in enumerate(wanted):
        at = f"layers.{layer}.ple.ple_embedding.ngram_embedding"
        found = {key: module for key, module in tables.get(layer, {}).items() if _weight(module)}
        if found:
            yield from _table(checkpoint, at, found, table_rows(checkpoint.text, index))
        elif checkpoint.complete:
            yield NgramTableMissing(at, f"{checkpoint.text.split_ngram_parts} shards", "none")


def _weight(module: Module):
    return module.tensors.get("weight") or module.tensors.get("weight_packed")


def _table(checkpoint: Checkpoint, at: str, found: dict[int | None, Module], rows: int) -> Iterator[Finding]:
    text = checkpoint.text
    yield from _form(at, found, text.ple_embed_dim // text.ngram_heads, checkpoint.modules.get(at))
    numbers = sorted(key for key in found if key is not None)
    if None in found:
        if numbers:
            yield NgramShardOverlap(at, "one tensor or shards", f"a tensor of all rows and {len(numbers)} shards")
        elif (actual := _weight(found[None]).shape[0]) != rows:
            yield NgramShardRows(f"{at}.weight", f"{rows} rows", f"{actual}")
        return
    parts = text.split_ngram_parts
    if beyond := [n for n in numbers if n >= parts]:
        yield NgramShardOverlap(
            f"{at}.shard_{beyond[0]}", f"shards 0 to {parts - 1} (split_ngram_parts)", f"{len(beyond)} more"
        )
        return
    expected = {n: shard_rows(rows, parts, n) for n in range(parts)}
    actual = {n: _weight(found[n]).shape[0] for n in numbers}
    missing = [n for n in range(parts) if expected[n] and n not in actual]
    if missing and checkpoint.complete:
        listed = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
        yield NgramShardMissing(at, f"{sum(map(bool, expected.values()))} shards", f"all but {len(missing)}: {listed}")
    wrong = [n for n in numbers if actual[n] != expected[n]]
    if wrong:
        first = wrong[0]
        place = f"{at}.shard_{first}"
        if not missing and sorted(actual.values()) == sorted(expected[n] for n in numbers):
            yield NgramShardOutOfOrder(place, f"{expected[first]} rows", f"those of another shard, {actual[first]}")
        elif sum(actual.values()) > rows:
            yield NgramShardOverlap(
                place, f"{expected[first]} rows", f"{actual[first]}, and {sum(actual.values())} of {rows} in all"
            )
        else:
            yield NgramShardRows(place, f"{expected[first]} rows", f"{actual[first]}")


def _form(at: str, found: dict[int | None, Module], width: int, whole: Module | None) -> Iterator[Finding]:
    """Dtype, width and scale, each once for the whole table."""
    dtypes = {_weight(module).dtype for module in found.values()}
    if len(dtypes) > 1:
        yield NgramDtypesDiffer(at, "one dtype", " and ".join(sorted(dtypes)))
        return
    (dtype,) = dtypes
    # Two values of four bits share a byte.
    stored = width // 2 if dtype == "U8" else width
    for key, module in found.items():
        shape = _weight(module).shape
        if shape[1:] != (stored,):
            place = at if key is None else f"{at}.shard_{key}"
            yield NgramRowWidth(place, f"[rows, {stored}] ({dtype})", str([*shape]))
            break
    # One scale for the table, one a shard, or one a row: all of them are tensors below the same name.
    scaled = whole is not None and "weight_scale" in whole.tensors
    if dtype.startswith("F8") and not scaled and not any(len(module.tensors) > 1 for module in found.values()):
        yield NgramScaleMissing(at, "a weight_scale", "none")
