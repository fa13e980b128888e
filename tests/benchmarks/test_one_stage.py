"""How far an answer is decided, so that no other cut of its prompt may turn it."""

import pytest

from benchmarks.one_stage import CUTS, WHOLE, decided, joined

NEAR_TIE = 0.25


def answer(tokens, gaps, **cuts):
    return {"tokens": tokens, "gaps": gaps, "cuts": {name: {"tokens": t, "gaps": g} for name, (t, g) in cuts.items()}}


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        pytest.param(([1, 2, 3], [1.0, 1.0, 1.0]), 3, id="all agree"),
        pytest.param(([1, 9, 3], [1.0, 0.9, 1.0]), 1, id="another token"),
        pytest.param(([1, 2, 3], [1.0, 1.0, 0.2]), 2, id="a near tie under this cut only"),
        pytest.param(([1, 2, 3], [1.0, 0.4, 1.0]), 1, id="moved by more than it is ahead"),
        pytest.param(([1, 2, 3], [1.0, 0.6, 1.0]), 3, id="moved by less than it is ahead"),
    ],
)
def test_decided(cut, expected):
    found = answer([1, 2, 3], [1.0, 1.0, 1.0], a=([1, 2, 3], [1.0, 1.0, 1.0]), b=cut)
    assert decided(found, NEAR_TIE) == expected


def test_a_near_tie_of_the_whole_prompt_ends_it():
    whole = ([1, 2, 3], [1.0, 0.2, 1.0])
    assert decided(answer(*whole, a=whole), NEAR_TIE) == 1


def test_answers_of_each_cut_become_one_list():
    answers = {size: [{"tokens": [size, job], "gaps": [1.0, 1.0]} for job in (0, 1)] for size in (WHOLE, *CUTS)}
    for job, found in enumerate(joined(answers)):
        assert found["tokens"] == [WHOLE, job]
        assert {size: cut["tokens"] for size, cut in found["cuts"].items()} == {str(size): [size, job] for size in CUTS}
