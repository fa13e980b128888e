"""What a step keeps of requests whose logits are not numbers."""

import pytest
import torch

import vllm  # noqa: F401  first: it switches the interpreter on, which Triton's first import asks for
from vllm.v1.worker.gpu.sample import damaged_logits
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.withheld import withhold


def rows() -> torch.Tensor:
    """Whole, masked, one NaN, one +infinity, all NaN of either sign; a slice whose surroundings are NaN."""
    wide = torch.full((6, 9001), torch.nan)
    logits = wide[:, 1:9000]
    logits[:] = torch.randn(logits.shape)
    logits[1, 3:] = -torch.inf
    logits[2, 8998] = torch.nan
    logits[3, 0] = torch.inf
    logits[4] = torch.nan
    logits[5] = -torch.nan
    return logits


WANT = [0, 0, 1, 1, 8999, 8999]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_what_counts(kind):
    """In torch, as on a CPU, and by the kernel."""
    logits = rows().to(kind)
    counted = damaged_logits.count_damaged(logits)
    assert counted.tolist() == WANT and counted.dtype == torch.int32
    counts = torch.zeros(6, dtype=torch.int32)
    damaged_logits.count(logits, counts)
    assert counts.tolist() == WANT


def test_both_samplers_count_so():
    from vllm.v1.worker.gpu.sample import sampler
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    assert sampler.get_num_nans is rejection_sampler.get_num_nans is damaged_logits.count_damaged


def output(num_nans, num_sampled) -> SamplerOutput:
    sampled = torch.tensor(num_sampled, dtype=torch.int32)
    nans = None if num_nans is None else torch.tensor(num_nans, dtype=torch.int32)
    return SamplerOutput(torch.zeros(len(num_sampled), 3).long(), None, nans, sampled, torch.zeros_like(sampled))


def test_a_damaged_request_sampled_nothing():
    step = output([0, 4, 0, 1], [1, 1, 0, 0])
    withhold(step, torch.arange(5, dtype=torch.int32))
    assert step.num_sampled.tolist() == [1, 0, 0, 0]
    assert step.num_nans.tolist() == [0, 4, 0, 1]


def test_drafts_count_for_their_request():
    """Three rows, one, none (a rank that owns no logits of it), two: any of them ends what was accepted."""
    step = output([0, 0, 5, 0, 2, 1], [3, 1, 0, 2])
    withhold(step, torch.tensor([0, 3, 4, 4, 6], dtype=torch.int32))
    assert step.num_sampled.tolist() == [0, 1, 0, 0]
    assert step.num_nans.tolist() == [5, 0, 0, 3]
    assert step.num_sampled.dtype == step.num_nans.dtype == torch.int32


def test_nothing_happens_where_nobody_counts():
    step = output(None, [1, 2])
    withhold(step, torch.tensor([0, 1, 3], dtype=torch.int32))
    assert step.num_sampled.tolist() == [1, 2] and step.num_nans is None
