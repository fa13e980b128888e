"""What is compared: arguments of the engine, and which measurements each variant makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MIB, GIB = 1 << 20, 1 << 30
#: A 24 GB card, less what CUDA and the driver take, and the weights of the fullest of three stages (seed figures).
CARD_BYTES, WEIGHT_BYTES = int(23.55 * GIB), int(21.71 * GIB)


@dataclass(frozen=True)
class Variant:
    """One engine.

    Attributes:
        engine: arguments beside those that all have
        kv_bytes: memory for the KV cache on the GPU; on a CPU a small one is taken
        decode: measure decoding by context and users
        prompt: length of a single prompt, to measure what it takes; 0 for none
        card: hold memory to what a 24 GB card has beside its weights

    """

    engine: dict[str, Any] = field(default_factory=dict)
    kv_bytes: int = GIB
    decode: bool = True
    prompt: int = 0
    card: bool = False


#: 8 users at 250,000 tokens need 15.3 GiB of bf16; what is not given is not page-locked.
HOST_GIB = 18.0


def _host(arena: int = 96 * MIB, **more: Any) -> dict[str, Any]:
    return {"qsa_config": {"kv_offload": True, "kv_offload_max_gib": HOST_GIB, "arena_bytes": arena}} | more


VARIANTS = {
    # 8 x 250,000 tokens of 4 layers are 15.3 GiB of K/V.
    "vram": Variant(kv_bytes=20 * GIB),
    "host": Variant(_host()),
    "vram-int8": Variant({"kv_cache_dtype": "int8_per_token_head"}, kv_bytes=12 * GIB),
    "host-int8": Variant(_host(kv_cache_dtype="int8_per_token_head")),
    **{f"arena-{size}": Variant(_host(size * MIB), decode=False, prompt=130_000) for size in (24, 96, 384)},
    "share": Variant(
        _host(max_num_batched_tokens=512), kv_bytes=400_000_000, decode=False, prompt=262_128, card=True
    ),
}  # fmt: skip
