"""Whatever is in the files, what comes out is a finding and no other error."""

from __future__ import annotations

import json
import random
import shutil

import pytest

from tests.ampere.drafts import Draft, first_file
from vllm.ampere.checkpoint import read
from vllm.ampere.finding import Finding
from vllm.ampere.findings import findings
from vllm.ampere.report import summary, text

STRANGE = (None, -1, 0, 3, 10**12, 1.5, "x", [], [1], {}, {"x": 1}, True)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return Draft.mixed().write(tmp_path_factory.mktemp("damage") / "model", files=2)


@pytest.fixture
def model(written, tmp_path):
    return shutil.copytree(written, tmp_path / "model")


def look(path) -> str:
    """Every step of the command; its last line."""
    try:
        checkpoint = read(path)
        found = findings(checkpoint)
        text(summary(checkpoint, found))
    except Finding as finding:
        return str(finding)
    return " ".join(map(str, found))


def paths(document, at=()):
    """Every place of a document, nested ones included."""
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        yield (*at, key)
        if isinstance(value, dict | list):
            yield from paths(value, (*at, key))


def test_strange_values_in_the_config(model) -> None:
    original = (model / "config.json").read_text()
    rng = random.Random(0)
    for path in paths(json.loads(original)):
        for value in rng.sample(STRANGE, 4):
            document = json.loads(original)
            place = document
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            (model / "config.json").write_text(json.dumps(document))
            look(model)


def test_damaged_headers(model) -> None:
    file = first_file(model)
    blob = file.read_bytes()
    length = int.from_bytes(blob[:8], "little")
    rng = random.Random(1)
    noticed = 0
    for _ in range(60):
        damaged = bytearray(blob)
        for _ in range(rng.choice((1, 1, 3, 40))):
            damaged[rng.randrange(8 + length)] = rng.randrange(256)
        file.write_bytes(damaged)
        noticed += bool(look(model))
    # A flipped letter of a tensor's name, or a digit that is the same again, is all that may pass.
    assert noticed > 50


def test_strange_entries_in_a_header(model) -> None:
    file = first_file(model)
    blob = file.read_bytes()
    length = int.from_bytes(blob[:8], "little")
    original = json.loads(blob[8 : 8 + length])
    rng = random.Random(2)
    names = [name for name in original if name != "__metadata__"]
    for name in rng.sample(names, 20):
        for key in ("dtype", "shape", "data_offsets", None):
            header = json.loads(json.dumps(original))
            if key is None:
                header[name] = rng.choice(STRANGE)
            else:
                header[name][key] = rng.choice(STRANGE)
            made = json.dumps(header).encode()
            file.write_bytes(len(made).to_bytes(8, "little") + made)
            assert look(model)


@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_strange_indexes(value, model) -> None:
    index = model / "model.safetensors.index.json"
    for document in (value, {"weight_map": value}, {"weight_map": {"lm_head.weight": value}}):
        index.write_text(json.dumps(document))
        assert look(model)
    (model / "generation_config.json").write_text(json.dumps(value))
    look(model)
