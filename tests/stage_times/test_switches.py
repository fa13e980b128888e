"""Switches are true, false or what they are unless said."""

import pytest

from vllm.config.switches import ELSEWHERE, SWITCHES, SwitchNotBoolean, UnknownSwitch, check_switches, switch
from vllm.engine.verified_checkpoint import KEY as CHECKPOINT_KEY
from vllm.v1.core.sched.pipeline_options import KEY as SCHEDULER_KEY


@pytest.mark.parametrize("key", SWITCHES)
@pytest.mark.parametrize("config", [{}, {"other": 1}, None, object()])
def test_unsaid(key, config):
    assert switch(config, key) is SWITCHES[key]


@pytest.mark.parametrize("key", SWITCHES)
def test_said(key):
    assert switch({key: True}, key) is True and switch({key: False}, key) is False


@pytest.mark.parametrize("key", SWITCHES)
@pytest.mark.parametrize("value", [1, "true", {}, None])
def test_anything_else_is_refused(key, value):
    with pytest.raises(SwitchNotBoolean, match=f"{key}.*expected true or false"):
        check_switches({key: value})


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("quiet_step", "quiet_steps"),
        ("late-receive", "late_receive"),
        ("stagetimes", "stage_times"),
        ("pipeline_sheduler", "pipeline_scheduler"),
        ("checkpoint_checks", "checkpoint_check"),
    ],
)
def test_a_misspelt_key_is_refused(written, meant):
    with pytest.raises(UnknownSwitch, match=f"'{written}', which nothing reads; write '{meant}'"):
        check_switches({"stage_times": True, written: False})


def test_keys_of_others_pass():
    """Upstream's own, and what a platform may read."""
    others = ("gdn_prefill_backend", "kda_prefill_backend", "decode_backend", "scheduler", "checkpoint", "steps")
    check_switches(dict.fromkeys((*others, *ELSEWHERE), 1))
    assert set(ELSEWHERE) == {CHECKPOINT_KEY, SCHEDULER_KEY}
