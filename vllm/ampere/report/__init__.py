# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds: `summary` as numbers, `text` for reading.

classes.py   bytes, bits and schemes by class of module
decode.py    what one decode step reads
stages.py    what each pipeline stage would hold
summary.py   all of it as one JSON object, with findings and verdict
text.py      the same for a terminal
style.py     colour, numbers, columns
"""

from vllm.ampere.report.summary import summary, verdict
from vllm.ampere.report.text import text

__all__ = ["summary", "text", "verdict"]
