"""`vllm ampere check` as a command: output, exit status, colour, and upstream's command line around it."""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.ampere.cases import CASES
from tests.ampere.drafts import Draft
from vllm.ampere.command import main
from vllm.ampere.report.style import paint
from vllm.ampere.sampling import SAMPLING_KEYS
from vllm.entrypoints.cli import ampere


@pytest.fixture
def sound(tmp_path) -> str:
    return str(Draft().write(tmp_path / "model"))


@pytest.fixture
def broken(tmp_path) -> str:
    CASES["SharedTarget"](tmp_path / "broken")
    return str(tmp_path / "broken")


def test_sound(sound, capsys) -> None:
    assert main(["check", sound]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Verdict: ok"


def test_warnings_do_not_fail(tmp_path, capsys) -> None:
    CASES["SamplingUnsaid"](tmp_path / "model")
    assert main(["check", str(tmp_path / "model")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Verdict: warnings (1 warning)"


def test_refused(broken, capsys) -> None:
    assert main(["check", broken]) == 1
    out = capsys.readouterr().out
    assert "refused: SharedTarget" in out and out.splitlines()[-1] == "Verdict: refused (1 refusal)"


def test_nothing_there_is_one_line(tmp_path, capsys) -> None:
    assert main(["check", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "config.json" in captured.err


def test_json(broken, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    assert main(["check", broken, "--json", "-pp", "2", "--repair", str(out)]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["verdict"] == "refused" and len(made["stages"]) == 2
    assert made["repair"]["verdict"] == "ok" and made["repair"]["out"] == str(out)
    assert main(["check", str(out), "--json"]) == 0


def test_json_where_there_is_nothing(tmp_path, capsys) -> None:
    assert main(["check", str(tmp_path), "--json"]) == 1
    made = json.loads(capsys.readouterr().out)
    assert made["verdict"] == "refused" and made["findings"][0]["name"] == "NoSuchCheckpoint"


def test_a_partition_says_how_many_stages(sound, capsys) -> None:
    assert main(["check", sound, "--json", "--partition", "1,2,1"]) == 0
    assert [stage["last_layer"] for stage in json.loads(capsys.readouterr().out)["stages"]] == [0, 2, 3]


@pytest.mark.parametrize(
    "options, word",
    [
        (["--partition", "3,3"], "would work"),
        (["-pp", "0"], "at least 1"),
        (["--sampling", "{}"], "--repair"),
        (["--sampling", '{"heat": 1}', "--repair", "OUT"], "temperature"),
        (["--sampling", "{", "--repair", "OUT"], "--sampling {"),
        (["--repair", "."], "not empty"),
    ],
)
def test_usage(options, word, sound, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.setattr(sys, "argv", ["vllm"])
    try:
        status = main(["check", sound, *options])
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    assert status == 2 and word in captured.err and captured.out == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "stream, environment, coloured",
    [
        (Terminal, {}, True),
        (io.StringIO, {}, False),
        (Terminal, {"NO_COLOR": "1"}, False),
        (Terminal, {"TERM": "dumb"}, False),
    ],
    ids=["terminal", "file", "NO_COLOR", "dumb"],
)
def test_colour_only_on_a_terminal(stream, environment, coloured, monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert ("\033[" in paint(stream())("refused", "red")) is coloured


def test_the_keys_are_those_that_upstream_takes() -> None:
    from vllm.config import ModelConfig

    tree = ast.parse(textwrap.dedent(inspect.getsource(ModelConfig.get_diff_sampling_param)))
    (listed,) = (
        ast.literal_eval(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "available_params"
    )
    assert sorted(SAMPLING_KEYS) == sorted(listed)


def test_as_a_subcommand_of_vllm(broken) -> None:
    """The console script's own entry: its status, its output, and that it did not wait for the engine's imports."""
    code = (
        "import atexit, sys\n"
        "heavy = ('vllm.engine.arg_utils', 'vllm.config')\n"
        "atexit.register(lambda: print('engine', [name for name in heavy if name in sys.modules], file=sys.stderr))\n"
        "from vllm.entrypoints.cli.main import main\n"
        f"sys.argv = ['vllm', 'ampere', 'check', {broken!r}]\n"
        "main()"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("VLLM_PLE_MMAP_PATH", None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1] == "Verdict: refused (1 refusal)"
    assert "engine []" in done.stderr


def test_behind_other_options_of_vllm(broken, capsys) -> None:
    """`vllm` hands the rest of the line over as it is, options of ours included."""
    parser = argparse.ArgumentParser(prog="vllm")
    subparsers = parser.add_subparsers(dest="subparser")
    (command,) = ampere.cmd_init()
    command.subparser_init(subparsers)
    assert "vllm ampere check" in parser.format_help()
    with pytest.raises(SystemExit) as stop:
        command.cmd(parser.parse_args(["ampere", "check", broken, "--json"]))
    assert stop.value.code == 1 and json.loads(capsys.readouterr().out)["verdict"] == "refused"
