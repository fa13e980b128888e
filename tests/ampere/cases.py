"""One way to break a checkpoint for every class of finding.

A case writes a checkpoint into a folder and returns the words that its message has to hold: place, expected, found.
`CASES` is complete: a test compares it with the catalogue.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from demo.checkpoint import mixes
from demo.checkpoint.sparse import Nvfp4, Packed, Plain, published
from tests.ampere.drafts import TABLE, Draft, edit_header, edit_json, first_file, write_file

INDEX = "model.safetensors.index.json"
Case = Callable[[Path], tuple[str, ...]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES["".join(word.capitalize() for word in function.__name__.split("_"))] = function
    return function


# What stops the reading


@case
def no_such_checkpoint(out: Path) -> tuple[str, ...]:
    Draft().write(out)
    (out / "config.json").unlink()
    return (str(out), "a config.json")


@case
def not_downloaded(out: Path) -> tuple[str, ...]:
    """The command is given an id; see `argument`."""
    return ("someone/no-such-model", "snapshot")


@case
def another_model(out: Path) -> tuple[str, ...]:
    draft = Draft()
    draft.config["model_type"] = "llama"
    draft.tensors = {"model.norm.weight": ("BF16", (4,))}
    out.mkdir()
    (out / "config.json").write_text(json.dumps(draft.config))
    return ("config.json, model_type", "qwen4_exp", "'llama'")


@case
def broken_json(out: Path) -> tuple[str, ...]:
    Draft().write(out)
    (out / "config.json").write_text('{"model_type": "qwen4_exp_text",')
    return ("config.json", "line 1")


@case
def config_key_missing(out: Path) -> tuple[str, ...]:
    Draft().write(out)
    edit_json(out / "config.json", lambda config: config.pop("num_experts"))
    return ("config.json, num_experts", "no such key")


@case
def config_value_unusable(out: Path) -> tuple[str, ...]:
    Draft().write(out)
    edit_json(out / "config.json", lambda config: config.update(ple_layer_ids=[0]))
    return ("config.json, ple_layer_ids", "1 to 4", "[0]")


@case
def file_unreadable(out: Path) -> tuple[str, ...]:
    """A folder in the place of a file: no user may read that as one, not even root."""
    Draft().write(out)
    file = first_file(out)
    file.unlink()
    file.mkdir()
    return (file.name, os.strerror(21))


# Files


@case
def file_is_pointer(out: Path) -> tuple[str, ...]:
    Draft().write(out)
    first_file(out).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    return ("model-00001", "a pointer of")


@case
def not_safetensors(out: Path) -> tuple[str, ...]:
    Draft().write(out)
    first_file(out).write_bytes((20).to_bytes(8, "little") + b"[" * 200)
    return ("model-00001", "JSON")


@case
def header_longer_than_file(out: Path) -> tuple[str, ...]:
    Draft().write(out)
    os.truncate(first_file(out), 100)
    return ("model-00001", "a file of 100 bytes")


@case
def shard_truncated(out: Path) -> tuple[str, ...]:
    Draft().write(out)
    file = first_file(out)
    size = file.stat().st_size
    os.truncate(file, size - 1)
    return (file.name, f"{size} bytes", f"{size - 1} bytes")


@case
def shard_too_long(out: Path) -> tuple[str, ...]:
    Draft().write(out)
    file = first_file(out)
    size = file.stat().st_size
    os.truncate(file, size + 1)
    return (file.name, f"{size} bytes", f"{size + 1} bytes")


@case
def offsets_overlap(out: Path) -> tuple[str, ...]:
    Draft().write(out)

    def shift(header: dict) -> None:
        second = sorted((v["data_offsets"][0], k) for k, v in header.items() if k != "__metadata__")[1][1]
        header[second]["data_offsets"] = [offset - 2 for offset in header[second]["data_offsets"]]

    edit_header(first_file(out), shift)
    return ("model-00001", "from byte")


@case
def offsets_leave_hole(out: Path) -> tuple[str, ...]:
    Draft().write(out)

    def remove(header: dict) -> None:
        second = sorted((v["data_offsets"][0], k) for k, v in header.items() if k != "__metadata__")[1][1]
        del header[second]

    edit_header(first_file(out), remove)
    return ("model-00001", "before ")


@case
def tensor_bytes_wrong(out: Path) -> tuple[str, ...]:
    Draft().write(out)
    edit_header(first_file(out), lambda header: header["model.embed_tokens.weight"].update(dtype="F32"))
    return ("model.embed_tokens.weight", f"{512 * 256 * 4} bytes", f"{512 * 256 * 2} bytes")


@case
def named_twice_in_header(out: Path) -> tuple[str, ...]:
    Draft().write(out)
    file = first_file(out)
    blob = file.read_bytes()
    length = int.from_bytes(blob[:8], "little")
    text = blob[8 : 8 + length].rstrip()
    again = b',"lm_head.weight":' + json.dumps(json.loads(text)["lm_head.weight"]).encode() + b"}"
    text = text[:-1] + again
    file.write_bytes(len(text).to_bytes(8, "little") + text + blob[8 + length :])
    return (file.name, "different names")


@case
def shard_missing(out: Path) -> tuple[str, ...]:
    Draft().write(out)
    file = first_file(out)
    file.unlink()
    return (file.name, "tensors", "no such file")


@case
def tensor_twice(out: Path) -> tuple[str, ...]:
    draft = Draft()
    draft.write(out)
    # without an index every file is read
    (out / INDEX).unlink()
    write_file(out / "old.safetensors", {"lm_head.weight": draft.tensors["lm_head.weight"]})
    return ("old.safetensors", "lm_head.weight in both")


@case
def index_tensor_absent(out: Path) -> tuple[str, ...]:
    Draft().write(out)
    last = sorted(out.glob("*.safetensors"))[-1].name
    edit_json(out / INDEX, lambda index: index["weight_map"].update({"lm_head.weight": last}))
    return (last, "lm_head.weight")


@case
def tensor_outside_index(out: Path) -> tuple[str, ...]:
    Draft().write(out)
    edit_json(out / INDEX, lambda index: index["weight_map"].pop("lm_head.weight"))
    return ("model-00001", "lm_head.weight missing")


@case
def file_outside_index(out: Path) -> tuple[str, ...]:
    Draft().write(out)
    write_file(out / "old.safetensors", {"lm_head.weight": ("BF16", (512, 256))})
    return ("old.safetensors",)


# Config


@case
def key_misplaced(out: Path) -> tuple[str, ...]:
    draft = Draft.multimodal()
    draft.config["hc_lowrank"] = draft.config["text_config"].pop("hc_lowrank")
    draft.write(out)
    return ("config.json, hc_lowrank", "text_config", "320 at the top")


@case
def old_model_name(out: Path) -> tuple[str, ...]:
    draft = Draft.multimodal()
    config = draft.config
    config |= {"model_type": "qwen3_8_flash_next", "architectures": ["Qwen3_8_FlashNextForConditionalGeneration"]}
    config["text_config"]["model_type"] = "qwen3_8_flash_next_text"
    config["vision_config"]["model_type"] = "qwen3_8_flash_next_vision"
    draft.write(out)
    return ("config.json, architectures", "Qwen4ExpForConditionalGeneration", "Qwen3_8_FlashNextFor")


@case
def output_gate_unsaid(out: Path) -> tuple[str, ...]:
    draft = Draft()
    del draft.config["output_gate_type"]
    draft.write(out)
    return ("config.json, output_gate_type", '"output_gate_type": "sigmoid"')


@case
def sampling_unsaid(out: Path) -> tuple[str, ...]:
    draft = Draft()
    draft.generation = {"eos_token_id": 2}
    draft.write(out)
    return ("generation_config.json", "eos_token_id", '"temperature": 0.7')


# Tensors


@case
def tensor_missing(out: Path) -> tuple[str, ...]:
    draft = Draft()
    for expert in (1, 2):
        del draft.tensors[f"model.layers.3.mlp.experts.{expert}.up_proj.weight"]
    draft.write(out)
    return ("layers.3.mlp.experts.1.up_proj", "16 of layers.*.mlp.experts.*.up_proj", "found 14")


@case
def tensor_shape_wrong(out: Path) -> tuple[str, ...]:
    draft = Draft()
    draft.config["moe_intermediate_size"] = 256
    draft.write(out)
    return ("layers.0.mlp.experts.0.gate_proj.weight", "[256, 256]", "[128, 256]")


@case
def norm_group_lost(out: Path) -> tuple[str, ...]:
    draft = Draft()
    draft.tensors["model.layers.0.attn_hyper_connection.hc_norm.weight"] = ("BF16", (256,))
    draft.write(out)
    return ("layers.0.attn_hyper_connection.hc_norm.weight", "[1024] (4 x 256)", "[256]")


@case
def tensor_unknown(out: Path) -> tuple[str, ...]:
    draft = Draft()
    draft.tensors["model.norm.weight"] = ("BF16", (256,))
    draft.write(out)
    return ("norm",)


# The n-gram table


@case
def ngram_table_missing(out: Path) -> tuple[str, ...]:
    draft = Draft()
    draft.tensors = {name: entry for name, entry in draft.tensors.items() if ".ngram_embedding." not in name}
    draft.write(out)
    return (TABLE.removeprefix("model."), "8 shards")


@case
def ngram_shard_missing(out: Path) -> tuple[str, ...]:
    draft = Draft()
    del draft.tensors[f"{TABLE}.shard_3.weight"], draft.tensors[f"{TABLE}.shard_6.weight"]
    draft.write(out)
    return ("8 shards", "all but 2: 3, 6")


@case
def ngram_shard_overlap(out: Path) -> tuple[str, ...]:
    draft = Draft()
    draft.tensors[f"{TABLE}.shard_2.weight"] = ("BF16", (1200, 16))
    draft.write(out)
    return ("shard_2", "1152 rows", "1200")


@case
def ngram_shard_out_of_order(out: Path) -> tuple[str, ...]:
    """Of a table that does not divide evenly the last shard is the short one."""
    draft = Draft()
    draft.config["split_ngram_parts"] = 7
    draft.tensors = Draft(draft.config).tensors
    first, last = f"{TABLE}.shard_0.weight", f"{TABLE}.shard_6.weight"
    draft.tensors[first], draft.tensors[last] = draft.tensors[last], draft.tensors[first]
    draft.write(out)
    return ("shard_0", "1317 rows", "another shard, 1314")


@case
def ngram_shard_rows(out: Path) -> tuple[str, ...]:
    draft = Draft()
    draft.tensors[f"{TABLE}.shard_2.weight"] = ("BF16", (1000, 16))
    draft.write(out)
    return ("shard_2", "1152 rows", "1000")


@case
def ngram_row_width(out: Path) -> tuple[str, ...]:
    draft = Draft()
    draft.tensors |= {f"{TABLE}.shard_{n}.weight": ("BF16", (1152, 32)) for n in range(8)}
    draft.write(out)
    return ("shard_0", "[rows, 16]", "[1152, 32]")


@case
def ngram_dtypes_differ(out: Path) -> tuple[str, ...]:
    draft = Draft()
    draft.tensors[f"{TABLE}.shard_2.weight"] = ("F16", (1152, 16))
    draft.write(out)
    return (TABLE.removeprefix("model."), "BF16 and F16")


@case
def ngram_scale_missing(out: Path) -> tuple[str, ...]:
    draft = Draft()
    draft.tensors |= {f"{TABLE}.shard_{n}.weight": ("F8_E4M3", (1152, 16)) for n in range(8)}
    draft.write(out)
    return (TABLE.removeprefix("model."), "weight_scale")


@case
def ple_layer_elsewhere(out: Path) -> tuple[str, ...]:
    draft = Draft()
    draft.config["ple_layer_ids"] = [1]
    draft.write(out)
    return ("config.json, ple_layer_ids", "expected [2], found [1]")


# Schemes

EXPERT = "model.layers.0.mlp.experts.0.gate_proj"


@case
def packed_shape_wrong(out: Path) -> tuple[str, ...]:
    draft = Draft.mixed()
    draft.tensors[f"{EXPERT}.weight_packed"] = ("I32", (128, 33))
    draft.write(out)
    return ("experts.0.gate_proj.weight_packed", "32 (4 bits)", "[128, 33]")


@case
def scale_shape_wrong(out: Path) -> tuple[str, ...]:
    draft = Draft.mixed()
    draft.tensors[f"{EXPERT}.weight_scale"] = ("BF16", (64, 2))
    draft.write(out)
    return ("experts.0.gate_proj.weight_scale", "128 outputs", "[64, 2]")


@case
def scale_missing(out: Path) -> tuple[str, ...]:
    draft = Draft.mixed()
    del draft.tensors[f"{EXPERT}.weight_scale"]
    draft.write(out)
    return ("experts.0.gate_proj.weight_scale", "no such tensor")


@case
def group_does_not_divide(out: Path) -> tuple[str, ...]:
    """320 inputs in groups of 128, the last of them short."""
    draft = Draft.mixed()
    up = "model.layers.0.attn_hyper_connection.input_mix_weight_up"
    draft.tensors[f"{up}.weight_scale"] = ("BF16", (1024, 3))
    draft.write(out)
    return ("input_mix_weight_up.weight_scale", "320 inputs", "3 groups")


@case
def shared_target(out: Path) -> tuple[str, ...]:
    Draft.mixed(shared_target=True).write(out)
    return ("target 'Linear'", "INT8 g128 for all of them", "group_3", "layers.*.mlp.experts.*.")


@case
def shared_target_unused(out: Path) -> tuple[str, ...]:
    draft = Draft.gptq()
    draft = Draft.mixed()
    groups = draft.config["quantization_config"]["config_groups"]
    older = json.loads(json.dumps(groups["group_0"]))
    older["weights"]["group_size"] = 64
    draft.config["quantization_config"]["config_groups"] = {"older": older} | groups
    draft.write(out)
    return ("older, group_0", "INT4 g128 for all of them")


@case
def scheme_contradicted(out: Path) -> tuple[str, ...]:
    draft = Draft.mixed()
    draft.config["quantization_config"]["config_groups"]["group_1"]["weights"]["num_bits"] = 8
    draft.write(out)
    return ("INT8 g64 (quantization_config)", "INT6 g64", "more like it")


@case
def packed_with_gaps(out: Path) -> tuple[str, ...]:
    """And with zero points, which are packed along the other side."""
    draft = Draft.mixed()
    draft.tensors = published(draft.config, mixes.autoround_loose)
    zeros = {}
    for name in draft.tensors:
        if name.endswith(".weight_packed"):
            _, (outputs, groups) = draft.tensors[name.replace("_packed", "_scale")]
            zeros[name.replace("_packed", "_zero_point")] = ("I32", (-(-outputs // 5), groups))
    draft.tensors |= zeros
    for group in draft.config["quantization_config"]["config_groups"].values():
        group["weights"]["symmetric"] = False
    draft.write(out)
    return ("layers.0.linear_attn.in_proj_qkv", "48 words a row (6 bits, 256 inputs)", "found 52")


@case
def packed_with_gaps_repacked(out: Path) -> tuple[str, ...]:
    draft = Draft.mixed()
    draft.tensors = published(draft.config, mixes.autoround_loose)
    draft.write(out)
    return ("layers.0.linear_attn.in_proj_qkv", "48 words a row (6 bits, 256 inputs)", "found 52")


@case
def fused_parts_differ(out: Path) -> tuple[str, ...]:
    """Keys in eight bits beside queries and values in six, and a config that says just that."""
    draft = Draft.mixed()
    keys, layers = "model.layers.3.self_attn.k_proj", r"re:.*self_attn\.k_proj$"
    draft.tensors |= {f"{keys}.{suffix}": entry for suffix, entry in Packed(8, 128).tensors(256, 256).items()}
    groups = draft.config["quantization_config"]["config_groups"]
    groups["group_1"]["targets"] = [name.replace("qkvo", "qvo") for name in groups["group_1"]["targets"]]
    groups["group_3"]["targets"].append(layers)
    draft.write(out)
    return ("layers.3.self_attn.q_proj and layers.3.self_attn.k_proj", "INT6 g64 and INT8 g128")


@case
def router_quantized(out: Path) -> tuple[str, ...]:
    draft = Draft.mixed()
    gate = "model.layers.0.mlp.gate"
    del draft.tensors[f"{gate}.weight"]
    draft.tensors |= {f"{gate}.{suffix}": entry for suffix, entry in Packed(8, 128).tensors(4, 256).items()}
    draft.write(out)
    return ("layers.0.mlp.gate", "INT8 g128")


@case
def nvfp4_attention(out: Path) -> tuple[str, ...]:
    """All of sparse attention, where only its output may be."""
    form = lambda kind, module: Nvfp4() if ".self_attn." in module and "indexer" not in module else Plain()  # noqa: E731
    draft = Draft()
    draft.tensors = published(draft.config, form)
    left = ["*.mlp.*", "*.linear_attn.*", "*.ple.*", "*hyper_connection*", "*.indexer.*", "lm_head"]
    draft.config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": left}
    draft.write(out)
    return ("layers.3.self_attn.q_proj and 2 more", "expected BF16", "found NVFP4", "exclude_modules")


@case
def activation_order(out: Path) -> tuple[str, ...]:
    draft = Draft.gptq()
    draft.config["quantization_config"]["desc_act"] = True
    draft.write(out)
    return ("quantization_config.desc_act", "false", "true")


def argument(name: str, out: Path) -> str:
    """What the command is given: the folder, but for the case of a model that is not there."""
    return "someone/no-such-model" if name == "NotDownloaded" else str(out)
