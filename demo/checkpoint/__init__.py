"""A small random Qwen4Exp checkpoint in the published layout.

`geometry` says how large it is, `weights` what its numbers are and why, `tokens` makes a tokenizer from a few
lines of text, `write` puts the files on disk, `layout` reads them back and says what a published file looks like.
"""

from demo.checkpoint.geometry import PRESETS, text_config
from demo.checkpoint.write import build

__all__ = ["PRESETS", "build", "text_config"]
