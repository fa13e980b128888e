"""The published model in the numbers that scheduling and memory traffic depend on."""

from __future__ import annotations

from dataclasses import dataclass

from demo.checkpoint.mixes import PUBLISHED

#: Qwen3.8-Flash-Next's text configuration, with what a scheduler's configuration asks for beside the shapes
TEXT_CONFIG: dict[str, object] = PUBLISHED | {
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    "pad_token_id": 248044,
}

LAYERS = 48
SPARSE_LAYERS = 12
RECURRENT_LAYERS = LAYERS - SPARSE_LAYERS
EXPERTS = 512
EXPERTS_PER_TOKEN = 10


@dataclass(frozen=True)
class Checkpoint:
    """Bytes that one decode token reads of a checkpoint's weights.

    Attributes:
        dense: read for every micro-batch, whatever its rows.
        experts: the ten chosen experts of all layers.
        head: the part of `dense` that only the last stage reads, the output layer.
    """

    dense: float
    experts: float
    head: float

    @property
    def expert(self) -> float:
        """One expert in every layer."""
        return self.experts / EXPERTS_PER_TOKEN


#: INT4 experts in groups of 128, INT8 nearly everywhere else; counted from its headers by its author: 5.83 GB a token.
INT4_INT8 = Checkpoint(dense=4.62e9, experts=1.22e9, head=248320 * 2560)
#: GPTQ, groups of 32: 4.5 bits for an expert's weight against 4.125 above.  Not counted but inferred: its 85 GB are
#: explained if the 4.31e9 other weights that a token reads are bf16 (68 GB experts, 9 GB of these, 1 GB embedding,
#: 5 GB of a draft layer in bf16, 1 GB vision); were they INT4 too, it would have some 77 GB.
GPTQ_BF16 = Checkpoint(dense=2 * 4.31e9, experts=1.22e9 * 4.5 / 4.125, head=2 * 248320 * 2560)

#: Bytes of one request's state that a decode token moves: recurrent state read and written ...
RECURRENT_BYTES = RECURRENT_LAYERS * 3_207_168 * 2
#: ... 2048 selected rows of K and V of 2 heads x 256 in bf16 ...
SELECTED_ROWS = 2048
ROW_BYTES = 2048 * SPARSE_LAYERS
#: ... and every pooled key, one of 128 bf16 values for 4 tokens, scored to select them.
POOLED_BYTES = 128 * 2 / 4 * SPARSE_LAYERS

#: floating-point operations of one token in all layers: 6 billion active parameters, multiplied and added
FLOP = 2 * 6.0e9
#: scoring pooled keys: 4 heads x 128 wide, multiplied and added, for each 4 tokens of context
SCORE_FLOP = 2 * 4 * 128 / 4 * SPARSE_LAYERS

#: what a stage hands on for a token: four residual streams of 2560 bf16 values
ACTIVATION_BYTES = 4 * 2560 * 2
