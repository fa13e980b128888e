"""Committed measurements are complete, their claims hold or say that they do not, and pages show nothing else."""

import json

import pytest

from benchmarks import figures, record

RECORDS = sorted(record.FOLDER.glob("*.json"))


def test_there_are_records():
    assert RECORDS


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_a_record_is_complete(path):
    found = record.read(path)
    assert path.name.startswith(tuple(f"{subject}-" for subject in record.SUBJECTS))
    assert set(found) == {"taken", "commit", "upstream", "hardware", "settings", "samples", "claims"}
    assert found["samples"] and found["settings"] and found["hardware"]["cpu"]
    for claim in found["claims"]:
        record.Claim(**claim)


@pytest.mark.parametrize("page", figures.PAGES)
def test_pages_are_what_the_records_say(page):
    assert figures.rendered(page) == (record.ROOT / page).read_text()


def test_a_record_is_written_and_read(tmp_path):
    path = tmp_path / "pipeline-x.json"
    claims = [record.Claim("speed", 6.0, "tokens/s", 5.0, ">=")]
    record.write(path, {"a": 1}, [{"b": 2}], claims, gpus="1 x card")
    found = json.loads(path.read_text())
    assert found["claims"][0]["aim"] == 5.0 and found["hardware"]["gpus"] == "1 x card"
    assert claims[0].holds and not record.Claim("speed", 4.0, "tokens/s", 5.0, ">=").holds


def test_bad_names_and_comparisons_are_refused(tmp_path):
    with pytest.raises(ValueError, match="subject"):
        record.write(tmp_path / "speed.json", {}, [], [])
    with pytest.raises(ValueError, match="'>=' or '<='"):
        record.Claim("speed", 1, "s", 1, "==")


def test_what_ran_beside_is_recorded_when_it_is_given(monkeypatch):
    monkeypatch.delenv("BENCHMARK_BESIDE", raising=False)
    assert "beside" not in record.hardware()
    monkeypatch.setenv("BENCHMARK_BESIDE", "another GPU of the host was busy")
    assert record.hardware()["beside"] == "another GPU of the host was busy"
