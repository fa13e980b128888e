"""A number of tensor-parallel ranks that the workers would stop at is refused while the configuration is built."""

from types import SimpleNamespace

import pytest

from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.models.qwen4_exp.tensor_ranks import TensorRanksNotServed, check_tensor_ranks, layouts, undivided

from .geometry import text_config


def configured(ranks: int, stages: int = 1, whole_experts: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text_config()),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks, pipeline_parallel_size=stages, enable_expert_parallel=whole_experts
        ),
    )


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (1, 3), (2, 1), (2, 3), (4, 2), (8, 1)])
def test_served(ranks, stages):
    check_tensor_ranks(configured(ranks, stages))


@pytest.mark.parametrize(
    ("ranks", "stages", "sentence"),
    [
        (
            3,
            1,
            "--tensor-parallel-size 3 does not divide linear_num_key_heads=16, shared_expert_intermediate_size=640, "
            "moe_intermediate_size=640, num_key_value_heads=2 of the model's layers; for 3 cards "
            "--pipeline-parallel-size 3 would work",
        ),
        (
            3,
            2,
            "; for 6 cards --pipeline-parallel-size 6 or --tensor-parallel-size 2 --pipeline-parallel-size 3 would work",
        ),
        (5, 1, "does not divide num_attention_heads=24, linear_num_key_heads=16, linear_num_value_heads=48, num_key"),
    ],
)
def test_refused(ranks, stages, sentence):
    with pytest.raises(TensorRanksNotServed) as refusal:
        check_tensor_ranks(configured(ranks, stages))
    assert sentence in str(refusal.value)


def test_experts_that_stay_whole_need_no_division():
    text = text_config(moe_intermediate_size=650)
    assert undivided(text, 4, whole_experts=False) == ["moe_intermediate_size=650"]
    assert undivided(text, 4, whole_experts=True) == []


def test_heads_are_repeated_only_evenly():
    """Three heads on two ranks, or two on three, would be in none of them as in the others."""
    for heads, ranks, served in ((3, 2, False), (4, 2, True), (2, 4, True), (3, 4, False)):
        uneven = undivided(text_config(num_key_value_heads=heads), ranks, whole_experts=False)
        assert (not uneven) is served, (heads, ranks, uneven)


def test_layouts_are_those_that_pass():
    text = text_config()
    assert layouts(text, 8, whole_experts=False) == [
        "--pipeline-parallel-size 8",
        "--tensor-parallel-size 2 --pipeline-parallel-size 4",
        "--tensor-parallel-size 4 --pipeline-parallel-size 2",
        "--tensor-parallel-size 8",
    ]
    assert "--pipeline-parallel-size 96" not in " ".join(layouts(text, 96, whole_experts=False)), "48 layers"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_it_is_what_upstream_asserts_of_experts(ranks):
    """Its own arithmetic of an expert's share, or the next thing that it reads. Drop this part of the check if it pads."""
    text = text_config()
    made = SimpleNamespace(
        intermediate_size=text.moe_intermediate_size, moe_parallel_config=SimpleNamespace(tp_size=ranks)
    )
    refused = any("moe_intermediate_size" in name for name in undivided(text, ranks, whole_experts=False))
    with pytest.raises(AssertionError if refused else AttributeError):
        FusedMoEConfig.__post_init__(made)
