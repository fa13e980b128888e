"""Rows of a record that are not measured again."""

import pytest

from benchmarks import formats_cpu, record


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "commit", lambda: "old")
    samples = [{"recipe": recipe} for recipe in ("mix", "nvfp4", "mix")]
    record.write(tmp_path / "formats-test.json", {"note": "beside others"}, samples, [])
    monkeypatch.setattr(record, "commit", lambda: "new")
    return tmp_path / "formats-test.json"


def test_they_stay(path):
    rows, commits, beside = formats_cpu.kept(path, ["nvfp4"])
    assert rows == [{"recipe": "mix"}] * 2
    assert commits == "old..new" and beside == {"note": "beside others; nvfp4 at new"}


def test_not_beside_rows_of_another_processor(path, monkeypatch):
    monkeypatch.setattr(record, "hardware", lambda: {"cpu": "another"})
    with pytest.raises(SystemExit, match="measure all of it"):
        formats_cpu.kept(path, ["nvfp4"])
