"""Settings of the selection's kernels that are not the ones in use: `--try` times each beside those."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from vllm.models.qwen4_exp.qsa import select

#: name -> what is changed for it: module, name, value
SETTINGS = {
    "16 integers a thread": [(select, "_IN_A_THREAD", 16)],
    "64 integers a thread": [(select, "_IN_A_THREAD", 64)],
}


@contextmanager
def applied(changes: list[tuple[object, str, object]]) -> Iterator[None]:
    with ExitStack() as stack:
        for module, name, value in changes:
            stack.enter_context(mock.patch.object(module, name, value))
        yield
