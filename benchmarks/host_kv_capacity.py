"""Tokens that a KV cache holds with K/V in host memory, by cards and partition, from the planner's functions.

    python -m benchmarks.host_kv_capacity    write docs/ampere-multigpu/benches/host-kv-capacity.json

No GPU, no model: the planner that the server runs, on the published model's shapes. A card is a pipeline stage.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from benchmarks.record import FOLDER, Claim, write
from tests.host_kv.planning import HostPlan, is_rows
from tests.pipeline_parallel.geometry import BLOCK, CONTEXT, Sizes, layer_specs, text_config
from tests.pipeline_parallel.planner import Plan, bytes_per_block, engine_config
from vllm.models.qwen4_exp.stages import plan_stages
from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec

PATH = FOLDER / "host-kv-capacity.json"
MB, GIB = 1_000_000, 1 << 30
#: stages, partition, memory of each stage for its KV cache in MB
CASES = [
    (2, None, 400), (2, None, 1000), (3, None, 400), (3, None, 550), (3, "17,16,15", 400), (3, None, 1000),
    (4, None, 400), (4, None, 1000), (6, None, 400), (6, None, 550), (8, None, 400),
]  # fmt: skip
#: What the scheme that this follows reaches at 400 MB, and its block: the aim of the claims.
FOLLOWED = {3: 12_144, 6: 24_288}


def case(stages: int, partition: str | None, megabytes: int) -> dict:
    """One row: the plan of a cache of so many MB on every stage."""
    plan = HostPlan(stages, megabytes * MB, partition, context=BLOCK)
    states = len(plan.groups) - 1
    narrow = HostPlan(stages, megabytes * MB, partition, context=BLOCK, index_keys="fp8")
    per_request = -(-CONTEXT // plan.block) + states
    int8 = HostPlan(stages, megabytes * MB, partition, context=BLOCK, cache_dtype="int8_per_token_head")
    return {
        "stages": stages,
        "partition": partition or "even",
        "mb": megabytes,
        "block_tokens": plan.block,
        "blocks": plan.blocks,
        "state_blocks": states,
        "tokens": plan.tokens,
        "tokens_fp8_index_keys": narrow.tokens,
        "full_contexts": (plan.blocks - 1) // per_request,
        "host_gib_bf16": round(sum(map(plan.host_bytes, range(stages))) / GIB, 2),
        "host_gib_int8": round(sum(map(int8.host_bytes, range(stages))) / GIB, 2),
        "tokens_in_vram": tokens_in_vram(stages, partition, megabytes * MB),
    }


def tokens_in_vram(stages: int, partition: str | None, memory: int) -> int:
    """Tokens of one request whose bf16 K/V stay on the GPUs, in as much memory."""
    plan = Plan(text_config(), stages, partition, memory=64 * GIB)
    blocks = memory // max(bytes_per_block(worker) for worker in plan.workers)
    return max(0, blocks - len(plan.groups)) * BLOCK


def followed(stages: int, memory: int = 400 * MB) -> int:
    """The same for 66 bytes a token and layer: a place of 2 bytes a token, blocks just short of a state, upstream's
    groups."""
    config = engine_config(stages)
    config.model_config.max_model_len = config.model_config.original_max_model_len = BLOCK
    sizes = Sizes(block=FOLLOWED[stages], padded_page=None)
    place = FullAttentionSpec(block_size=sizes.block, num_kv_heads=1, head_size=1, dtype=torch.uint8)
    specs = [
        {
            name: replace(place) if is_rows(spec) else spec
            for name, spec in layer_specs(text_config(), stage.layers, sizes).items()
        }
        for stage in plan_stages(text_config(), stages)
    ]
    groups = get_global_kv_cache_groups(config, specs)
    workers = get_kv_cache_configs(config, specs, [memory] * stages, groups)
    return (workers[0].num_blocks - len(groups)) * sizes.block


def claims(samples: list[dict]) -> list[Claim]:
    found = []
    for stages in FOLLOWED:
        (mine,) = [s for s in samples if (s["stages"], s["partition"], s["mb"]) == (stages, "even", 400)]
        found.append(Claim(f"tokens at 400 MB, {stages} stages", mine["tokens"], "tokens", followed(stages), ">="))
    return found


def main() -> None:
    # No options; but whoever asks for them must not find the record rewritten.
    argparse.ArgumentParser(
        prog="python -m benchmarks.host_kv_capacity", description=__doc__.splitlines()[0]
    ).parse_args()
    samples = [case(*some) for some in CASES]
    settings = {
        "command": "python -m benchmarks.host_kv_capacity",
        "geometry": "published, bf16 index keys where none are named, TP=1",
    }
    write(PATH, settings, samples, claims(samples))


if __name__ == "__main__":
    main()
