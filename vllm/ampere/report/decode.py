# SPDX-License-Identifier: Apache-2.0
"""Bytes that one decode step of one request reads from the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.ampere.checkpoint import Checkpoint
from vllm.ampere.checkpoint.names import BODY
from vllm.ampere.findings.stored_table import StoredTable
from vllm.ampere.report.classes import ModuleClass


@dataclass(frozen=True)
class DecodeStep:
    """Bytes of a step, without K/V and states.

    Attributes:
        dense: every weight that each token passes through, the lm_head among them
        experts: of the routed experts those that one token chooses
        rows: one row of the token embedding, and one row of the n-gram table for each hashed head
        embedding_table: the whole token embedding, of which a step reads that row; published counts of a step's
            bytes often have it among the dense weights
        chosen, of: experts per token
    """

    dense: int
    experts: int
    rows: int
    embedding_table: int
    chosen: int
    of: int

    @property
    def total(self) -> int:
        return self.dense + self.experts + self.rows

    def json(self) -> dict[str, Any]:
        return {
            "total_bytes": self.total,
            "dense_bytes": self.dense,
            "experts_bytes": self.experts,
            "row_bytes": self.rows,
            "embedding_table_bytes": self.embedding_table,
            "experts_per_token": self.chosen,
            "experts": self.of,
        }


def decode_step(checkpoint: Checkpoint, classes: list[ModuleClass], flat: StoredTable | None = None) -> DecodeStep:
    """From the bytes of each class; `flat` is where rows of the n-gram table are read from, if not from the shards."""
    text = checkpoint.text
    size = {item.name: item.total.bytes for item in classes}
    embedding = size.get("embeddings", 0)
    dense = sum(size.get(name, 0) for name in BODY - {"experts", "embeddings"})
    if text.tie_word_embeddings:
        # The same table is the lm_head.
        dense += embedding
    row = flat.row_bytes if flat else size.get("ngram_table", 0) // max(1, sum(_rows(checkpoint)))
    return DecodeStep(
        dense=dense,
        experts=size.get("experts", 0) * text.num_experts_per_tok // text.num_experts,
        rows=embedding // text.vocab_size + row * text.ngram_heads * len(text.ple_layer_ids),
        embedding_table=embedding,
        chosen=text.num_experts_per_tok,
        of=text.num_experts,
    )


def _rows(checkpoint: Checkpoint) -> list[int]:
    tables = (module for module in checkpoint.modules.values() if module.kind == "ngram_table")
    found = (module.tensors.get("weight") or module.tensors.get("weight_packed") for module in tables)
    return [tensor.shape[0] for tensor in found if tensor is not None]
