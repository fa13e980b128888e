"""Settings of the selection's kernels that are not the ones in use: `--try` times each beside those."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from vllm.models.qwen4_exp.qsa import score, select, unpaged

#: name -> what is changed for it: module, name, value
DECODE = {
    "32 integers a thread": [(select, "_IN_A_THREAD", 32)],
    "2 stages": [(score, "_DECODE_STAGES", 2)],
    "128 keys": [(score, "_DECODE_KEYS", 128)],
    "4,096 programs": [(score, "_DECODE_PROGRAMS", 4096)],
    "16,384 programs of e4m3": [(score, "_DECODE_PROGRAMS_E4M3", 16384)],
}
PROMPT = {
    "64 rows": [(score, "_PROMPT_ROWS", 64)],
    "16 tiles": [(score, "_PROMPT_TILES", 16)],
    "2 stages": [(score, "_COPY_STAGES", 2)],
    "keys in pages": [(unpaged, "LEAST_ROWS", 1 << 30)],
}


@contextmanager
def applied(changes: list[tuple[object, str, object]]) -> Iterator[None]:
    with ExitStack() as stack:
        for module, name, value in changes:
            stack.enter_context(mock.patch.object(module, name, value))
        yield
