"""Where a prompt was cut, from what the scheduler wrote."""

import json

from benchmarks.recorded_cuts import Histories


def histories(tmp_path, steps, jobs):
    path = tmp_path / "cuts"
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    return Histories(path, jobs)


def test_chunks_of_one_request(tmp_path):
    found = histories(tmp_path, [{"1-ab": [0, 100]}, {"1-ab": [100, 28]}, {"1-ab": [128, 5]}], {"1": 0})
    assert found["1"] == [(100, 128)]


def test_a_cached_beginning_has_the_cuts_of_whoever_computed_it(tmp_path):
    steps = [
        {"1-a": [0, 100], "2-a": [0, 256], "4-a": [0, 60]},
        {"1-a": [100, 156]},
        {"3-a": [256, 40]},
    ]
    # 2 has the same prompt in one chunk; 4 has another prompt.
    assert histories(tmp_path, steps, {"1": 0, "2": 0, "3": 0, "4": 1})["3"] == [(256,), (100, 256)]


def test_who_did_not_come_so_far_is_none_of_them(tmp_path):
    steps = [{"1-a": [0, 100]}, {"2-a": [0, 128]}, {"3-a": [128, 40]}]
    assert histories(tmp_path, steps, {"1": 0, "2": 0, "3": 0})["3"] == [(128,)]


def test_a_preempted_request_begins_again(tmp_path):
    steps = [{"1-a": [0, 100]}, {"1-a": [100, 100]}, {"1-a": [0, 150]}, {"1-a": [150, 50]}]
    assert histories(tmp_path, steps, {"1": 0})["1"] == [(150,)]


def test_a_request_that_shares_nothing_explains_none_of_the_others(tmp_path):
    steps = [{"1-a": [0, 128]}, {"2-a": [0, 64]}, {"2-a": [64, 64]}, {"3-a": [128, 40]}]
    prompts = {"1": (0, None), "2": (0, "2"), "3": (0, None)}
    assert histories(tmp_path, steps, prompts)["3"] == [(128,)]
