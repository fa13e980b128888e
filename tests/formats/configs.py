"""Quantization configs as vLLM has them when it builds a model."""

from demo.checkpoint.formats import compressed, gptq
from demo.checkpoint.formats.recipes import INT8_G128, RECIPES, Recipe, Rule
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
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
