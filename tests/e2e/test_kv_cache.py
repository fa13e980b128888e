"""K/V in one byte: greedy tokens are transformers', alone and packed, from the prefix cache, and after preemption.

The tokens of these prompts win by half a logit (prompts.py), ten times what int8 or fp8 K/V changes on this model; how
much that is, is in docs/ampere-multigpu/kv-cache.md.  So equal tokens are due here as they are with bf16 K/V, and
log-probabilities lie within the same bounds.
"""

import pytest

from demo.reference import prompt_logprobs

from .compare import check_answer, check_prompt
from .prompts import decisive

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1000)]

ANSWER = 12
BLOCK = 128


@pytest.fixture(scope="module")
def requests(references):
    """One past a cache block and the indexer's budget, and six whose answers begin in one block and end in the next."""
    model = references("ple-late")
    lengths = [170, *range(BLOCK - 6, BLOCK)]
    return [decisive(model, length, ANSWER, seed=length) for length in lengths]


ALONE, AGAIN, PACKED = range(3)


@pytest.fixture(scope="module")
def int8(requests, run_job):
    """Three stages with a pool that holds six requests of one block, and not of two; index keys in one byte too."""
    asked = [{"prompt": prompt, "length": ANSWER} for prompt, _ in requests]
    return run_job(
        "ple-late",
        [[asked[0] | {"prompt_logprobs": True}], asked[:1], asked[1:]],
        kv_cache_dtype="int8_per_token_head",
        attention_config={"indexer_kv_dtype": "fp8"},
        pipeline_parallel_size=3,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
        max_model_len=2 * BLOCK,
        kv_cache_memory_bytes=3_000_000,
    )


def test_int8_over_three_stages(int8, requests, references, figures):
    (result,) = int8["batches"][ALONE]
    prompt, expected = requests[0]
    largest = check_answer(result, expected)
    difference = check_prompt(result, prompt_logprobs(references("ple-late"), prompt))
    figures("int8 K/V, 3 stages", largest, str(difference))


def test_a_shared_block_brings_its_scales(int8, requests):
    """The block that the prefix cache gives holds codes and scales of the request before."""
    (result,) = int8["batches"][AGAIN]
    index_keys = {dtype for name, dtype in int8["stored"].items() if name.endswith(".compressed_key_cache")}
    assert index_keys == {"torch.float8_e4m3fn"}
    assert int8["block_size"] == BLOCK and result["cached"] == BLOCK
    check_answer(result, requests[0][1])
    (before,) = int8["batches"][ALONE]
    assert result["tokens"] == before["tokens"]


def test_preempted_requests_end_as_they_would_have(int8, requests):
    results = int8["batches"][PACKED]
    again = [sum(result["chunks"]) > len(prompt) + ANSWER for result, (prompt, _) in zip(results, requests[1:])]
    assert any(again), "no request was preempted, so nothing was tried"
    for result, (_, expected) in zip(results, requests[1:], strict=True):
        check_answer(result, expected)


def test_our_kernels_interpreted(checkpoint, references, run_job, figures):
    """fp8 in the second sparse layer and bf16 in the first, by the kernels that GPUs get."""
    model = references("ple-early")
    prompt, expected = decisive(model, 20, 4, seed=20)
    done = run_job(
        "ple-early",
        [[{"prompt": prompt, "length": 4, "prompt_logprobs": True}]],
        kv_cache_dtype="fp8",
        kv_cache_dtype_skip_layers=["3"],
        qsa_config={"kernels": "ours"},
        enable_prefix_caching=False,
    )
    ((result,),) = done["batches"]
    largest = check_answer(result, expected)
    difference = check_prompt(result, prompt_logprobs(model, prompt))
    figures("fp8 and bf16 K/V, our kernels interpreted", largest, str(difference))
