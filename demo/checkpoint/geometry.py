"""Geometries: as small as two cores allow, and of the same kind as the published model.

Kept from the published model, because code branches on it: 4 residual streams, compress ratio 4, n-grams up to 3,
rotary width 64 and indexer head width 128 (what the fused CUDA prepare kernel takes), GDN key width equal to value
width (the CPU kernels want that, and refuse 32), one QSA layer in four, a shared expert, a PLE layer counted from one.

Changed, because a test has to get past it with a prompt of some hundred tokens: the indexer budget is 64 tokens
instead of 2048, and the GDN state is small, so that vLLM's hybrid block alignment gives blocks of tens of tokens
instead of about 1500.  The CUDA top-k needs budget / ratio of 512, 1024 or 2048, so these files are for the CPU.
"""

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Geometry:
    """One checkpoint's shape.  `overrides` are further fields of `Qwen4ExpTextConfig`."""

    num_hidden_layers: int = 8
    hidden_size: int = 128
    ple_layer_ids: tuple[int, ...] = (2,)
    #: rows per hashed head; there are 2 x 8 heads, so the table has about 16 times as many rows
    ngram_vocab_size_base: int = 521
    ple_embed_dim: int = 256
    split_ngram_parts: int = 8
    indexer_budget: int = 64
    num_experts: int = 8
    num_experts_per_tok: int = 2
    vocab_size: int = 512
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def ngram_heads(self) -> int:
        return 2 * 8

    @property
    def table_bytes(self) -> int:
        """Size of the n-gram table in bfloat16, short of the primes and padding that round it up."""
        return self.ngram_heads * self.ngram_vocab_size_base * (self.ple_embed_dim // self.ngram_heads) * 2


PRESETS: dict[str, Geometry] = {
    # 8 layers (QSA at 3 and 7, counted from zero), 0.3 MB of table: one engine start is a few seconds of loading.
    "tiny": Geometry(),
    # 12 layers, so that each of three stages has one QSA layer.  Rows of 160 bfloat16 as in the published table
    # (320 bytes, one read each); 16 x 41000 of them are 210 MB, far more than everything else in the file.
    "demo": Geometry(
        num_hidden_layers=12,
        ngram_vocab_size_base=41_000,
        ple_embed_dim=2560,
        split_ngram_parts=16,
        num_experts=16,
        num_experts_per_tok=4,
    ),
    # For quantized weights: groups of 128 divide every width that is packed, except, as in the published model, the
    # rank of the hyper-connections.
    "groups": Geometry(
        hidden_size=256,
        overrides=dict(moe_intermediate_size=128, shared_expert_intermediate_size=128, hc_lowrank=96),
    ),
}


def geometry(preset: str, **changes: Any) -> Geometry:
    """A preset with some fields replaced; `None` keeps the preset's value."""
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; there are {', '.join(sorted(PRESETS))}")
    return replace(PRESETS[preset], **{k: v for k, v in changes.items() if v is not None})


def text_config(shape: Geometry, *, eos_token_id: int, pad_token_id: int):
    """transformers' config object for `shape`."""
    from transformers import Qwen4ExpTextConfig

    fields: dict[str, Any] = dict(
        architectures=["Qwen4ExpForCausalLM"],
        dtype="bfloat16",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_hidden_layers,
        full_attention_interval=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=4096,
        # A base of 1e7 would leave nearly all frequencies at zero over a few hundred tokens.
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        output_gate_type="sigmoid",
        mamba_ssm_dtype="float32",
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.num_experts_per_tok,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
        hc_count=4,
        hc_lowrank=16,
        ple_layer_ids=list(shape.ple_layer_ids),
        ple_embed_dim=shape.ple_embed_dim,
        ple_conv_kernel_size=4,
        ngram_size=3,
        heads_per_ngram=shape.ngram_heads // 2,
        ngram_vocab_size_base=shape.ngram_vocab_size_base,
        make_ngram_vocab_size_divisible_by=128,
        split_ngram_parts=shape.split_ngram_parts,
        indexer_n_heads=4,
        indexer_kv_heads=1,
        indexer_head_dim=128,
        indexer_budget=shape.indexer_budget,
        indexer_compress_ratio=4,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        tie_word_embeddings=False,
    )
    fields.update(shape.overrides)
    return Qwen4ExpTextConfig(**fields)
