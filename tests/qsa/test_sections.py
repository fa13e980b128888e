"""A context in parts, through an arena that holds one part at a time."""

import pytest
import torch

from vllm.models.qwen4_exp.qsa import reference, sections
from vllm.models.qwen4_exp.qsa.attention import sparse_paged_attention
from vllm.models.qwen4_exp.qsa.formats import BF16, FP8, INT8, views
from vllm.models.qwen4_exp.qsa.launch import WrongInput
from vllm.models.qwen4_exp.qsa.sections import State, section_columns

from .scene import scene, unwritten
from .test_attention import assert_within_floor

FORMATS = [BF16, FP8, INT8]
SIZE = 16


def by_sections(made, pages_at_a_time: int, attend, finish) -> torch.Tensor:
    """All rows, ``pages_at_a_time`` blocks of every request in the arena at once."""
    requests, pages = made.block_table.shape
    stored = made.stored
    last_scale = {"v_scale": stored.pop("v_scale")} if "v_scale" in stored else {}
    state = State.empty(*made.q.shape, made.q.device)
    for page in range(0, pages, pages_at_a_time):
        held = range(page, min(pages, page + pages_at_a_time))
        arena = unwritten(made.form, requests * pages_at_a_time, *made.cache.shape[1:3], made.q.shape[2])
        table = torch.full_like(made.block_table, -1)
        for request in range(requests):
            for slot, held_page in enumerate(held, start=request * pages_at_a_time):
                arena[slot] = made.cache[made.block_table[request, held_page]]
                table[request, held_page] = slot
        kv = views(arena, made.form, made.q.shape[2])
        scales = {"key_scales": kv.key_scales, "value_scales": kv.value_scales} if made.form is INT8 else stored
        columns = section_columns(made.selected, page * SIZE, (page + pages_at_a_time) * SIZE)
        attend(state, made.q, kv.keys, kv.values, made.selected, columns, table, made.token_to_req, **scales)
    return finish(state, torch.full_like(made.q, torch.nan), output_gate=made.gate, **last_scale)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_parts_make_the_whole(form):
    made = scene(form, [60, 2, 0, 33], lengths=[70, 70, 9, 41], width=67)
    got = by_sections(made, 2, sections.attend_section, sections.finish)
    assert_within_floor(got, made)
    want = by_sections(made, 3, reference.attend_section, reference.finish)
    torch.testing.assert_close(want, made.call(reference.sparse_paged_attention), rtol=2**-7, atol=1e-5)


def test_one_section_is_the_ordinary_result():
    """Same columns, same splits: the same bits."""
    made = scene(INT8, [60, 5], width=67)
    got = by_sections(made, 8, sections.attend_section, sections.finish)
    assert torch.equal(got, made.call(sparse_paged_attention, True))


def test_states_are_those_of_the_reference():
    made = scene(FP8, [40, 0], width=40)
    stored = {"k_scale": made.stored["k_scale"]}
    states = [State.empty(*made.q.shape, "cpu") for _ in range(2)]
    columns = torch.tensor([[3, 37], [0, 40]], dtype=torch.int32)
    arguments = (made.q, *made.paged[:2], made.selected, columns, *made.paged[3:])
    for state, module in zip(states, (sections, reference)):
        module.attend_section(state, *arguments, **stored)
    # Of kernels it is rounded up, and whatever it is, the same in both sums.
    raised = states[0].maximum - states[1].maximum
    assert (raised[1] == 0).all() and (raised[0] > -1e-5).all() and (raised[0] < 1).all()
    assert torch.equal(states[0].maximum[0].round(), states[0].maximum[0])
    by = raised.exp2()
    torch.testing.assert_close(states[0].normaliser * by, states[1].normaliser, rtol=2**-11, atol=1e-5)
    torch.testing.assert_close(states[0].accumulator * by[..., None], states[1].accumulator, rtol=2**-9, atol=0.5)


def test_rows_without_columns_are_left_alone():
    made = scene(BF16, [20, 20], width=24)
    state = State.empty(*made.q.shape, "cpu")
    state.accumulator[1], state.normaliser[1] = torch.nan, 7.0
    columns = torch.tensor([[0, 24], [9, 9]], dtype=torch.int32)
    arguments = (made.q, *made.paged[:2], made.selected, columns, *made.paged[3:])
    sections.attend_section(state, *arguments)
    assert state.accumulator[0].isfinite().all() and (state.normaliser[0] > 0).all()
    assert state.accumulator[1].isnan().all() and (state.normaliser[1] == 7.0).all()


def test_columns_of_sections():
    selected = torch.tensor([[2, 5, 8, 9, 4], [0, 1, -1, -1, 2], [-1, -1, -1, -1, 0]], dtype=torch.int32)
    assert section_columns(selected, 0, 5).tolist() == [[0, 1], [0, 2], [0, 0]]
    assert section_columns(selected, 5, 9).tolist() == [[1, 3], [2, 2], [0, 0]]
    assert section_columns(selected, 9, 99).tolist() == [[3, 4], [2, 2], [0, 0]]


def test_state_of_other_rows_is_refused():
    made = scene(BF16, [5], width=8)
    state = State.empty(2, *made.q.shape[1:], "cpu")
    with pytest.raises(WrongInput, match="shape of the state's accumulator"):
        sections.finish(state, made.q.clone(), output_gate=made.gate)
