"""Quantization configs as vLLM has them when it builds a model."""

from demo.checkpoint.formats import compressed, gptq, modelopt
from demo.checkpoint.formats.recipes import INT8_G128, RECIPES, Recipe, Rule
from demo.checkpoint.formats.rounding import Scheme
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.inc import INCConfig
from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig, ModelOptNvFp4Config
from vllm.models.qwen4_exp.nvidia.model import Qwen4ExpForCausalLM

ATTENTION = "model.layers.3.self_attn"
#: q, k, v, o and the indexer of every layer
ALL_FOUR = Recipe("compressed-tensors", (Rule(r"self_attn\..*_proj", INT8_G128),))
HYPER = "model.layers.3.attn_hyper_connection"


def compressed_tensors(recipe: Recipe = RECIPES["mix"], unquantized: tuple[str, ...] = ()) -> CompressedTensorsConfig:
    made = CompressedTensorsConfig.from_config(compressed.config(recipe, list(unquantized)))
    made.packed_modules_mapping = Qwen4ExpForCausalLM.packed_modules_mapping
    return made


def gptqmodel(recipe: Recipe = RECIPES["gptq"], modules: tuple[str, ...] | None = None) -> AutoGPTQConfig:
    """`modules` are those that the files hold packed: q, k, v and o of one layer unless said."""
    made = AutoGPTQConfig.from_config(gptq.config(recipe))
    if modules is None:
        modules = tuple(f"{ATTENTION}.{part}_proj" for part in "qkvo")
    made.modules_in_block_to_quantize = list(modules)
    made.packed_modules_mapping = Qwen4ExpForCausalLM.packed_modules_mapping
    return made


def auto_round(extra: dict | None = None) -> INCConfig:
    return _of_the_model(INCConfig.from_config({"bits": 4, "group_size": 128, "extra_config": extra}))


def fp8(*left: str) -> Fp8Config:
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": list(left)}
    return _of_the_model(Fp8Config.from_config(config))


def nvfp4(*left: str) -> ModelOptNvFp4Config:
    return _of_the_model(ModelOptNvFp4Config.from_config({"quantization": modelopt.config(list(left))}))


def nvfp4_packed(activations: bool) -> CompressedTensorsConfig:
    """compressed-tensors' NVFP4, of all linear layers; with 4-bit activations, or with 16-bit ones."""
    config = compressed.config(Recipe("nvfp4-pack-quantized", (Rule(r".*", Scheme(4, modelopt.GROUP)),)), [])
    if activations:
        (group,) = config["config_groups"].values()
        group["input_activations"] = group["weights"] | {"dynamic": "local"}
    return _of_the_model(CompressedTensorsConfig.from_config(config))


def modelopt_mixed(*parts: str) -> ModelOptMixedPrecisionConfig:
    layers = {f"{ATTENTION}.{part}": {"quant_algo": "NVFP4", "group_size": modelopt.GROUP} for part in parts}
    config = modelopt.config([]) | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    return _of_the_model(ModelOptMixedPrecisionConfig.from_config({"quantization": config}))


def _of_the_model(made):
    made.packed_modules_mapping = Qwen4ExpForCausalLM.packed_modules_mapping
    return made
