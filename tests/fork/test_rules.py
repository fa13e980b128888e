"""A rule file that is not what it has to be, one test per way."""

from __future__ import annotations

import pytest
import yaml

from fork import rules
from fork.errors import RuleFormatError

GOOD = {
    "id": "one",
    "language": "Python",
    "message": "m",
    "note": "n",
    "rule": {"pattern": "a"},
    "fix": "b",
    "metadata": {"near_miss": "c"},
}


def load(tmp_path, text):
    path = tmp_path / "x.py.yml"
    path.write_text(text)
    return rules.load(path, "topic", "x.py")


def test_defaults(tmp_path):
    (rule,) = load(tmp_path, yaml.safe_dump(GOOD)).rules
    assert (rule.id, rule.count, rule.near_miss) == ("one", 1, "c")


@pytest.mark.parametrize("key", sorted(GOOD))
def test_every_key_is_required(tmp_path, key):
    with pytest.raises(RuleFormatError, match=f"lacks {key}"):
        load(tmp_path, yaml.safe_dump({k: v for k, v in GOOD.items() if k != key}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"severity": "off"}, "has severity"),
        ({"fixx": "b"}, "has fixx"),
        ({"language": "Rust"}, "language 'Rust'"),
        ({"note": " "}, "empty note"),
        ({"metadata": {}}, "lacks metadata.near_miss"),
        ({"metadata": {"near_miss": ""}}, "lacks metadata.near_miss"),
        ({"metadata": {"near_miss": "c", "times": 2}}, "times"),
        ({"metadata": {"near_miss": "c", "count": 0}}, "count 0"),
        ({"metadata": {"near_miss": "c", "count": True}}, "count True"),
        ({"metadata": ["c"]}, "metadata other than"),
    ],
)
def test_refusals(tmp_path, change, message):
    with pytest.raises(RuleFormatError, match=message) as caught:
        load(tmp_path, yaml.safe_dump(GOOD | change))
    assert "x.py.yml" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"), [("a: [", "not YAML"), ("# none\n", "no rule"), ("- a\n", "not a mapping")]
)
def test_unreadable(tmp_path, text, message):
    with pytest.raises(RuleFormatError, match=message):
        load(tmp_path, text)
