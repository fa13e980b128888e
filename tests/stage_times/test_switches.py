"""Switches are true, false or what they are unless said."""

import pytest

from vllm.config.switches import SWITCHES, SwitchNotBoolean, check_switches, switch


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
