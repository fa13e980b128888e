"""Machines that cannot take their stage are refused by name; the function that asks them runs without vLLM."""

import subprocess
import sys
from dataclasses import replace

import pytest
from ray import cloudpickle

from vllm.v1.executor import ray_machines
from vllm.v1.executor.ray_machines import (
    CheckpointDiffers,
    CheckpointMissing,
    Machine,
    OtherVllm,
    Seat,
    by_address,
    check,
    checkpoint_folder,
    describe,
    here,
)

FILES = {"config.json": 10, "model-00001-of-00002.safetensors": 100, "model-00002-of-00002.safetensors": 200}
OURS = Machine("", "", "head", "1.2.0+ampere.1", FILES)
OTHER = replace(OURS, node="b7c8d9e0f1", address="10.0.0.2", host="cellar")
FOLDER = "/models/flash"


def refusal(kind, machine: Machine) -> str:
    with pytest.raises(kind) as refused:
        check([replace(OURS, address="10.0.0.1"), machine], OURS, FOLDER)
    return str(refused.value)


def test_equal_machines_are_accepted():
    check([OTHER, replace(OTHER, files=FILES | {"extra.safetensors": 1})], OURS, FOLDER)


def test_a_missing_checkpoint_names_machine_and_path():
    said = refusal(CheckpointMissing, replace(OTHER, files=None))
    assert "cellar (10.0.0.2, Ray node b7c8d9e0)" in said and "/models/flash" in said and "same path" in said


@pytest.mark.parametrize(
    "files, words",
    [
        ({name: size for name, size in FILES.items() if name != "config.json"}, "config.json is missing"),
        (FILES | {"model-00002-of-00002.safetensors": 150}, "model-00002-of-00002.safetensors is 150 bytes"),
    ],
    ids=["missing", "shorter"],
)
def test_a_half_copied_checkpoint_names_the_file(files, words):
    said = refusal(CheckpointDiffers, replace(OTHER, files=files))
    assert words in said and "cellar" in said and "copy" in said


@pytest.mark.parametrize("version, words", [("1.2.0", "has vllm 1.2.0 "), ("", "has no vllm ")])
def test_another_vllm_is_named(version, words):
    said = refusal(OtherVllm, replace(OTHER, vllm=version))
    assert words in said and "vllm 1.2.0+ampere.1" in said and "cellar" in said


def test_the_version_is_judged_before_the_checkpoint():
    """A machine without this vLLM is not worth copying a checkpoint to."""
    refusal(OtherVllm, replace(OTHER, vllm="", files=None))


def test_only_files_that_stages_read_are_compared(tmp_path):
    for name in ["config.json", "model.safetensors", "model.safetensors.index.json", "README.md"]:
        (tmp_path / name).write_text("x" * len(name))
    (tmp_path / "generation_config.json").write_text("{}")
    assert here(str(tmp_path)).files == {
        "config.json": 11,
        "generation_config.json": 2,
        "model.safetensors": 17,
        "model.safetensors.index.json": 28,
    }


def test_a_missing_folder_is_not_an_empty_one(tmp_path):
    assert here(str(tmp_path / "none")).files is None
    assert here(str(tmp_path)).files == {}
    assert here("").files == {}


def test_a_hub_name_is_no_folder(tmp_path):
    assert checkpoint_folder("Qwen/Qwen3.8-Flash-Next") == ""
    assert checkpoint_folder(str(tmp_path)) == str(tmp_path)


def test_the_question_travels_without_our_modules(tmp_path):
    """A machine without this vLLM has to be able to say so, so the function must not be sent as our module's name."""
    sent = tmp_path / "sent"
    sent.write_bytes(cloudpickle.dumps(ray_machines._questions()))
    code = (
        "import sys; from ray import cloudpickle\n"
        f"print(cloudpickle.loads(open({str(sent)!r}, 'rb').read())('')['vllm'], 'vllm' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split()[1] == "False", said


def test_stages_are_described_in_order():
    head = replace(OURS, node="a1a1a1a1a1", address="10.0.0.1")
    seats = [Seat(0, "a1a1a1a1a1", "10.0.0.1"), Seat(1, "a1a1a1a1a1", "10.0.0.1"), Seat(2, "b7c8d9e0f1", "10.0.0.2")]
    assert describe([head, OTHER], seats, stages=3) == (
        "stage 0 on head (10.0.0.1, Ray node a1a1a1a1); stage 1 on head (10.0.0.1, Ray node a1a1a1a1); "
        "stage 2 on cellar (10.0.0.2, Ray node b7c8d9e0)"
    )


def test_a_stage_of_two_ranks_names_its_machines_once():
    seats = [Seat(0, "b7c8d9e0f1", "10.0.0.2"), Seat(1, "b7c8d9e0f1", "10.0.0.2")]
    assert describe([OTHER], seats, stages=1).count("cellar") == 1


def test_addresses_are_sorted_by_their_numbers():
    addresses = ["10.0.0.10", "node-b", "10.0.0.9", "9.255.0.1"]
    assert sorted(addresses, key=by_address) == ["9.255.0.1", "10.0.0.9", "10.0.0.10", "node-b"]
