"""Whether host_file_gather is on, and the sentences with which it refuses."""

from types import SimpleNamespace

import pytest

from vllm import envs
from vllm.config import EngramConfig, LoadConfig
from vllm.models.qwen4_exp.ple_store import settings
from vllm.models.qwen4_exp.ple_store.errors import HostFileGatherRefused


def resolve(engram: dict, architecture="Qwen4ExpForCausalLM", ubatching=False, text_config=None, **load):
    """The settings as resolved for a model on this platform."""
    config = SimpleNamespace(
        engram_config=EngramConfig(**engram),
        load_config=LoadConfig(**load),
        parallel_config=SimpleNamespace(
            use_ubatching=ubatching, ubatch_size=2 if ubatching else 0, distributed_executor_backend="mp", nnodes=1
        ),
    )
    model = SimpleNamespace(architecture=architecture, hf_text_config=SimpleNamespace(**(text_config or {})))
    settings.resolve_host_file_gather(config, model)
    settings.resolve_host_file_gather(config, model)  # a draft model's config repeats it
    return config.engram_config


@pytest.fixture
def platform(monkeypatch):
    """``platform("cuda", pins=True)``: pretend to be there."""

    def pretend(name: str, pins: bool) -> None:
        fake = SimpleNamespace(device_name=name, is_cuda=lambda: name == "cuda", is_cpu=lambda: name == "cpu")
        monkeypatch.setattr(settings, "current_platform", fake)
        monkeypatch.setattr(settings, "is_pin_memory_available", lambda: pins)

    return pretend


@pytest.mark.parametrize(
    ("name", "pins", "engram", "expected"),
    [
        ("cuda", True, {}, False),
        ("cuda", False, {}, True),  # WSL
        ("cpu", False, {}, True),
        ("cpu", False, {"cpu_offload": False}, False),
        ("cpu", False, {"cpu_offload": False, "host_file_gather": False}, False),
        ("cuda", True, {"host_file_gather": False}, False),
        ("cuda", True, {"host_file_gather": True}, True),
        ("rocm", False, {}, False),
    ],
)
def test_default(platform, name, pins, engram, expected):
    platform(name, pins)
    assert resolve(engram).host_file_gather is expected


def test_other_models_keep_upstreams_behaviour(platform):
    platform("cpu", False)
    assert resolve({}, architecture="DeepseekV41ForCausalLM").host_file_gather is False


def test_replicas_have_no_table_to_share(platform):
    platform("cuda", True)
    assert resolve({"host_file_gather": True}).dp_shared_memory is False
    assert resolve({}).dp_shared_memory is None  # upstream's to decide


@pytest.mark.parametrize(
    ("engram", "rest", "sentence"),
    [
        ({"dp_shared_memory": True}, {}, "dp_shared_memory=True shares a table in memory"),
        ({"use_thp": True}, {}, "use_thp=True is about the pages"),
        ({"embedding_across_dp": True}, {}, "embedding_across_dp=True splits the table"),
        ({"cpu_offload": False}, {}, "cpu_offload=False puts the whole table on the device.* Leave one of the two out"),
        ({}, {"ubatching": True}, "--enable-dbo / --ubatch-size=2 runs parts of a batch"),
        ({}, {"architecture": "DeepseekV41ForCausalLM"}, "is for Qwen4Exp models, not for DeepseekV41ForCausalLM"),
        ({}, {"safetensors_load_strategy": "eager"}, "strategy='eager' reads whole files.*Use lazy or prefetch"),
        ({}, {"safetensors_load_strategy": "torchao"}, "strategy='torchao' reads whole files"),
        ({}, {"model_loader_extra_config": {"enable_multithread_load": True}}, "enable_multithread_load=True loads"),
    ],
)
def test_refusals(platform, engram, rest, sentence):
    platform("cuda", True)
    with pytest.raises(HostFileGatherRefused, match=sentence):
        resolve({"host_file_gather": True, **engram}, **rest)


@pytest.mark.parametrize(
    "load_format",
    "fastsafetensors instanttensor runai_streamer runai_streamer_sharded tensorizer gguf pt npcache "
    "sharded_state mistral modelexpress ipc_cache".split(),
)
def test_load_formats_that_would_read_the_table(platform, load_format):
    platform("cuda", True)
    with pytest.raises(HostFileGatherRefused, match=f"--load-format='{load_format}' does not .*pinned memory"):
        resolve({"host_file_gather": True}, load_format=load_format)
    platform("cpu", False)  # the remedy must work where it is given
    with pytest.raises(HostFileGatherRefused, match='"host_file_gather": false, "cpu_offload": false'):
        resolve({}, load_format=load_format)


@pytest.mark.parametrize("load_format", ["auto", "hf", "safetensors", "dummy"])
def test_load_formats_that_do_not(platform, load_format):
    platform("cuda", True)
    assert resolve({"host_file_gather": True}, load_format=load_format).host_file_gather


def test_prefetching_is_allowed(platform):
    platform("cuda", True)
    assert resolve({"host_file_gather": True}, safetensors_load_strategy="prefetch").host_file_gather


def test_platform_without_a_store(platform):
    platform("rocm", True)
    with pytest.raises(HostFileGatherRefused, match="is for CUDA and the CPU, not for rocm"):
        resolve({"host_file_gather": True})


def test_a_pinned_table_without_pinned_memory(platform):
    platform("cpu", False)
    with pytest.raises(HostFileGatherRefused, match="host_file_gather=False leaves a pinned table.*cpu_offload=False"):
        resolve({"host_file_gather": False})


def test_the_setting_changes_the_config_hash():
    assert EngramConfig(host_file_gather=True).compute_hash() != EngramConfig(host_file_gather=False).compute_hash()


@pytest.fixture
def flat(tmp_path):
    path = tmp_path / "table.flat"
    path.touch()
    return str(path)


def test_a_flat_file_means_rows_from_files(platform, flat, monkeypatch):
    platform("cuda", True)
    made = resolve({"host_file_path": flat})
    assert made.host_file_gather and made.host_file_path == flat
    monkeypatch.setenv(settings.PATH_VARIABLE, flat)
    for engram in ({}, {"host_file_path": flat}, {"host_file_gather": True}):
        made = resolve(engram)
        assert made.host_file_gather and made.host_file_path == flat
    assert resolve({}, architecture="DeepseekV41ForCausalLM").host_file_path is None
    assert settings.PATH_VARIABLE in envs.environment_variables  # else vLLM warns of it


@pytest.mark.parametrize(
    ("engram", "variable", "sentence"),
    [
        ({"host_file_path": "/elsewhere"}, "flat", "VLLM_PLE_MMAP_PATH='.*' and host_file_path='/elsewhere' differ"),
        (
            {"host_file_path": "/nowhere/t"},
            None,
            "host_file_path='/nowhere/t' is no file. .*flatten-ple CHECKPOINT /nowhere/t",
        ),
        ({"host_file_path": "flat", "host_file_gather": False}, None, "host_file_gather=False reads none"),
        (
            {"host_file_path": "flat", "cpu_offload": False},
            None,
            "cpu_offload=False puts the whole table on the device",
        ),
    ],
)
def test_refused_files(platform, flat, monkeypatch, engram, variable, sentence):
    platform("cuda", True)
    if variable:
        monkeypatch.setenv(settings.PATH_VARIABLE, flat)
    with pytest.raises(HostFileGatherRefused, match=sentence):
        resolve({key: flat if value == "flat" else value for key, value in engram.items()})


def test_a_file_that_is_being_written_is_left_to_its_own_sentence(platform, tmp_path):
    """The layer says that it is not finished, and how to go on."""
    platform("cuda", True)
    (tmp_path / "table.flat.partial").touch()
    assert resolve({"host_file_path": str(tmp_path / "table.flat")}).host_file_gather
