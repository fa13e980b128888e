"""PLE's gate and short convolution against upstream's Triton kernels, interpreted."""

import pytest
import torch

from vllm.models.qwen4_exp.common.ops import ple as kernel
from vllm.models.qwen4_exp.cpu import ple as twin

CHANNELS, KERNEL, DILATION, SLOTS = 24, 4, 3, 7
WINDOW = (KERNEL - 1) * DILATION
TOLERANCE = {"rtol": 2**-7, "atol": 1e-5}
NULL = 0


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("tokens, count, width", [(1, 4, 16), (5, 4, 40), (2, 2, 129)])
def test_gate(tokens, count, width):
    arguments = (
        bf16(tokens, count * width),
        bf16(tokens, width),
        bf16(tokens, count * width),
        *(bf16(count * width) for _ in range(3)),
        1e-6,
    )
    got, want = twin.ple_gate(*arguments), kernel.ple_gate(*arguments)
    torch.testing.assert_close(got, want, rtol=2**-6, atol=1e-5)


def test_gate_of_no_agreement_is_one_half():
    key, value, hidden = torch.zeros(2, 8), bf16(2, 4), bf16(2, 8)
    zero = torch.zeros(8).bfloat16()
    gated, _ = twin.ple_gate(key.bfloat16(), value, hidden, zero, zero, zero, 1e-6)
    assert torch.equal(gated, (0.5 * value).repeat(1, 2))


def both(mode, tokens, slots, *, window=WINDOW, residuals=True, **extra):
    """Run twin and kernel on equal copies; compare output and the whole state."""
    inputs, weights = bf16(tokens, CHANNELS), bf16(CHANNELS, KERNEL)
    # A view into a wider pool whose other columns must stay as they are.
    pool = bf16(SLOTS, window + 2, CHANNELS)
    residual, outer = bf16(tokens, CHANNELS), bf16(tokens, CHANNELS)
    results = []
    for module in (twin, kernel):
        state, out = pool.clone(), residual.clone()
        module.ple_conv(
            inputs=inputs.clone(),
            residual=out,
            conv_state=state[:, 2:].transpose(1, 2),
            conv_weights=weights,
            state_indices=torch.tensor(slots, dtype=torch.int32),
            outer_residual=outer if residuals else None,
            mode=mode,
            dilation=DILATION,
            **extra,
        )
        results.append((out, state))
    torch.testing.assert_close(results[0][0], results[1][0], **TOLERANCE)
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][1][:, :2], pool[:, :2])
    untouched = [s for s in range(SLOTS) if s not in slots]
    assert torch.equal(results[0][1][untouched], pool[untouched])


@pytest.mark.parametrize("residuals", [True, False])
@pytest.mark.parametrize("known", [None, [True, False, True]])
def test_decode(residuals, known):
    has_initial = None if known is None else torch.tensor(known)
    both("decode", 3, [4, 2, NULL], residuals=residuals, has_initial_states=has_initial)


def test_decode_of_chosen_rows():
    both("decode", 5, [4, 2], token_indices=torch.tensor([3, 1], dtype=torch.int32))


@pytest.mark.parametrize("lengths", [[1, 12, 3], [9, 8, 10], [20, 1, 0]])
@pytest.mark.parametrize("known", [[True, False, True], [False, False, False]])
def test_prefill(lengths, known):
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    both(
        "prefill",
        int(starts[-1]) + 2,
        [1, 6, 3],
        query_start_loc=starts,
        has_initial_states=torch.tensor(known),
    )


def test_prefill_of_a_null_slot_gives_nothing():
    both(
        "prefill",
        6,
        [NULL, 5],
        query_start_loc=torch.tensor([0, 2, 6], dtype=torch.int32),
        has_initial_states=torch.tensor([True, True]),
    )


@pytest.mark.parametrize("accepted", [[1, 3, 2], [0, 4, 9]])
def test_spec(accepted):
    both(
        "spec",
        8,
        [2, 5, NULL],
        window=WINDOW + 2,
        query_start_loc=torch.tensor([0, 3, 5, 8], dtype=torch.int32),
        num_accepted_tokens=torch.tensor(accepted, dtype=torch.int32),
        spec_query_len=3,
    )


def test_chunks_equal_the_whole():
    """A prompt cut anywhere, the cuts around the window's edge included."""
    inputs, weights = bf16(31, CHANNELS), bf16(CHANNELS, KERNEL)

    def run(*cuts: int) -> tuple[torch.Tensor, torch.Tensor]:
        state = torch.full((2, CHANNELS, WINDOW), torch.nan).bfloat16()
        out = torch.zeros_like(inputs)
        edges = [0, *cuts, 31]
        for begin, end in zip(edges, edges[1:]):
            twin.ple_conv(
                inputs[begin:end],
                out[begin:end],
                state,
                weights,
                torch.tensor([1]),
                None,
                mode="prefill",
                dilation=DILATION,
                query_start_loc=torch.tensor([0, end - begin]),
                has_initial_states=torch.tensor([begin > 0]),
            )
        return out, state[1]

    whole, last = run()
    assert whole.isfinite().all()
    for cut in range(1, 31):
        out, state = run(cut)
        assert torch.equal(out, whole), cut
        assert torch.equal(state, last), cut


def test_a_small_state_is_refused():
    with pytest.raises(ValueError, match="window >= 9"):
        twin.ple_conv(
            bf16(1, CHANNELS),
            bf16(1, CHANNELS),
            bf16(2, CHANNELS, WINDOW - 1),
            bf16(CHANNELS, KERNEL),
            torch.tensor([1]),
            None,
            mode="decode",
            dilation=DILATION,
        )


def test_missing_arguments_are_named():
    arguments = (
        bf16(1, CHANNELS),
        bf16(1, CHANNELS),
        bf16(2, CHANNELS, WINDOW),
        bf16(CHANNELS, KERNEL),
        torch.tensor([1]),
        None,
    )
    with pytest.raises(ValueError, match="prefill needs query_start_loc"):
        twin.ple_conv(*arguments, mode="prefill", dilation=DILATION)
    with pytest.raises(ValueError, match="mode 'other'"):
        twin.ple_conv(*arguments, mode="other", dilation=DILATION)
