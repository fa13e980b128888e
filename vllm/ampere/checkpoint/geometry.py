# SPDX-License-Identifier: Apache-2.0
"""Every module that a config calls for, under its canonical name, with its weight's shape."""

from __future__ import annotations

from typing import NamedTuple

from vllm.ampere.checkpoint.config import TextConfig

LINEAR, EMBEDDING, VECTOR, BUFFER = "linear", "embedding", "vector", "buffer"


class Part(NamedTuple):
    """A module's weight: `shape` is [outputs, inputs] for LINEAR and [rows, width] for EMBEDDING.

    VECTOR is whatever is never quantized (norms, filters, decays); a BUFFER is computed again and may be absent.
    `grouped` marks norms whose weight spans all residual streams although each stream is normalised by itself.
    """

    kind: str
    shape: tuple[int, ...]
    grouped: bool = False


def parts(config: TextConfig) -> dict[str, Part]:
    """All modules of the decoder, without the shards of the n-gram table."""
    c = config
    streams = c.hc_count * c.hidden_size
    made = {"embed_tokens": Part(EMBEDDING, (c.vocab_size, c.hidden_size))}
    if not c.tie_word_embeddings:
        made["lm_head"] = Part(LINEAR, (c.vocab_size, c.hidden_size))
    made |= _mixer(c, "hyper_connection_mixer.")
    for layer, kind in enumerate(c.layer_types):
        made |= _layer(c, f"layers.{layer}.", kind)
        if layer + 1 in c.ple_layer_ids:
            made |= _ple(c, f"layers.{layer}.ple.")
    for layer in range(c.mtp_layers):
        made |= _layer(c, f"mtp.layers.{layer}.", "full_attention")
    if c.mtp_layers:
        made |= _mixer(c, "mtp.hyper_connection_mixer.")
        made |= {
            "mtp.fc_embedding": Part(LINEAR, (c.hidden_size, c.hidden_size)),
            "mtp.fc_hidden": Part(LINEAR, (c.hidden_size, c.hidden_size)),
            "mtp.pre_fc_norm_embedding": Part(VECTOR, (c.hidden_size,)),
            "mtp.pre_fc_norm_hidden": Part(VECTOR, (streams,)),
        }
    return made


def _mixer(c: TextConfig, at: str) -> dict[str, Part]:
    streams = c.hc_count * c.hidden_size
    return {
        f"{at}hc_norm": Part(VECTOR, (streams,), grouped=True),
        f"{at}input_mix_weight_down": Part(LINEAR, (c.hc_lowrank, streams)),
        f"{at}input_mix_weight_up": Part(LINEAR, (streams, c.hc_lowrank)),
    }


def _layer(c: TextConfig, at: str, kind: str) -> dict[str, Part]:
    streams = c.hc_count * c.hidden_size
    made: dict[str, Part] = {}
    for block in ("attn", "mlp"):
        made |= _mixer(c, f"{at}{block}_hyper_connection.")
        made[f"{at}{block}_hyper_connection.block_inject_weight"] = Part(LINEAR, (c.hc_count, streams))
    made |= _gdn(c, f"{at}linear_attn.") if kind == "linear_attention" else _attention(c, f"{at}self_attn.")
    made |= _mlp(c, f"{at}mlp.")
    return made


def _gdn(c: TextConfig, at: str) -> dict[str, Part]:
    keys = c.linear_num_key_heads * c.linear_key_head_dim
    values = c.linear_num_value_heads * c.linear_value_head_dim
    heads, hidden = c.linear_num_value_heads, c.hidden_size
    return {
        f"{at}A_log": Part(VECTOR, (heads,)),
        f"{at}dt_bias": Part(VECTOR, (heads,)),
        f"{at}conv1d": Part(VECTOR, (2 * keys + values, 1, c.linear_conv_kernel_dim)),
        f"{at}norm": Part(VECTOR, (c.linear_value_head_dim,)),
        f"{at}in_proj_qkv": Part(LINEAR, (2 * keys + values, hidden)),
        f"{at}in_proj_z": Part(LINEAR, (values, hidden)),
        f"{at}in_proj_a": Part(LINEAR, (heads, hidden)),
        f"{at}in_proj_b": Part(LINEAR, (heads, hidden)),
        f"{at}out_proj": Part(LINEAR, (hidden, values)),
    }


def _attention(c: TextConfig, at: str) -> dict[str, Part]:
    queries, keys, hidden = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.hidden_size
    made = {
        # the query's projection holds the output gate as well
        f"{at}q_proj": Part(LINEAR, (2 * queries, hidden)),
        f"{at}k_proj": Part(LINEAR, (keys, hidden)),
        f"{at}v_proj": Part(LINEAR, (keys, hidden)),
        f"{at}o_proj": Part(LINEAR, (hidden, queries)),
        f"{at}q_norm": Part(VECTOR, (c.head_dim,)),
        f"{at}k_norm": Part(VECTOR, (c.head_dim,)),
    }
    if c.indexer_n_heads:
        heads = c.indexer_n_heads + c.indexer_kv_heads
        made |= {
            f"{at}indexer.index_qk_proj": Part(LINEAR, (heads * c.indexer_head_dim, hidden)),
            f"{at}indexer.q_layernorm": Part(VECTOR, (c.indexer_head_dim,)),
            f"{at}indexer.k_layernorm": Part(VECTOR, (c.indexer_head_dim,)),
        }
    return made


def _mlp(c: TextConfig, at: str) -> dict[str, Part]:
    hidden, inner, shared = c.hidden_size, c.moe_intermediate_size, c.shared_expert_intermediate_size
    up, down = Part(LINEAR, (inner, hidden)), Part(LINEAR, (hidden, inner))
    made = {
        f"{at}gate": Part(LINEAR, (c.num_experts, hidden)),
        f"{at}shared_expert_gate": Part(LINEAR, (1, hidden)),
        f"{at}shared_expert.gate_proj": Part(LINEAR, (shared, hidden)),
        f"{at}shared_expert.up_proj": Part(LINEAR, (shared, hidden)),
        f"{at}shared_expert.down_proj": Part(LINEAR, (hidden, shared)),
    }
    for expert in range(c.num_experts):
        made[f"{at}experts.{expert}.gate_proj"] = up
        made[f"{at}experts.{expert}.up_proj"] = up
        made[f"{at}experts.{expert}.down_proj"] = down
    return made


def _ple(c: TextConfig, at: str) -> dict[str, Part]:
    streams = c.hc_count * c.hidden_size
    norms = {f"{at}norm_{name}": Part(VECTOR, (streams,), grouped=True) for name in ("conv", "key", "query")}
    return norms | {
        f"{at}conv1d": Part(VECTOR, (streams, 1, c.ple_conv_kernel_size)),
        f"{at}key_proj": Part(LINEAR, (streams, c.ple_embed_dim)),
        f"{at}value_proj": Part(LINEAR, (c.hidden_size, c.ple_embed_dim)),
        f"{at}ple_embedding.layer_multipliers": Part(BUFFER, (c.ngram_size,)),
        f"{at}ple_embedding.ngram_heads_offsets": Part(BUFFER, (c.ngram_heads,)),
        f"{at}ple_embedding.ngram_heads_vocab_sizes": Part(BUFFER, (c.ngram_heads,)),
    }
