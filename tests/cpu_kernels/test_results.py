"""What sampled tokens change: several tokens a step, requests that ended, unread prompts."""

import numpy as np
import pytest
import torch

MAX_REQS, MAX_LEN, VOCAB = 7, 64, 50
SLOTS = [5, 0, -1, 6]


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_sampled_and_rejected(compare, make_case, filled):
    def build(rng):
        prompt = torch.full((MAX_REQS,), 10, dtype=torch.int32)
        seq_lens = i32(9, 10, 11, 30, -1)
        counts, rejected = i32(1, 1, 2, 3, -1), filled(5)
        return make_case([counts, rejected, seq_lens, i32(0, 1, 2, 6, 9), i32(5, 0, 3, 6), prompt], {})

    done = compare("_get_num_sampled_and_rejected_kernel", (4,), build)
    assert done.args[0].tolist() == [0, 1, 2, 3, -1]
    assert done.args[1].tolist() == [0, 0, 2, 0, -7777]


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("bounds", [i32(0, 5, 6, 7, 9), None])
@pytest.mark.parametrize("drafts", [0, 2])
def test_post_update(compare, make_case, filled, counts, bounds, drafts):
    def build(rng):
        bins = torch.zeros(MAX_REQS, VOCAB, dtype=torch.int32) if counts else None
        sampled = torch.from_numpy(rng.integers(0, VOCAB, (4, 3)))
        sampled[0] = 7  # the same token three times
        known = filled(MAX_REQS, MAX_LEN)
        totals = torch.from_numpy(rng.integers(1, 40, MAX_REQS, dtype=np.int32))
        args = [i32(*SLOTS), torch.from_numpy(rng.integers(0, 40, MAX_REQS, dtype=np.int32))]
        args += [filled(MAX_REQS, 1, dtype=torch.int64), bins, VOCAB if counts else 0, sampled, 3]
        args += [i32(3, 0, 2, 1), i32(0, 0, 1, 2), bounds, known, MAX_LEN, totals]
        if drafts:
            args += [torch.from_numpy(rng.integers(0, VOCAB, (4, drafts))), filled(MAX_REQS, drafts, dtype=torch.int64)]
        else:
            args += [None, None]
        return make_case([*args, drafts], {"num_warps": 1})

    done = compare("_post_update_kernel", (4,), build)
    if counts:
        assert done.args[3][5, 7] == 3


def test_num_computed_tokens(compare, make_case):
    def build(rng):
        computed = torch.from_numpy(rng.integers(0, 40, MAX_REQS, dtype=np.int32))
        return make_case([i32(5, 0, 6), computed, i32(0, 5, 5, 9)], {})

    compare("_post_update_num_computed_tokens_kernel", (3,), build)


def test_num_accepted(compare, make_case, filled):
    def scatter(rng):
        return make_case([i32(*SLOTS), i32(3, 0, 2, 1), filled(MAX_REQS)], {})

    def fill(rng):
        return make_case([i32(*SLOTS), filled(MAX_REQS), 4], {})

    done = compare("_scatter_num_accepted_kernel", (4,), scatter)
    assert done.args[2].tolist() == [1, -7777, -7777, -7777, -7777, 3, 1]
    compare("_fill_num_accepted_kernel", (4,), fill)
