"""How answers of GPUs are compared with transformers'."""

from __future__ import annotations

from benchmarks.gpu_parity import CASES, NEAR_TIE, NEAR_TIES, compared

WANTED = {"17": {"tokens": [5, 6, 7, 8], "margins": [2.0, 0.3, 2.0, 2.0]}}


def test_a_choice_that_one_byte_keys_may_turn_ends_the_comparison():
    row = {"tokens": {"17": [5, 9, 9, 9]}, "seconds": 1.0}
    assert compared(dict(row), WANTED, {})["result"] == "DIFFERENT"
    turned = compared(dict(row), WANTED, {"kv_cache_dtype": "int8_per_token_head"})
    assert (turned["result"], turned["compared"], turned["near_tie"]) == ("equal", {"17": 1}, 0.5)
    assert "tokens" not in turned


def test_a_case_that_ended_badly_keeps_what_it_said():
    assert compared({"result": "exit 1", "errors": ["x"]}, WANTED, {}) == {"result": "exit 1", "errors": ["x"]}


def test_formats_with_a_tie_of_their_own_are_measured():
    formats = {arguments.get("kv_cache_dtype") for _, _, arguments in CASES.values()}
    assert formats == {None, *NEAR_TIES} and all(tie > NEAR_TIE for tie in NEAR_TIES.values())
