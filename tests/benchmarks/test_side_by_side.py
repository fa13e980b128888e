"""Engines in processes of their own: what a child is asked, and what is left of one that fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.host_kv_rates import __main__ as host_kv_rates
from benchmarks.kv_rates import __main__ as kv_rates
from benchmarks.side_by_side import child, engine_arguments, part_of, run_child


@pytest.mark.parametrize(
    ("parse", "program", "more", "own"),
    [
        (kv_rates.parse, "benchmarks.kv_rates one", "counted", "benchmarks.kv_rates"),
        (host_kv_rates.arguments, "benchmarks.host_kv_rates child", "chunk", "benchmarks.host_kv_rates"),
    ],
)
@pytest.mark.parametrize("source", [["--config", "c.json"], ["--model", "m"]])
def test_a_child_is_asked_what_the_program_was_asked(parse, program, more, own, source):
    given = ["--layers", "3", "--experts", "7", "--contexts", "16,32", "--users", "1,2", f"--{more}", "11"]
    asked = parse(["run", "out.json", *source, *given])
    python, _, module, *words = child(program, Path("part.json"), "a variant", asked, (more,))
    assert (python, module) == (sys.executable, own)
    got = vars(parse(words))
    expected = vars(asked) | {"what": program.split()[1], "out": Path("part.json")}
    assert got.pop("variants") in ("a variant", ["a variant"])
    expected.pop("variants")
    assert got == expected


def script(path: Path, text: str) -> list[str]:
    """A child that has `part` to write to and `sys`."""
    return [sys.executable, "-c", f"import sys, time; part = {str(path)!r}\n{text}"]


WRITES = 'open(part, \'w\').write(\'{"samples": [{"rate": 1, "gaps_ms": [2]}]}\')'


@pytest.mark.parametrize(
    ("text", "limit", "samples", "failed"),
    [
        (WRITES, 60, 1, None),
        (WRITES + "\nsys.exit('it burns')", 60, 1, "status 1"),
        ("print('it burns'); sys.exit(3)", 60, None, "status 3"),
        (WRITES + "\nprint('it burns', flush=True); time.sleep(60)", 2, 1, "stopped after 2 s"),
    ],
)
def test_a_child_that_fails_leaves_its_samples_and_the_end_of_its_log(tmp_path, capfd, text, limit, samples, failed):
    out = tmp_path / "raw.json"
    part = part_of(out, "bf16 stock")
    part.write_text("of an earlier run")
    found, how = run_child(script(part, text), out, "bf16 stock", limit)
    assert how == failed
    assert (found and len(found["samples"])) == samples
    said = capfd.readouterr().out
    assert ("it burns" in said) == (failed is not None)
    assert ('{"rate": 1}' in said) == (samples is not None)
    assert not list(tmp_path.iterdir())


def test_the_environment_keeps_the_engine_in_the_child(tmp_path):
    out = tmp_path / "raw.json"
    write = "import os, json; json.dump({'env': os.environ['VLLM_ENABLE_V1_MULTIPROCESSING']}, open(part, 'w'))"
    found, _ = run_child(script(part_of(out, "a"), write), out, "a", 60)
    assert found == {"env": "0"}


def test_a_prompt_and_what_is_asked_beside_it_fit_the_model():
    given = engine_arguments(256_000, 8, 2048, 96, gpu=True)
    assert 256_000 + 8 * 256_000 // 2048 + 96 < given["max_model_len"] < 262_144
    assert given["compilation_config"]["cudagraph_capture_sizes"] == [1, 2, 4, 8]
    assert "compilation_config" not in engine_arguments(256_000, 8, 2048, 96, gpu=False)
    json.dumps(given)
