"""Sampling parameters and log-probabilities, on vocabularies that do not fill a block."""

import numpy as np
import pytest
import torch

TOKENS, REQS = 4, 5
SLOTS = torch.tensor([3, 0, 1, 2], dtype=torch.int32)
VOCABS = [37, 1024, 2500]


def make_logits(rng, vocab: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    """A slice of wider rows: what lies between two rows must not change."""
    wide = torch.from_numpy(rng.standard_normal((TOKENS, vocab + 9), dtype=np.float32) * 3).to(kind)
    wide[:, [0, vocab - 1]] = float("-inf")
    return wide


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_temperature(compare, make_case, vocab, kind):
    def build(rng):
        logits = make_logits(rng, vocab, kind)
        values = torch.tensor([0.7, 1.0, 0.0, 3.3, 9.9])
        return make_case([logits, logits.stride(0), SLOTS, values, vocab], {"BLOCK_SIZE": 1024})

    compare("_temperature_kernel", (TOKENS, -(-vocab // 1024)), build)


@pytest.mark.parametrize("vocab", VOCABS)
def test_min_p(compare, make_case, vocab):
    def build(rng):
        logits = make_logits(rng, vocab)
        values = torch.tensor([0.05, 0.0, 1.0, 0.3, 0.9])
        return make_case([logits, logits.stride(0), SLOTS, values, vocab], {"BLOCK_SIZE": 1024})

    compare("_min_p_kernel", (TOKENS,), build)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("positions", [(0, 0, 0, 0), (0, 1, 2, 3)])
def test_penalties(compare, make_case, vocab, positions):
    def build(rng):
        logits = make_logits(rng, vocab)
        mask = torch.from_numpy(rng.integers(-(2**31), 2**31, (REQS, -(-vocab // 32)), dtype=np.int32))
        counts = torch.from_numpy(rng.integers(0, 3, (REQS, vocab), dtype=np.int32))
        tokens = torch.tensor([3, 8, 8, 1], dtype=torch.int32)
        args = [logits, logits.stride(0), SLOTS, tokens, torch.tensor(positions, dtype=torch.int32)]
        args += [torch.tensor([1.3, 1.0, 1.0, 0.8, 1.0]), torch.tensor([0.0, 0.2, 0.0, 0.1, 0.0])]
        args += [torch.tensor([0.0, -0.5, 0.0, 1.5, 0.0]), mask, mask.stride(0), counts, counts.stride(0), vocab]
        return make_case(args, {"BLOCK_SIZE": 1024})

    compare("_penalties_kernel", (TOKENS, -(-vocab // 1024)), build)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_log_probabilities(compare, make_case, filled, vocab, kind):
    def build(rng):
        logits = make_logits(rng, vocab, kind)
        ids = torch.from_numpy(rng.integers(0, vocab, (TOKENS, 3)))
        ids[0, 0] = 0  # log-probability -inf
        args = [filled(TOKENS, 3, dtype=torch.float32), logits, logits.stride(0), ids, ids.stride(0), 3, vocab]
        return make_case(args, {"BLOCK_SIZE": 1024, "TOPK_BLOCK_SIZE": 4})

    compare("_topk_log_softmax_kernel", (TOKENS,), build)


@pytest.mark.parametrize("vocab", VOCABS)
def test_ranks(compare, make_case, filled, vocab):
    def build(rng):
        logits = make_logits(rng, vocab, torch.bfloat16)
        ids = torch.tensor([0, 5, 7, int(logits[3, :vocab].argmax())])
        args = [filled(TOKENS, dtype=torch.int64), logits, logits.stride(0), ids, vocab]
        return make_case(args, {"BLOCK_SIZE": 1024})

    done = compare("_ranks_kernel", (TOKENS,), build)
    assert done.args[0][3] == 1


@pytest.mark.parametrize("use_k", [False, True])
@pytest.mark.parametrize("use_p", [False, True])
def test_top_k_top_p(use_k, use_p):
    """Against the definition, token by token: the interpreter cannot run this kernel."""
    from vllm.v1.worker.cpu.kernels.logits import apply_top_k_top_p

    logits = torch.from_numpy(np.random.default_rng(3).standard_normal((3, 53), dtype=np.float32) * 2)
    k, p = [4, 53, 20], [0.5, 0.8, 1.0]
    kept = apply_top_k_top_p(
        logits.clone(),
        torch.tensor(k, dtype=torch.int32) if use_k else None,
        torch.tensor(p) if use_p else None,
    )
    for row, scores in enumerate(logits.double()):
        order = scores.argsort(descending=True)[: k[row] if use_k else 53]
        shares = scores[order].softmax(0)
        # A token stays while those before it have less than the share p.
        stays = shares.cumsum(0) - shares < (p[row] if use_p else 2.0)
        wanted = torch.full_like(logits[row], float("-inf"))
        wanted[order[stays]] = logits[row][order[stays]]
        assert torch.equal(kept[row], wanted)


def test_other_mask_is_refused():
    from vllm.v1.worker.cpu.kernels.logits import apply_top_k_top_p

    with pytest.raises(NotImplementedError, match="mask with -inf on CPU, not with -1"):
        apply_top_k_top_p(torch.zeros(1, 4), torch.tensor([2]), None, mask_value=-1.0)
