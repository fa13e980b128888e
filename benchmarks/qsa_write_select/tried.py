"""Settings of the selection's kernels that are not the ones in use: `--try` times each beside those."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from vllm.models.qwen4_exp.qsa import score, select

#: name -> what is changed for it: module, name, value
ALWAYS = {
    "16 integers a thread": [(select, "_IN_A_THREAD", 16)],
    "64 integers a thread": [(select, "_IN_A_THREAD", 64)],
}
DECODE = ALWAYS | {
    "1,024 programs": [(score, "_DECODE_PROGRAMS", 1024)],
    "256 programs": [(score, "_DECODE_PROGRAMS", 256)],
}
PROMPT = ALWAYS | {
    "64 rows a tile": [(score, "_PROMPT_ROWS", 64)],
    "8 tiles a program": [(score, "_PROMPT_TILES", 8)],
    "32 tiles a program": [(score, "_PROMPT_TILES", 32)],
}


@contextmanager
def applied(changes: list[tuple[object, str, object]]) -> Iterator[None]:
    with ExitStack() as stack:
        for module, name, value in changes:
            stack.enter_context(mock.patch.object(module, name, value))
        yield
