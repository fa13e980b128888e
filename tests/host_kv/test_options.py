"""--qsa-config: values, environment variables, and what kv_offload does not go with."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm.config.qsa import ALIASES, DEFAULT_ARENA_BYTES, QSAConfig, QSAConfigRefused, offloads_kv, resolve_qsa_config
from vllm.engine.arg_utils import EngineArgs
from vllm.models.qwen4_exp.qsa.host_kv.errors import KVOffloadRefused
from vllm.models.qwen4_exp.qsa.host_kv.settings import check_settings
from vllm.platforms.interface import Platform
from vllm.utils.argparse_utils import FlexibleArgumentParser


def resolve(given: dict | None, environ: dict | None = None, architecture="Qwen4ExpForCausalLM") -> QSAConfig | None:
    config = SimpleNamespace(
        qsa_config=None if given is None else QSAConfig(**given),
        model_config=SimpleNamespace(architecture=architecture),
    )
    for _ in range(2):  # repeated when a VllmConfig is copied
        resolve_qsa_config(config, environ or {})
    return config.qsa_config


def test_nothing_named_is_upstreams_behaviour():
    assert resolve(None) is None
    assert not offloads_kv(SimpleNamespace(qsa_config=None))
    assert not offloads_kv(SimpleNamespace(qsa_config=resolve({"kv_offload": False})))


def test_defaults():
    assert resolve({"kv_offload": True}) == QSAConfig(True, None, DEFAULT_ARENA_BYTES)


def test_environment_stands_for_fields():
    environ = dict(VLLM_QSA_KV_OFFLOAD="1", VLLM_QSA_KV_OFFLOAD_MAX_GIB="56", VLLM_QSA_KVO_ARENA="100663296")
    assert set(environ) == set(ALIASES)
    assert resolve(None, environ) == QSAConfig(True, 56.0, 100663296)
    # What the option says comes first, field by field.
    assert resolve({"kv_offload_max_gib": 40}, environ) == QSAConfig(True, 40.0, 100663296)
    assert resolve(None, {"VLLM_QSA_KV_OFFLOAD": "0"}) == QSAConfig(False)
    assert resolve(None, {"VLLM_QSA_KV_OFFLOAD": ""}) is None


@pytest.mark.parametrize("variable", ALIASES)
def test_vllm_knows_the_variables(monkeypatch, variable):
    """Else they count, are called unknown in a warning, and stop a server that takes no unknown ones."""
    monkeypatch.setenv(variable, "1")
    for other in set(os.environ) - set(ALIASES):
        if other.startswith("VLLM_"):
            monkeypatch.delenv(other)
    Platform.validate_environ(hard_fail=True)
    monkeypatch.setenv("VLLM_QSA_KV_OFFLOADS", "1")
    with pytest.raises(ValueError, match="VLLM_QSA_KV_OFFLOADS"):
        Platform.validate_environ(hard_fail=True)


@pytest.mark.parametrize(
    ("given", "environ", "named"),
    [
        ({"kv_offload": True, "arena_bytes": 100}, {}, "arena_bytes=100"),
        ({"kv_offload": True, "kv_offload_max_gib": 0}, {}, "kv_offload_max_gib=0"),
        ({"kv_offload": True, "kv_offload_max_gib": float("nan")}, {}, "kv_offload_max_gib=nan"),
        ({"arena_bytes": 1 << 20}, {}, "no effect without kv_offload"),
        (None, {"VLLM_QSA_KV_OFFLOAD_MAX_GIB": "56"}, "no effect without kv_offload"),
        (None, {"VLLM_QSA_KV_OFFLOAD": "yes"}, "VLLM_QSA_KV_OFFLOAD='yes'"),
        (None, {"VLLM_QSA_KV_OFFLOAD": "1", "VLLM_QSA_KVO_ARENA": "96M"}, "VLLM_QSA_KVO_ARENA='96M'"),
    ],
)
def test_wrong_values_are_refused(given, environ, named):
    with pytest.raises(QSAConfigRefused, match=named):
        resolve(given, environ)


def test_another_model_is_refused():
    with pytest.raises(QSAConfigRefused, match="not for Qwen3NextForCausalLM"):
        resolve({"kv_offload": True}, architecture="Qwen3NextForCausalLM")
    assert resolve({"kv_offload": False}, architecture="Qwen3NextForCausalLM").kv_offload is False


def test_the_command_line_takes_json_and_dotted_flags():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given = ["--qsa-config", '{"kv_offload": true, "arena_bytes": 100663296}', "--qsa-config.kv_offload_max_gib", "56"]
    assert EngineArgs.from_cli_args(parser.parse_args(given)).qsa_config == QSAConfig(True, 56.0, 100663296)
    assert EngineArgs(model="x", qsa_config={"kv_offload": True}).qsa_config == QSAConfig(True)
    assert "host memory" in QSAConfig.__doc__ or "--qsa-config" in parser.format_help()


def settings(**changes) -> SimpleNamespace:
    fields = dict(
        qsa_config=QSAConfig(kv_offload=True),
        speculative_config=None,
        kv_transfer_config=None,
        model_config=SimpleNamespace(enable_sleep_mode=False),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    return SimpleNamespace(**(fields | changes))


def test_settings_that_go_with_it_pass():
    check_settings(settings())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speculative_config": SimpleNamespace(method="mtp")}, "--speculative-config"),
        ({"kv_transfer_config": SimpleNamespace(kv_connector="OffloadingConnector")}, "--kv-offloading-size"),
        ({"model_config": SimpleNamespace(enable_sleep_mode=True)}, "--enable-sleep-mode"),
        ({"parallel_config": SimpleNamespace(data_parallel_size=2)}, r"--data-parallel-size \(2\), .* Run a server"),
    ],
)
def test_settings_that_do_not_are_refused(changes, named):
    with pytest.raises(KVOffloadRefused, match=named):
        check_settings(settings(**changes))
    check_settings(settings(**changes, qsa_config=None))


def test_the_page_lists_what_can_be_set():
    page = (Path(__file__).parents[2] / "docs/ampere-multigpu/host-kv.md").read_text()
    for variable, field in ALIASES.items():
        assert f"| `{field}` | `{variable}` |" in page
    assert f"| {DEFAULT_ARENA_BYTES} |" in page
