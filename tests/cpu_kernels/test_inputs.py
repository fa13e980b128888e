"""Inputs of a step: decode and prefill rows in one batch, unused rows, drafts."""

import numpy as np
import pytest
import torch

MAX_REQS, MAX_LEN = 7, 1200
SLOTS = [5, 0, 3, 6]


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    "bounds,mapped,total",
    [((0, 5, 6, 300), 300, 300), ((0, 5, 6, 300), 280, 310), ((0, 4, 4, 9), 9, 9), ((0, 3), 3, 3), ((0, 2, 4), 7, 7)],
)
def test_token_request_mapping(compare, make_case, filled, bounds, mapped, total):
    def build(rng):
        return make_case([i32(*bounds), filled(330), len(bounds) - 1, mapped, total], {"num_warps": 4})

    compare("_token_request_mapping_kernel", ((total + 255) // 256,), build)


@pytest.mark.parametrize("lengths", [(1, 1, 1, 1), (1100, 1, 0, 40)])
def test_positions_and_lengths(compare, make_case, filled, lengths):
    bounds = i32(0, *np.cumsum(lengths))

    def build(rng):
        computed = torch.from_numpy(rng.integers(0, 5000, MAX_REQS, dtype=np.int32))
        args = [filled(1200, dtype=torch.int64), filled(MAX_REQS + 2), i32(*SLOTS), bounds, computed, MAX_REQS]
        return make_case(args, {"BLOCK_SIZE": 1024})

    done = compare("_prepare_pos_seq_lens_kernel", (len(SLOTS) + 1,), build)
    assert done.args[1].tolist()[len(SLOTS) :] == [0, 0, 0, -7777, -7777]


@pytest.mark.parametrize("lookahead", [1, 3])
def test_prefill(compare, make_case, filled, lookahead):
    def build(rng):
        known = torch.from_numpy(rng.integers(1, 500, (MAX_REQS, MAX_LEN), dtype=np.int32))
        # Slot 5 starts a long prompt, 0 decodes, 3 ends its prompt, 6 ends it but for one token.
        prompt, computed = torch.zeros(MAX_REQS, dtype=torch.int32), torch.zeros(MAX_REQS, dtype=torch.int32)
        prompt[SLOTS], computed[SLOTS] = i32(1150, 9, 20, 30), i32(0, 9, 12, 20)
        following = filled(lookahead, MAX_REQS)
        args = [filled(1300), following, following.stride(0), lookahead, i32(*SLOTS), i32(0, 1100, 1101, 1109, 1118)]
        args += [known, known.stride(0), prompt, computed]
        return make_case(args, {"BLOCK_SIZE": 1024, "LOOKAHEAD_BLOCK": 1 if lookahead == 1 else 4})

    done = compare("_prepare_prefill_inputs_kernel", (len(SLOTS),), build)
    assert done.args[1][0, 3] == 0 and done.args[1][0, 6] > 0


@pytest.mark.parametrize("new_tokens, drafts", [(1, 0), (0, 3), (1, 3)])
def test_sampled_and_drafts(compare, make_case, filled, new_tokens, drafts):
    # Row 0 decodes with all drafts, 1 reads its prompt to the last token, 2 has no drafts,
    # 3 ends the prompt within its logits.
    logits = [new_tokens + drafts, new_tokens + drafts, max(new_tokens, 1), new_tokens + drafts]
    lengths = [logits[0], 6, logits[2], logits[3]]

    def build(rng):
        prompt = torch.full((MAX_REQS,), 10, dtype=torch.int32)
        seq_lens = i32(30, 10, 25, 11)
        drafted = torch.from_numpy(rng.integers(1, 500, (MAX_REQS, max(drafts, 1))))
        args = [filled(20), i32(*SLOTS), torch.from_numpy(rng.integers(1, 500, (MAX_REQS, 1)))]
        args += [i32(0, *np.cumsum(lengths)), seq_lens, prompt, drafted, drafted.stride(0)]
        args += [i32(0, *np.cumsum(logits)), filled(sum(logits) + 3, dtype=torch.int64)]
        constants = {"NUM_NEW_SAMPLED_TOKENS": new_tokens, "BLOCK_SIZE": 4 if drafts else 1}
        return make_case(args, constants)

    done = compare("_combine_sampled_and_draft_tokens_kernel", (len(SLOTS),), build)
    assert (done.args[-1][-3:] < 0).all()
