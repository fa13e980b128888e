"""Mixtures of formats in which people have this model, at the published geometry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from demo.checkpoint.sparse import Form, Gptq, Packed, Plain

#: the text config as it is published
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen4ExpForCausalLM"],
    "model_type": "qwen4_exp_text",
    "dtype": "bfloat16",
    "vocab_size": 248320,
    "hidden_size": 2560,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_value_heads": 48,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "hc_count": 4,
    "hc_lowrank": 320,
    "ple_layer_ids": [2],
    "ple_embed_dim": 2560,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "split_ngram_parts": 128,
    "make_ngram_vocab_size_divisible_by": 128,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
    "eos_token_id": 248044,
    "tie_word_embeddings": False,
}

_EXPERTS, _DENSE, _WIDE, _NARROW = Packed(4, 128), Packed(6, 64), Packed(8, 128), Packed(8, 32)
#: GDN's two gates have 48 outputs; exporters leave layers that are no multiple of 32 wide as they are
_LEFT = ("in_proj_a", "in_proj_b", "index_qk_proj", "shared_expert_gate", "block_inject_weight")


def autoround_loose(kind: str, module: str) -> Form:
    """`autoround_mix` as compressed-tensors up to 0.17 packs it."""
    form = autoround_mix(kind, module)
    return replace(form, loose=True) if form is _DENSE else form


def autoround_mix(kind: str, module: str) -> Form:
    """INT4 g128 experts; INT6 g64 GDN, attention and shared experts; INT8 hyper-connections and vocabulary."""
    if module.endswith(_LEFT):
        return Plain()
    if kind == "hyper_connection":
        # 320 inputs are two and a half groups of 128.
        return _NARROW if module.endswith("weight_up") else _WIDE
    forms = {"experts": _EXPERTS, "gdn": _DENSE, "attention": _DENSE, "shared_experts": _DENSE}
    return forms.get(kind) or (_WIDE if kind in ("embeddings", "lm_head") else Plain())


_LAYERS = r"re:.*layers\.\d+\."
#: targets of the four groups, as an exporter should write them
TARGETS: dict[Packed, tuple[str, ...]] = {
    _EXPERTS: (_LAYERS + r"mlp\.experts\.\d+\.(gate|up|down)_proj$",),
    _DENSE: (
        _LAYERS + r"linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$",
        _LAYERS + r"self_attn\.[qkvo]_proj$",
        _LAYERS + r"mlp\.shared_expert\.(gate|up|down)_proj$",
    ),
    _NARROW: (r"re:.*hyper_connection(_mixer)?\.input_mix_weight_up$",),
    _WIDE: (r"re:.*hyper_connection(_mixer)?\.input_mix_weight_down$", r"re:.*embed_tokens$", r"re:.*lm_head$"),
}


def autoround_config(*, shared_target: bool = False) -> dict[str, Any]:
    """The quantization_config of `autoround_mix`; `shared_target` as one exporter wrote it, each group for "Linear"."""
    groups = {
        f"group_{n}": form.group_of_config(*(("Linear",) if shared_target else targets))
        for n, (form, targets) in enumerate(TARGETS.items())
    }
    ignore = [rf"re:.*{name}$" for name in _LEFT] + [r"re:.*mlp\.gate$", r"re:.*\.ple\..*"]
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, "ignore": ignore}


def gptq_mix(group: int = 128) -> Callable[[str, str], Form]:
    """INT4 for everything in the layers but routers, hyper-connections, the indexer's projection and PLE."""

    def form(kind: str, module: str) -> Form:
        quantized = kind in ("experts", "gdn", "attention", "shared_experts") and not module.endswith(_LEFT)
        return Gptq(4, group) if quantized else Plain()

    return form


def gptq_config(group: int = 128) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True}
