"""A real engine on two stages: its parts answer, and their phases sum to their steps and to the interval."""

import json
import os
import subprocess
import sys

import pytest

from demo.checkpoint import build
from demo.checkpoint.geometry import geometry

TOKENS = 12
STAGE = {
    "wait",
    "deserialise",
    "update",
    "prepare",
    "inputs",
    "attention",
    "model inputs",
    "forward",
    "output",
    "tokens",
    "answer",
}


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("host_time")
    build(folder / "model", geometry("tiny"), seed=0)
    out = folder / "pipeline-host-time.json"
    command = [sys.executable, "-m", "benchmarks.host_time", folder / "model", "--stages", "2", "--users", "2"]
    command += ["--tokens", str(TOKENS), "--out", out]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=500, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(out.read_text())["samples"]


def phases(samples, part, step):
    return {sample["phase"]: sample for sample in samples if (sample["part"], sample["step"]) == (part, step)}


@pytest.mark.e2e
def test_parts_sum_and_none_is_missing(samples):
    parts = {sample["part"] for sample in samples}
    # Without asynchronous scheduling, as on a CPU, a stage has no thread for its answers.
    assert parts == {"engine core", "stage 0", "stage 1"}
    for part, step in {(sample["part"], sample["step"]) for sample in samples}:
        found = phases(samples, part, step)
        whole = found.pop("whole")
        # Figures are rounded to 0.1 us.
        assert sum(phase["total_ms"] for phase in found.values()) == pytest.approx(whole["total_ms"], abs=0.01)
    first, last = phases(samples, "stage 0", "decode"), phases(samples, "stage 1", "decode")
    # The first stage answers nothing: the engine core reads the last one's answer.
    assert STAGE - {"answer"} | {"send on"} <= first.keys()
    assert STAGE | {"receive", "sample"} <= last.keys()
    # Both users decode in one micro-batch or in two; either way each stage sees the same ones.
    assert TOKENS - 1 <= first["whole"]["count"] == last["whole"]["count"] <= 2 * (TOKENS - 1)
    core = phases(samples, "engine core", "decode")
    assert {"schedule", "send", "update"} <= core.keys() and core["whole"]["count"] == first["whole"]["count"]
