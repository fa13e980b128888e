"""JSON options and their dotted flags, through the parser that `vllm serve` builds.

Each case says whether upstream alone gets it right; one test holds that against the parser with our call taken out,
so a case that upstream comes to handle shows itself.
"""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass

import pytest

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils import config_options
from vllm.utils.argparse_utils import FlexibleArgumentParser

CC = "--compilation-config"


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    """`vllm` with its `serve` subcommand."""
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    return parser


@pytest.fixture
def upstream_alone(monkeypatch):
    monkeypatch.setattr(config_options, "merge_config_options", lambda parser, args: args)


def serve(parser, *args: str) -> Namespace:
    return parser.parse_args(["serve", "some/model", *args])


def found(namespace: Namespace, expected: dict) -> dict:
    """What the parsed config holds at the keys of `expected`; nested ones only where expected, for the defaults."""
    values = {key: getattr(namespace.compilation_config, key) for key in ("mode", "cudagraph_capture_sizes", *expected)}
    for key, value in expected.items():
        if isinstance(value, dict):
            values[key] = {inner: values[key].get(inner) for inner in value}
    return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True)
class Case:
    args: tuple[str, ...]
    expected: dict
    upstream_too: bool = False


SIZES = {"cudagraph_capture_sizes": [1, 2]}
BOTH = {"mode": 0, **SIZES}
FORMS = {
    "json, then dotted": Case((CC, '{"mode": 0}', f"{CC}.cudagraph_capture_sizes", "[1,2]"), BOTH),
    "dotted, then json": Case((f"{CC}.cudagraph_capture_sizes", "[1,2]", CC, '{"mode": 0}'), BOTH),
    "json with =": Case((f'{CC}={{"mode": 0}}', f"{CC}.cudagraph_capture_sizes=[1,2]"), BOTH),
    "underscores": Case(("--compilation_config", '{"mode": 0}', f"{CC}.cudagraph_capture_sizes", "[1,2]"), BOTH),
    "short, then long": Case(("-cc", '{"mode": 0}', f"{CC}.cudagraph_capture_sizes", "[1,2]"), BOTH),
    "long, then short": Case((CC, '{"mode": 0}', "-cc.cudagraph_capture_sizes", "[1,2]"), BOTH),
    "dotted flags of two spellings": Case(("-cc.mode", "0", f"{CC}.cudagraph_capture_sizes", "[1,2]"), BOTH),
    "abbreviated": Case(("--compilation-conf", '{"mode": 0}', f"{CC}.cudagraph_capture_sizes", "[1,2]"), BOTH),
    "list elements": Case(
        (CC, '{"mode": 0, "compile_sizes": [1]}', f"{CC}.compile_sizes+", "cudagraph_capture_sizes"),
        {"mode": 0, "compile_sizes": [1, "cudagraph_capture_sizes"]},
    ),
    "beside -O": Case(("-O3", CC, '{"mode": 0}', f"{CC}.cudagraph_capture_sizes", "[1,2]"), BOTH),
    "nested keys": Case(
        (CC, '{"inductor_compile_config": {"a": 1}}', f"{CC}.inductor_compile_config.b", "2", f"{CC}.mode", "0"),
        {"mode": 0, "inductor_compile_config": {"a": 1, "b": 2}},
    ),
    "json alone": Case((CC, json.dumps(BOTH)), BOTH, upstream_too=True),
    "dotted alone": Case((f"{CC}.mode", "0", f"{CC}.cudagraph_capture_sizes", "[1,2]"), BOTH, upstream_too=True),
    "last json counts": Case((CC, '{"mode": 3}', CC, json.dumps(BOTH)), BOTH, upstream_too=True),
    "last json and dotted": Case(
        (CC, '{"cudagraph_mode": "FULL"}', CC, '{"mode": 0}', f"{CC}.cudagraph_capture_sizes", "[1,2]"), BOTH
    ),
    "conflict, dotted last": Case(
        (CC, '{"mode": 0, "cudagraph_capture_sizes": [8]}', f"{CC}.cudagraph_capture_sizes", "[1,2]"), BOTH
    ),
    "conflict, json last": Case((f"{CC}.mode", "3", CC, json.dumps(BOTH)), BOTH),
    "no json after all": Case((CC, "{}", f"{CC}.mode", "0"), {"mode": 0}, upstream_too=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_nothing_vanishes(parser, form):
    case = FORMS[form]
    assert found(serve(parser, *case.args), case.expected) == case.expected


@pytest.mark.parametrize("form", FORMS)
def test_which_forms_upstream_loses_values_of(parser, upstream_alone, form):
    case = FORMS[form]
    assert (found(serve(parser, *case.args), case.expected) == case.expected) is case.upstream_too


CONFIG_FILES = {
    "mapping": "compilation-config:\n  mode: 0\n  cudagraph_capture_sizes: [8]\n",
    "json text": 'compilation_config: \'{"mode": 0, "cudagraph_capture_sizes": [8]}\'\n',
    "dotted": "compilation-config.mode: 0\ncompilation-config.cudagraph_capture_sizes: '[8]'\n",
}


@pytest.mark.parametrize("written", CONFIG_FILES)
@pytest.mark.parametrize(
    "flag", [(f"{CC}.cudagraph_capture_sizes", "[1,2]"), (CC, json.dumps(SIZES))], ids=["dotted", "json"]
)
def test_the_command_line_wins_over_a_config_file(parser, tmp_path, written, flag):
    """Before --config on the command line and after it; a JSON value replaces one of the file, as any option does."""
    file = tmp_path / "serve.yaml"
    file.write_text(CONFIG_FILES[written])
    from_file = ("--config", str(file))
    for args in ((*from_file, *flag), (*flag, *from_file)):
        config = serve(parser, *args).compilation_config
        both_dotted = written == "dotted" and flag[0] != CC
        # Upstream adds the lists of repeated dotted flags.
        assert config.cudagraph_capture_sizes == ([8, 1, 2] if both_dotted else [1, 2])
        replaced = written != "dotted" and flag[0] == CC
        assert config.mode == (None if replaced else 0)


def test_other_options_that_take_json(parser):
    args = serve(
        parser,
        *("--hf-overrides", '{"a.b": 1, "text_config": {"rope": {"factor": 2}}}'),
        *("--hf-overrides.text_config.rope.theta", "1e6"),
        *("--limit-mm-per-prompt", '{"image": 1}'),
        *("--limit-mm-per-prompt.video", "0"),
        *("-sc.num_speculative_tokens", "2"),
        *("--speculative-config", '{"method": "mtp"}'),
    )
    assert args.hf_overrides == {"a.b": 1, "text_config": {"rope": {"factor": 2, "theta": 1e6}}}
    assert args.limit_mm_per_prompt == {"image": 1, "video": 0}
    assert args.speculative_config == {"num_speculative_tokens": 2, "method": "mtp"}


def test_the_rest_of_the_line_stays(parser):
    args = serve(
        parser, "--port", "8001", CC, '{"mode": 0}', "-pp", "3", f"{CC}.cudagraph_capture_sizes", "[1,2]", "-O2"
    )
    assert (args.port, args.pipeline_parallel_size, args.optimization_level) == (8001, 3, "2")
    assert args.model_tag == "some/model"


def test_a_value_that_was_overruled_is_named(parser, caplog_vllm):
    serve(parser, CC, '{"mode": 3}', f"{CC}.mode", "0", f"{CC}.cudagraph_mode", "NONE")
    assert f"{CC}.mode" in caplog_vllm.text
    assert "cudagraph_mode" not in caplog_vllm.text


def test_equal_values_are_no_conflict(parser, caplog_vllm):
    serve(parser, CC, '{"mode": 0}', f"{CC}.mode", "0")
    assert not caplog_vllm.text


@pytest.mark.parametrize("option", [CC, "--hf-overrides"])
@pytest.mark.parametrize("text", ['{"mode": 0', "3", "[1]", "text"])
def test_flags_beside_something_else_than_an_object_are_refused(parser, capsys, option, text):
    """Upstream drops such a value of --hf-overrides, which may also be a name, in silence."""
    with pytest.raises(SystemExit):
        serve(parser, option, text, f"{option}.mode", "0")
    message = capsys.readouterr().err
    assert f"argument {option}" in message and text in message and f"{option}.*" in message


def test_invalid_json_alone_is_still_refused_by_upstream(parser, capsys):
    with pytest.raises(SystemExit):
        serve(parser, CC, "{mode")
    assert "Invalid JSON" in capsys.readouterr().err


@pytest.mark.parametrize("nothing", ["", "None"])
def test_flags_beside_no_value(parser, nothing):
    args = serve(parser, "--speculative-config", nothing, "--speculative-config.method", "mtp")
    assert args.speculative_config == {"method": "mtp"}


def test_a_flag_without_its_value_is_reported(parser, capsys):
    with pytest.raises(SystemExit):
        serve(parser, f"{CC}.mode", "0", CC)
    assert "expected one argument" in capsys.readouterr().err
