"""Sizes of sparse attention in the published model, and what one row of it moves and computes."""

from __future__ import annotations

from dataclasses import dataclass

from demo.checkpoint.mixes import PUBLISHED
from vllm.models.qwen4_exp.qsa.formats import KVFormat


@dataclass(frozen=True)
class Geometry:
    """One sparse layer.

    Attributes:
        layers: such layers in the model.
        heads, kv_heads, dim: of attention.
        budget, ratio: selected tokens, and tokens to a pooled key.

    """

    layers: int
    heads: int
    kv_heads: int
    dim: int
    budget: int
    ratio: int

    @property
    def width(self) -> int:
        """Most columns of a row: the budget, and the open group's tokens."""
        return self.budget + self.ratio - 1

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def kv_bytes(self, form: KVFormat, columns: int) -> int:
        """Keys, values and scales that a row reads."""
        return self.kv_heads * columns * form.token_bytes(self.dim)

    def row_bytes(self) -> int:
        """What a row moves besides K/V: queries, gate and result in bf16, its list of tokens."""
        return 3 * 2 * self.heads * self.dim + 4 * (self.width + 1)

    def split_bytes(self, columns: int, split: int) -> int:
        """Partial states that decode writes and reads again."""
        return 2 * -(-columns // split) * self.heads * (self.dim + 2) * 4

    def products(self, columns: int, padded_group: int) -> int:
        """Multiply-adds of one row on the matrix units, those of padding included."""
        return 2 * self.kv_heads * padded_group * columns * self.dim


def published() -> Geometry:
    config = PUBLISHED
    layers = config["num_hidden_layers"] // config["full_attention_interval"]
    return Geometry(
        layers, config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"],
        config["indexer_budget"], config["indexer_compress_ratio"],
    )  # fmt: skip
