"""The sampler's noise must be the kernel's to the bit: a seed promises the same tokens."""

import numpy as np
import pytest
import torch

TOKENS, REQS, BLOCK = 4, 5, 1024
SLOTS = [3, 0, -1, 2]
TEMPERATURES = [0.7, 1.0, 1.9, 0.0, 1.0]


def i64(rng, low: int, high: int, size: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(low, high, size))


def arguments(rng, filled, vocab: int, fp64: bool, kind: torch.dtype, cache=None, block=BLOCK):
    blocks = -(-vocab // block)
    logits = torch.from_numpy(rng.standard_normal((TOKENS, vocab + 5), dtype=np.float32)).to(kind)[:, :vocab]
    logits[0, [1, vocab - 1]] = 9.0  # a tie
    logits[:, vocab // 3] = float("-inf")
    argmax = filled(TOKENS + 1, blocks, dtype=torch.int64)[:TOKENS]
    best = filled(TOKENS + 1, blocks, dtype=torch.float64 if fp64 else torch.float32)[:TOKENS]
    cached, column, source = cache(logits) if cache else (None, None, None)
    strides = cached.stride()[:2] if cache else (0, 0)
    args = [argmax, blocks, best, blocks, cached, *strides, column, source, source.stride(0) if cache else 0]
    args += [logits, logits.stride(0), torch.tensor(SLOTS, dtype=torch.int32), i64(rng, -(2**62), 2**62, REQS)]
    return args + [i64(rng, 0, 2**20, TOKENS), torch.tensor(TEMPERATURES), vocab]


@pytest.mark.parametrize("vocab", [37, 2048, 3001])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fp64", [False, True])
@pytest.mark.parametrize("drafting,scaled", [(False, True), (True, False)])
def test_sample(compare, make_case, filled, vocab, kind, fp64, drafting, scaled):
    def build(rng):
        constants = {"BLOCK_SIZE": BLOCK, "IS_DRAFTING": drafting, "APPLY_TEMPERATURE": scaled}
        args = arguments(rng, filled, vocab, fp64, kind)
        return make_case(args, constants | {"USE_FP64": fp64, "PER_TOKEN_COL": False})

    compare("_gumbel_sample_kernel", (TOKENS, -(-vocab // BLOCK)), build)


@pytest.mark.parametrize("fp64", [False, True])
def test_noise_of_every_token(compare, make_case, filled, fp64):
    """In blocks of one token each maximum is a logit with its noise, winner or not."""

    def build(rng):
        args = arguments(rng, filled, 151, fp64, torch.float32, block=1)
        constants = {"BLOCK_SIZE": 1, "IS_DRAFTING": False, "APPLY_TEMPERATURE": True}
        return make_case(args, constants | {"USE_FP64": fp64, "PER_TOKEN_COL": False})

    compare("_gumbel_sample_kernel", (TOKENS, 151), build)


@pytest.mark.parametrize("per_token", [False, True])
def test_sample_keeps_draft_logits(compare, make_case, filled, per_token):
    def cache(logits):
        column = torch.tensor([2, 0, 1, 2] if per_token else 1)
        return filled(REQS, 3, 1300, dtype=torch.bfloat16), column, logits * 2

    def build(rng):
        constants = {"BLOCK_SIZE": BLOCK, "IS_DRAFTING": True, "APPLY_TEMPERATURE": True, "USE_FP64": False}
        args = arguments(rng, filled, 1201, False, torch.bfloat16, cache)
        return make_case(args, constants | {"PER_TOKEN_COL": per_token})

    done = compare("_gumbel_sample_kernel", (TOKENS, 2), build)
    cached = done.args[4]
    assert cached[..., 1201:].isnan().all() and cached[1].isnan().all(), "columns and slots of others"


def test_nan_never_wins(compare, make_case, filled):
    def build(rng):
        args = arguments(rng, filled, 37, False, torch.float32)
        args[10][:, 5] = float("nan")
        constants = {"BLOCK_SIZE": BLOCK, "IS_DRAFTING": False, "APPLY_TEMPERATURE": True}
        return make_case(args, constants | {"USE_FP64": False, "PER_TOKEN_COL": False})

    done = compare("_gumbel_sample_kernel", (TOKENS, 1), build)
    assert (done.args[0] != 5).all()


def test_noise_is_gumbel():
    """Mean and variance over a million draws: Euler's constant and pi^2 / 6, to 4 sigma."""
    from vllm.v1.worker.cpu.kernels.gumbel import noise32, noise64

    for noise in (noise32, noise64):
        drawn = noise(1234567, 89, np.arange(1_000_000)).astype(np.float64)
        assert np.isfinite(drawn).all()
        assert abs(drawn.mean() - np.euler_gamma) < 4 * np.pi / np.sqrt(6e6)
        assert abs(drawn.var() - np.pi**2 / 6) < 0.02
