"""The small checkpoint again, quantized: file for file as gptqmodel, compressed-tensors and ModelOpt put it on disk.

`rounding` turns a matrix into integers and scales, `packing` the integers into 32-bit words, `recipes` says which
module gets which scheme, `gptq`, `compressed` and `modelopt` know one layout each, `mtp` makes a draft module's tensors, and
`write` puts everything on disk, beside the same model with the dequantized weights in bfloat16.  The second one is
the truth that tests compare with: transformers reads it without knowing any of these formats.
"""

from demo.checkpoint.formats.recipes import RECIPES
from demo.checkpoint.formats.write import Pair, quantize

__all__ = ["RECIPES", "Pair", "quantize"]
