# SPDX-License-Identifier: Apache-2.0
"""The text config: the keys that shapes follow from, wherever they stand, with transformers' defaults."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from vllm.ampere.checkpoint.documents import CONFIG
from vllm.ampere.checkpoint.errors import AnotherModel, ConfigKeyMissing, ConfigValueUnusable

MULTIMODAL, TEXT = "qwen4_exp", "qwen4_exp_text"
#: class names of the model, without its draft module
ARCHITECTURES = ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration")
#: names of the model on the day of its release, in both spellings; the rest of such a config is the same
_OLD_TYPE, _OLD_CLASS = re.compile(r"^qwen3_8_flash_next(?=_|$)"), re.compile(r"^Qwen3_8_?FlashNext(?=For|MTP|Text|$)")


def present_name(name: str) -> str:
    """A model type or class name as it is today; other names are returned as they are."""
    return _OLD_CLASS.sub("Qwen4Exp", _OLD_TYPE.sub(MULTIMODAL, name))


_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_experts",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
#: what a config that leaves the key out means
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_experts_per_tok": 10,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "hc_count": 4,
    "hc_lowrank": 320,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 512,
    "indexer_n_heads": 0,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 0,
}
#: bounds for what is counted through here; far beyond any model, and short of all memory
_MOST = {"num_hidden_layers": 1000, "num_experts": 10_000, "ngram_vocab_size_base": 10**10, "split_ngram_parts": 10**5}
#: further keys of the text config; in a multimodal config they are read from there only
_OTHERS = (
    "full_attention_interval",
    "layer_types",
    "ple_layer_ids",
    "ple_embed_dim",
    "ple_embedding_dtype",
    "indexer_budget",
    "indexer_compress_ratio",
    "output_gate_type",
    "rope_parameters",
    "max_position_embeddings",
    "rms_norm_eps",
    "mamba_ssm_dtype",
    "eos_token_id",
)
TEXT_KEYS = frozenset((*_REQUIRED, *_DEFAULTS, *_OTHERS))


@dataclass(frozen=True)
class TableConfig:
    """The numbers that the n-gram tables follow from; attributes are named as in the config."""

    #: one-based, as in the config
    ple_layer_ids: tuple[int, ...]
    ple_embed_dim: int
    #: rows that are looked up for a token
    ngram_heads: int
    ngram_vocab_size_base: int
    make_ngram_vocab_size_divisible_by: int
    split_ngram_parts: int


@dataclass(frozen=True)
class TextConfig:
    """The numbers that shapes follow from; attributes are named as in the config."""

    values: dict[str, Any]
    layer_types: tuple[str, ...]
    #: one-based, as in the config
    ple_layer_ids: tuple[int, ...]
    tie_word_embeddings: bool
    vision: bool
    mtp_layers: int
    #: text keys that stand at the top of a multimodal config only, or there with another value
    misplaced: tuple[str, ...] = field(default=())

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None


def text_config(config: dict[str, Any]) -> TextConfig:
    """Read the text part of a config.json, of either form.

    Raises:
        AnotherModel, ConfigKeyMissing, ConfigValueUnusable
    """
    _named(config, CONFIG)
    model_type = present_name(config.get("model_type") or "")
    if model_type not in (MULTIMODAL, TEXT):
        raise AnotherModel(
            f"{CONFIG}, model_type", f"{MULTIMODAL} or {TEXT}", repr(model_type) if model_type else "no such key"
        )
    for key in ("text_config", "vision_config"):
        if config.get(key) is not None:
            _named(config[key], f"{CONFIG}, {key}")
    nested = config.get("text_config")
    text = config if nested is None else nested
    misplaced: list[str] = []
    if nested is not None:
        misplaced = sorted(key for key in TEXT_KEYS & config.keys() if _misplaced(key, config, nested))
        # What a server would not see is read from where it stands, so that one slip is one finding.
        text = {key: config[key] for key in misplaced if key not in nested} | nested
    return _build(text, config, model_type, tuple(misplaced))


def _named(holder: object, place: str) -> None:
    """Check the two keys by which a config says what it is of."""
    if not isinstance(holder, dict):
        raise ConfigValueUnusable(place, "an object", repr(holder))
    if not isinstance(holder.get("model_type", ""), str | None):
        raise ConfigValueUnusable(f"{place}, model_type", "a name", repr(holder["model_type"]))
    names = holder.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigValueUnusable(f"{place}, architectures", "a list of names", repr(names))


def _misplaced(key: str, config: dict[str, Any], nested: dict[str, Any]) -> bool:
    """Token ids and the like may well differ between the levels; numbers that shapes follow from may not."""
    return key not in nested or (key not in _OTHERS and config[key] != nested[key])


def table_config(text: dict[str, Any], place: str = CONFIG) -> TableConfig:
    """Of a text config alone: from config.json, or the engine's own, whose `to_dict()` has --hf-overrides in it.

    Other keys are not looked at: of a configuration that was made smaller they need not fit each other.

    Raises:
        ConfigKeyMissing, ConfigValueUnusable
    """
    layers, hidden = _value(text, "num_hidden_layers", place), _value(text, "hidden_size", place)
    heads = (_value(text, "ngram_size", place) - 1) * _value(text, "heads_per_ngram", place)
    width = text.get("ple_embed_dim")
    width = hidden if width is None else _number(f"{place}, ple_embed_dim", width, 1)
    if not 1 <= heads <= 4096 or width % heads:
        raise ConfigValueUnusable(f"{place}, ple_embed_dim", f"a multiple of {heads} heads", width)
    ids = text.get("ple_layer_ids") or []
    if not isinstance(ids, list) or not all(isinstance(n, int) and 1 <= n <= layers for n in ids):
        raise ConfigValueUnusable(f"{place}, ple_layer_ids", f"numbers from 1 to {layers}", repr(ids))
    rows = ("ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by", "split_ngram_parts")
    return TableConfig(tuple(sorted(set(ids))), width, heads, *(_value(text, key, place) for key in rows))


def _value(text: dict[str, Any], key: str, place: str) -> int:
    """The number `key`, or what a config without it means."""
    value = text.get(key)
    if value is None and key in _REQUIRED:
        raise ConfigKeyMissing(f"{place}, {key}", "a number", "no such key")
    value = _DEFAULTS.get(key) if value is None else value
    return _number(f"{place}, {key}", value, 0 if key.startswith("indexer_") else 1, _MOST.get(key, 10**7))


def _build(text: dict[str, Any], config: dict[str, Any], model_type: str, misplaced: tuple[str, ...]) -> TextConfig:
    place = CONFIG if text is config else f"{CONFIG}, text_config"
    values = {key: _value(text, key, place) for key in (*_REQUIRED, *_DEFAULTS)}
    table = table_config(text, place)
    values |= {"ple_embed_dim": table.ple_embed_dim, "ngram_heads": table.ngram_heads}
    layers = values["num_hidden_layers"]
    types = text.get("layer_types")
    if types is None:
        interval = _number(f"{place}, full_attention_interval", text.get("full_attention_interval") or 4, 1)
        types = ["full_attention" if (n + 1) % interval == 0 else "linear_attention" for n in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not all(isinstance(name, str) for name in types):
        raise ConfigValueUnusable(f"{place}, layer_types", f"{layers} names (num_hidden_layers)", _length(types))
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    return TextConfig(
        values=values,
        layer_types=tuple(types),
        ple_layer_ids=table.ple_layer_ids,
        tie_word_embeddings=bool(tied),
        vision=model_type == MULTIMODAL and bool(config.get("vision_config")),
        mtp_layers=_number(f"{place}, mtp_num_hidden_layers", text.get("mtp_num_hidden_layers") or 0, 0, 100),
        misplaced=misplaced,
    )


def _number(place: str, value: object, least: int, most: int = 10**7) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigValueUnusable(place, f"a whole number from {least} to {most}", repr(value))
    return value


def _length(value: object) -> str:
    return f"{len(value)} of them" if isinstance(value, list) else repr(value)
