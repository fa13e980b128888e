"""What cuts do to answers, counted."""

import torch

from benchmarks.cut_noise import first_other, moved, otherwise


def run(tokens, gaps):
    return {"tokens": tokens, "gaps": gaps}


def test_only_choices_before_a_turned_one_count_as_moved():
    answers = [
        run([1, 2, 3], [1.0, 0.5, 1.0]) | {"cuts": {"300": run([1, 9, 3], [0.75, 0.1, 9.0])}},
        run([4], [2.0]) | {"cuts": {"300": run([4], [2.0])}},
    ]
    found = moved(answers)
    assert (found["choices"], found["largest"]) == (2, 0.25)
    assert (found["answers that a cut turns"], found["turned when ahead by at most"]) == (1, 0.5)


def test_first_other():
    assert first_other(run([1, 2], []), run([1, 3], [])) == 1
    assert first_other(run([1, 2], []), run([1, 2], [])) == 2


def test_groups_that_are_selected_otherwise():
    mine = torch.tensor([[0, 3, 5], [0, 1, -1], [2, 3, 4]])
    theirs = torch.tensor([[0, 3, 5], [0, 1, -1], [1, 3, 6]])
    assert otherwise(mine, theirs).tolist() == [0, 0, 2]
