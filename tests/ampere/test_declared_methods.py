"""What AutoRound's, FP8's and ModelOpt's configs say of the tensors: sound checkpoints pass, each fault has its name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo.checkpoint import mixes
from demo.checkpoint.sparse import Form, Fp8, Gptq, Nvfp4, Plain, published
from tests.ampere.drafts import SMALL, Draft
from vllm.ampere.checkpoint import read
from vllm.ampere.findings import findings

EXPERT = "model.layers.0.mlp.experts.0.gate_proj"
ROUTERS = [f"model.layers.{n}.mlp.{name}" for n in range(4) for name in ("gate", "shared_expert_gate")]


def projections(form: Form, **others: Form) -> Callable[[str, str], Form]:
    """`form` for attention, delta net, experts and shared experts; `others` by class of module."""

    def choose(kind: str, module: str) -> Form:
        if kind in others:
            return others[kind]
        return form if mixes.gptq_mix()(kind, module) == Gptq(4, 128) else Plain()

    return choose


def draft(form: Callable[[str, str], Form], config: dict[str, Any] | None) -> Draft:
    whole = copy.deepcopy(SMALL) | ({"quantization_config": config} if config else {})
    return Draft(whole, tensors=published(whole, form))


def auto_round(**changes: Any) -> dict[str, Any]:
    """As AutoRound 0.9 writes it: what it left in 16 bits by name, a kind of layer by pattern."""
    made = {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "data_type": "int",
        "block_name_to_quantize": "model.layers",
        "extra_config": {name: {"bits": 16, "data_type": "fp"} for name in ROUTERS}
        | {r".*\.mlp\.shared_expert\..*": {"bits": 8, "group_size": 64}},
    }
    return made | changes


AUTO_ROUND = projections(Gptq(4, 128), shared_experts=Gptq(8, 64))


def mixed_auto_round(kind: str, module: str) -> Form:
    return Plain() if module.endswith("shared_expert_gate") else AUTO_ROUND(kind, module)


def fp8(block: int = 0, static: bool = False, **changes: Any) -> dict[str, Any]:
    made = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "static" if static else "dynamic",
        "modules_to_not_convert": [*ROUTERS, "lm_head"],
    }
    return made | ({"weight_block_size": [block, block]} if block else {}) | changes


def modelopt(algorithm: str, **changes: Any) -> dict[str, Any]:
    """The inner object of hf_quant_config.json."""
    excluded = ["lm_head", *ROUTERS, "*.ple.*", "model.layers.*hyper_connection*"]
    return {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": excluded} | changes


def write(made: Draft, out: Path, beside: dict[str, Any] | None = None) -> Path:
    made.write(out)
    if beside is not None:
        document = {"producer": {"name": "modelopt", "version": "0.40.0"}, "quantization": beside}
        (out / "hf_quant_config.json").write_text(json.dumps(document))
    return out


def names(out: Path) -> list[str]:
    return [item.name for item in findings(read(out))]


def said(out: Path) -> str:
    (item,) = findings(read(out))
    return f"{item.name}: {item}"


MODELOPT_FP8 = projections(Fp8(static=True))
QKV = tuple(f"self_attn.{leaf}_proj" for leaf in "qkv")


def plain_attention(form: Form) -> Callable[[str, str], Form]:
    """`projections`, without what upstream builds in 16 bits under ModelOpt's NVFP4."""
    return lambda kind, module: Plain() if module.endswith(QKV) else projections(form)(kind, module)


MODELOPT_NVFP4 = plain_attention(Nvfp4())
MIXED_LAYERS = {
    f"model.layers.{layer}.mlp.experts.{expert}.{leaf}_proj": {"quant_algo": "NVFP4", "group_size": 16}
    for layer in range(4)
    for expert in range(4)
    for leaf in ("gate", "up", "down")
} | {f"model.layers.3.self_attn.{leaf}_proj": {"quant_algo": "FP8"} for leaf in "qkvo"}


def mixed_precision(kind: str, module: str) -> Form:
    if kind == "experts":
        return Nvfp4()
    return Fp8(static=True) if module.endswith(tuple(f"self_attn.{leaf}_proj" for leaf in "qkvo")) else Plain()


SOUND = {
    "auto-round": (mixed_auto_round, auto_round(), None),
    "auto-round, by whole names": (
        projections(Gptq(4, 128)),
        auto_round(extra_config={"shared_expert_gate": {"bits": 16}, "mlp.gate": {"bits": 16}}),
        None,
    ),
    "fp8 in blocks": (projections(Fp8(128)), fp8(128), None),
    "fp8 in blocks, multiples or not": (projections(Fp8(512)), fp8(512), None),
    "fp8": (projections(Fp8()), fp8(), None),
    "fp8, static": (projections(Fp8(static=True)), fp8(static=True), None),
    "fp8, experts left": (
        projections(Fp8(128), experts=Plain()),
        fp8(128, modules_to_not_convert=[f"model.layers.{n}.mlp.experts" for n in range(4)]),
        None,
    ),
    "modelopt fp8": (MODELOPT_FP8, None, modelopt("FP8")),
    "modelopt fp8, in config.json": (MODELOPT_FP8, modelopt("fp8") | {"quant_method": "modelopt"}, None),
    # q, k and v are not named there, and in 16 bits all the same.
    "modelopt nvfp4": (MODELOPT_NVFP4, None, modelopt("NVFP4", group_size=16)),
    "modelopt nvfp4, weight-only": (MODELOPT_NVFP4, None, modelopt("W4A16_NVFP4", group_size=16)),
    "modelopt nvfp4 by layer, attention too": (
        lambda kind, module: Nvfp4() if module.endswith(QKV) else mixed_precision(kind, module),
        None,
        modelopt(
            "MIXED_PRECISION",
            quantized_layers=MIXED_LAYERS | {f"model.layers.3.{name}": {"quant_algo": "NVFP4"} for name in QKV},
        ),
    ),
    "modelopt, by layer": (mixed_precision, None, modelopt("MIXED_PRECISION", quantized_layers=MIXED_LAYERS)),
    "modelopt, another algorithm": (MODELOPT_FP8, None, modelopt("MXFP8")),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_checkpoints_pass(name, tmp_path) -> None:
    form, config, beside = SOUND[name]
    assert names(write(draft(form, config), tmp_path / "model", beside)) == []


@pytest.mark.parametrize(
    ("form", "config", "beside", "words"),
    [
        (mixed_auto_round, auto_round(bits=8), None, ["INT8 g128 (quant", "found INT4 g128"]),
        (mixed_auto_round, auto_round(group_size=32), None, ["INT4 g32 (quant", "found INT4 g128"]),
        (mixed_auto_round, auto_round(block_name_to_quantize="model.layers.0,model.layers.1"), None, ["not quantized"]),
        (mixed_auto_round, auto_round(extra_config={"layers.3.self_attn.o_proj": {"bits": 16}}), None, ["self_attn.o"]),
        (projections(Fp8(128)), fp8(64), None, ["a scale per 64 x 64 block", "found FP8, 1 x 2 scales"]),
        (projections(Fp8()), fp8(128), None, ["a scale per 128 x 128 block", "found FP8, one scale"]),
        (projections(Fp8(128)), None, None, ["expected not quantized", "found FP8, 1 x 2 scales"]),
        (projections(Fp8(128), experts=Plain()), fp8(128), None, ["experts.0.gate_proj", "found BF16"]),
        (projections(Gptq(4, 128)), fp8(128), None, ["experts.0.gate_proj", "found INT4 g128"]),
        (MODELOPT_NVFP4, None, modelopt("FP8"), ["expected FP8, one scale", "found NVFP4 g16"]),
        (plain_attention(Nvfp4(32)), None, modelopt("NVFP4"), ["expected NVFP4 g16", "found NVFP4 g32"]),
        (
            mixed_precision,
            None,
            modelopt("MIXED_PRECISION", quantized_layers=MIXED_LAYERS | {"model.layers.3.self_attn.o_proj": {"quant_algo": "NVFP4"}}),
            ["self_attn.o_proj: expected NVFP4 g16", "found FP8, one scale"],
        ),
        (MODELOPT_FP8, None, modelopt("FP8", exclude_modules=["*self_attn*"]), ["layers.3.self_attn.q_proj", "not quantized"]),
        (projections(Nvfp4()), None, modelopt("NVFP4", exclude_modules=[*modelopt("")["exclude_modules"], "*_attn.[qkv]_proj"]),
         ["layers.3.self_attn.k_proj: expected not quantized", "found NVFP4"]),
    ],
)  # fmt: skip
def test_a_config_that_contradicts_the_tensors(form, config, beside, words, tmp_path) -> None:
    found = findings(read(write(draft(form, config), tmp_path / "model", beside)))
    assert {item.name for item in found} == {"SchemeContradicted"}
    text = "\n".join(map(str, found))
    assert all(word in text for word in words), text


def changed(made: Draft, **tensors: Any) -> Draft:
    """Tensors of the first expert's first projection replaced, or taken away (None)."""
    for suffix, entry in tensors.items():
        if entry is None:
            del made.tensors[f"{EXPERT}.{suffix}"]
        else:
            made.tensors[f"{EXPERT}.{suffix}"] = entry
    return made


@pytest.mark.parametrize(
    ("form", "config", "beside", "change", "words"),
    [
        # [128, 256]: neither blocks of any size nor channels
        (projections(Fp8(128)), fp8(128), None, {"weight_scale_inv": ("F32", (3, 2))},
         ["ScaleShapeWrong", "gate_proj.weight_scale_inv", "[3, 2]"]),
        (projections(Fp8(128)), fp8(128), None, {"weight_scale_inv": None},
         ["ScaleMissing", "gate_proj.weight_scale", "no such tensor"]),
        (projections(Fp8(128)), fp8(128), None, {"weight_scale_inv": None, "weight_scale": ("F32", (1, 2))},
         ["ScaleMissing", "gate_proj.weight_scale_inv", "only weight_scale"]),
        (projections(Fp8()), fp8(), None, {"weight_scale": ("F32", (2,))},
         ["ScaleShapeWrong", "gate_proj.weight_scale", "[2]"]),
        (projections(Fp8(static=True)), fp8(static=True), None, {"input_scale": None},
         ["ScaleMissing", "gate_proj.input_scale", "only weight_scale"]),
        (MODELOPT_NVFP4, None, modelopt("NVFP4"), {"weight_scale": ("F8_E4M3", (64, 16))},
         ["ScaleShapeWrong", "gate_proj.weight_scale", "128 outputs", "[64, 16]"]),
        (MODELOPT_NVFP4, None, modelopt("NVFP4"), {"weight_scale": ("F8_E4M3", (128, 15))},
         ["GroupDoesNotDivide", "256 inputs", "15 groups"]),
        (MODELOPT_NVFP4, None, modelopt("NVFP4"), {"weight_scale": None},
         ["ScaleMissing", "gate_proj.weight_scale", "no such tensor"]),
        (MODELOPT_NVFP4, None, modelopt("NVFP4"), {"weight_scale_2": None},
         ["ScaleMissing", "gate_proj.weight_scale_2", "only input_scale, weight_scale"]),
        (MODELOPT_NVFP4, None, modelopt("NVFP4"), {"weight": ("U8", (128, 64))},
         ["TensorShapeWrong", "gate_proj.weight", "[128, 128]", "[128, 64]"]),
        (MODELOPT_FP8, None, modelopt("FP8"), {"weight_scale": None},
         ["ScaleMissing", "gate_proj.weight_scale", "no such tensor"]),
        (mixed_auto_round, auto_round(), None, {"scales": None},
         ["ScaleMissing", "gate_proj.scales", "no such tensor"]),
        (mixed_auto_round, auto_round(), None, {"scales": ("F16", (3, 128))},
         ["GroupDoesNotDivide", "256 inputs", "3 groups"]),
        (mixed_auto_round, auto_round(), None, {"qweight": ("I32", (33, 128))},
         ["PackedShapeWrong", "gate_proj.qweight", "[33, 128]"]),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(form, config, beside, change, words, tmp_path) -> None:
    text = said(write(changed(draft(form, config), **change), tmp_path / "model", beside))
    assert all(word in text for word in words), text


def test_a_group_that_is_no_number_or_pair_is_said(tmp_path) -> None:
    out = draft(mixed_auto_round, auto_round(group_size="all")).write(tmp_path / "model")
    with pytest.raises(ValueError, match="quantization_config: expected names, numbers and objects"):
        read(out)


def test_auto_rounds_fp8_in_blocks(tmp_path) -> None:
    config = auto_round(data_type="fp", bits=8, group_size=[128, 128], packing_format="auto_round:fp8", extra_config={})
    assert names(draft(projections(Fp8(128)), config).write(tmp_path / "sound")) == []
    config["group_size"] = [64, 64]
    assert set(names(draft(projections(Fp8(128)), config).write(tmp_path / "other"))) == {"SchemeContradicted"}
