"""What is measured: a format of K/V, and whose kernels write and read it.  Imports no vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.side_by_side import engine_arguments


@dataclass(frozen=True)
class Variant:
    """`kernels` is a value of `--qsa-config kernels`; "stock" calls upstream's own, unchanged."""

    name: str
    cache_dtype: str
    kernels: str

    def engine(self, cpu: bool) -> dict[str, Any]:
        """Arguments of `LLM`. On a CPU the references run, whose rates say nothing; it is for trying the program."""
        return {"kv_cache_dtype": self.cache_dtype} | ({} if cpu else {"qsa_config": {"kernels": self.kernels}})


#: In the order of their runs. The first comes again as the last: how far apart those two are is what noise and the
#: card's temperature do.
VARIANTS = [
    Variant("bf16 stock", "auto", "upstream"),
    Variant("int8 ours", "int8_per_token_head", "ours"),
    Variant("fp8 ours", "fp8", "ours"),
    Variant("bf16 ours", "auto", "ours"),
    Variant("fp8 stock", "fp8", "upstream"),
    Variant("bf16 stock again", "auto", "upstream"),
]
BASE, AGAIN = VARIANTS[0].name, VARIANTS[-1].name


def chosen(names: list[str] | None, cpu: bool) -> list[Variant]:
    """Those of `names`, or all; on a CPU those that need no GPU. Raises ValueError: there is no such variant."""
    known = {variant.name: variant for variant in VARIANTS}
    if unknown := [name for name in names or [] if name not in known]:
        raise ValueError(f"no variant {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in names or known if not cpu or known[name].kernels == "ours"]


#: Tokens of prompts in a step.
CHUNK = 2048


def arguments(contexts: list[int], users: list[int], counted: int, cpu: bool) -> dict[str, Any]:
    """Arguments of `LLM` that all variants share; `counted` as in rates.py."""
    shared = engine_arguments(max(contexts), max(users), CHUNK, counted, gpu=not cpu)
    return shared | (
        {"kv_cache_memory_bytes": 256 << 20} if cpu else {"load_format": "dummy", "kv_cache_memory_bytes": 40 << 30}
    )
