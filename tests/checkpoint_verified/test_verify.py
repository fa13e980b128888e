"""When a server looks at its checkpoint, what it refuses, and that it reads headers only."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from demo.checkpoint.formats import mtp
from demo.checkpoint.geometry import geometry
from demo.checkpoint.table_formats import FORMS, recode
from demo.checkpoint.write import build
from vllm.ampere.command import main
from vllm.ampere.findings import Finding
from vllm.engine.verified_checkpoint import (
    Nvfp4NeedsNewerGpu,
    UnknownCheckpointCheck,
    nvfp4,
    verify_checkpoint,
)

INDEX = "model.safetensors.index.json"
TABLE = "layers.1.ple.ple_embedding.ngram_embedding"


def file_of(model: Path, part: str) -> tuple[Path, str]:
    """The file that holds the first tensor with ``part`` in its name, and the name."""
    weight_map = json.loads((model / INDEX).read_text())["weight_map"]
    name = next(name for name in weight_map if part in name)
    return model / weight_map[name], name


def edit(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def cut(model: Path) -> None:
    path, _ = file_of(model, "layers.3.mlp")
    os.truncate(path, path.stat().st_size - 1)


def remove(model: Path) -> None:
    file_of(model, "layers.3.mlp")[0].unlink()


def lengthen(model: Path) -> None:
    with open(file_of(model, "layers.3.mlp")[0], "ab") as file:
        file.write(b"\0")


def lose_a_shard(model: Path) -> None:
    path, name = file_of(model, f"{TABLE}.shard_2.")
    edit(path, lambda tensors: tensors.pop(name))
    index = json.loads((model / INDEX).read_text())
    del index["weight_map"][name]
    (model / INDEX).write_text(json.dumps(index))


def lose_a_tensor(model: Path) -> None:
    path, name = file_of(model, "layers.3.mlp.gate")
    edit(path, lambda tensors: tensors.pop(name))


def repeat_a_tensor(model: Path) -> None:
    (_, name), (other, _) = file_of(model, "layers.3.mlp.gate"), file_of(model, "lm_head")
    edit(other, lambda tensors: tensors.update({name: torch.zeros(2)}))


def lose_the_scale(model: Path) -> None:
    path, name = file_of(model, f"{TABLE}.shard_0.")
    edit(path, lambda tensors: tensors.update({n: t.to(torch.float8_e4m3fn) for n, t in tensors.items() if TABLE in n}))
    for shard in range(1, 128):
        try:
            path, name = file_of(model, f"{TABLE}.shard_{shard}.")
        except StopIteration:
            return
        edit(
            path,
            lambda tensors: tensors.update({n: t.to(torch.float8_e4m3fn) for n, t in tensors.items() if TABLE in n}),
        )


@pytest.mark.parametrize(
    ("damage", "name", "sentence"),
    [
        (remove, "ShardMissing", r"model-0000\d.*expected a file with \d+ tensors, found no such file"),
        (cut, "ShardTruncated", r"model-0000\d.*expected (\d+) bytes, found \d+ bytes"),
        (lengthen, "ShardTooLong", r"model-0000\d.*expected \d+ bytes, found \d+ bytes"),
        (lose_a_shard, "NgramShardMissing", rf"{TABLE}: expected \d+ shards, found all but 1: 2"),
        (lose_a_tensor, "IndexTensorAbsent", r"expected .*layers.3.mlp.gate.*, found \d+ others"),
        (repeat_a_tensor, "TensorTwice", r"expected each tensor once, found .*layers.3.mlp.gate"),
        (lose_the_scale, "NgramScaleMissing", rf"{TABLE}: expected a weight_scale, found none"),
    ],
)
def test_refused(model, config_of, damage, name, sentence):
    """By name, with file or tensor, what was expected and what is there."""
    verify_checkpoint(config_of(model))
    damage(model)
    with pytest.raises(Finding, match=sentence) as caught:
        verify_checkpoint(config_of(model))
    assert caught.value.name == name and caught.value.remedy


def test_gaps_in_the_numbering_are_fine(model, config_of):
    path, _ = file_of(model, "layers.3.mlp")
    path.rename(model / "model-00099-of-00008.safetensors")
    index = (model / INDEX).read_text().replace(path.name, "model-00099-of-00008.safetensors")
    (model / INDEX).write_text(index)
    verify_checkpoint(config_of(model))


class TestFlatFile:
    """Of the table, in place of the shards; else a stage finds it out once weights of the others are loaded."""

    @pytest.fixture(scope="class")
    def flat(self, intact, tmp_path_factory):
        file = tmp_path_factory.mktemp("flat") / "table.flat"
        assert main(["flatten-ple", str(intact), str(file)]) == 0
        return file

    @staticmethod
    def served_from(config, file):
        config.engram_config = SimpleNamespace(host_file_path=str(file))
        return config

    def test_passes(self, intact, flat, config_of):
        verify_checkpoint(self.served_from(config_of(intact), flat))

    @pytest.mark.parametrize("fault", ["cut off", "replaced", "of no table"])
    def test_the_check_says_the_same(self, intact, flat, config_of, tmp_path, capsys, fault):
        content, broken = bytearray(flat.read_bytes()), tmp_path / "broken.flat"
        content[len(content) // 2 :] = b"" if fault == "cut off" else bytes(len(content) - len(content) // 2)
        content[0] ^= fault == "of no table"
        broken.write_bytes(content)
        with pytest.raises(Finding) as refused:
            verify_checkpoint(self.served_from(config_of(intact), broken))
        assert main(["check", str(intact), "--json", "--engram-config.host_file_path", str(broken)]) == 1
        said = json.loads(capsys.readouterr().out)["findings"]
        assert str(refused.value) in [finding["message"] for finding in said]

    def test_cut_off(self, intact, flat, config_of, tmp_path):
        cut = tmp_path / "cut.flat"
        cut.write_bytes(flat.read_bytes()[:-1])
        with pytest.raises(Finding, match=r"cut\.flat: expected \d+ bytes, found \d+"):
            verify_checkpoint(self.served_from(config_of(intact), cut))

    def test_of_another_model(self, intact, flat, config_of, tmp_path):
        build(tmp_path / "other", geometry("tiny"), seed=5)
        with pytest.raises(Finding, match=r"table\.flat: expected row 0 as .*other has it, found another"):
            verify_checkpoint(self.served_from(config_of(tmp_path / "other"), flat))
        verify_checkpoint(self.served_from(config_of(tmp_path / "other", check="off"), flat))

    def test_its_shards_may_have_made_room(self, model, flat, config_of):
        """For whoever wrote the file, needs the space, and took them out of the index; whatever else is missing is not."""
        index = json.loads((model / INDEX).read_text())
        homes = index["weight_map"]
        for file in sorted({home for name, home in homes.items() if TABLE in name}):
            edit(model / file, lambda tensors: [tensors.pop(name) for name in [*tensors] if TABLE in name])
        index["weight_map"] = {name: home for name, home in homes.items() if TABLE not in name}
        (model / INDEX).write_text(json.dumps(index))
        with pytest.raises(Finding, match="n-gram table is not in the files"):
            verify_checkpoint(config_of(model))
        verify_checkpoint(self.served_from(config_of(model), flat))
        file_of(model, "layers.3.mlp")[0].unlink()
        with pytest.raises(Finding, match="names a file that is not there: .*model-0000"):
            verify_checkpoint(self.served_from(config_of(model), flat))


@pytest.mark.parametrize("form", FORMS)
def test_every_format_of_the_table_passes(intact, tmp_path, config_of, said, form):
    recode(intact, tmp_path, form)
    verify_checkpoint(config_of(tmp_path))
    assert any(level == "info" and "n-gram table of layer 1" in text for level, text in said)


def test_only_headers_are_read(intact, config_of):
    """Counted by the kernel: bytes that this process read, from all files and however cached."""

    def read_so_far() -> int:
        return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])

    verify_checkpoint(config_of(intact))  # modules are imported
    before = read_so_far()
    verify_checkpoint(config_of(intact))
    size = sum(path.stat().st_size for path in intact.glob("*.safetensors"))
    assert read_so_far() - before < size / 20


class TestWhen:
    def test_off(self, model, config_of):
        cut(model)
        verify_checkpoint(config_of(model, check="off"))

    def test_warn(self, model, config_of, said):
        cut(model)
        verify_checkpoint(config_of(model, check="warn"))
        assert any(level == "warning" and "shorter than its header" in text for level, text in said)

    def test_an_unknown_value(self, model, config_of):
        with pytest.raises(UnknownCheckpointCheck, match="'checkpoint_check'.*'never', known are refuse, warn, off"):
            verify_checkpoint(config_of(model, check="never"))

    @pytest.mark.parametrize("load_format", ["dummy", "gguf", "sharded_state", "runai_streamer"])
    def test_formats_that_read_no_such_files(self, model, config_of, load_format):
        cut(model)
        verify_checkpoint(config_of(model, load_format=load_format))

    def test_another_model(self, model, config_of):
        cut(model)
        verify_checkpoint(config_of(model, architecture="LlamaForCausalLM"))

    def test_no_weights_at_all(self, model, config_of):
        """A configuration can be had of a config alone; an index promises more."""
        for path in model.glob("*.safetensors"):
            path.unlink()
        with pytest.raises(Finding, match="no such file"):
            verify_checkpoint(config_of(model))
        (model / INDEX).unlink()
        verify_checkpoint(config_of(model))

    def test_a_hub_id(self, config_of):
        """The loader may still have files to fetch."""
        verify_checkpoint(config_of("Qwen/Qwen3.8-Flash-Next"))

    @pytest.mark.parametrize("override", [{"hf_overrides": {"a": 1}}, {"hf_config_path": "elsewhere"}])
    def test_an_overridden_config(self, model, config_of, said, override):
        """What the files say against it need not hold; what is wrong with a file does."""
        lose_a_shard(model)
        with pytest.raises(Finding):
            verify_checkpoint(config_of(model))
        verify_checkpoint(config_of(model, **override))
        assert any("overridden config" in text for _, text in said)
        cut(model)
        with pytest.raises(Finding, match="shorter than its header"):
            verify_checkpoint(config_of(model, **override))

    def test_a_draft_module_that_is_not_there(self, model, config_of):
        """It is looked for where it is going to be loaded from this checkpoint, and nowhere else."""

        def drafting(method="mtp", source=model):
            drafter = SimpleNamespace(model=str(source)) if source else None
            return config_of(model, drafts=SimpleNamespace(method=method, draft_model_config=drafter))

        verify_checkpoint(drafting("ngram", source=None))
        verify_checkpoint(drafting(source="/somewhere/else"))
        with pytest.raises(Finding, match=r"no tensor of mtp\.\*\. Serve without --speculative-config") as caught:
            verify_checkpoint(drafting())
        assert caught.value.name == "DraftModuleMissing"
        mtp.add(model)
        verify_checkpoint(drafting())
        path, name = file_of(model, "mtp.fc_hidden")
        edit(path, lambda tensors: tensors.pop(name))
        index = json.loads((model / INDEX).read_text())
        del index["weight_map"][name]
        (model / INDEX).write_text(json.dumps(index))
        with pytest.raises(Finding, match=r"modules of mtp\.\*, without mtp\.fc_hidden"):
            verify_checkpoint(drafting())
        verify_checkpoint(config_of(model))

    def test_warnings_that_are_made_elsewhere(self, intact, config_of, said):
        verify_checkpoint(config_of(intact))
        assert not any(level == "warning" for level, _ in said)


class TestNvfp4:
    """Stand-ins: the platform, and what headers of NVFP4 weights come to."""

    @pytest.fixture
    def checkpoint(self):
        kinds = {"layers.0.mlp.experts.0.up_proj": "expert", TABLE: "ngram_table", "lm_head": "vocabulary"}
        stored = {name: SimpleNamespace(kind="nvfp4") for name in kinds} | {"lm_head": SimpleNamespace(kind="plain")}
        return SimpleNamespace(
            modules={name: SimpleNamespace(kind=kind) for name, kind in kinds.items()},
            storages=stored,
        )

    def test_the_cpu(self, checkpoint, platform, said):
        platform("cpu")
        assert not list(nvfp4(checkpoint))
        assert said == [
            ("info", "NVFP4 weights of 1 modules are dequantized while they load, and take the memory of BF16 ones.")
        ]

    @pytest.mark.parametrize("capability", [75, 80, 86, 89, 90])
    def test_cards_without_fp4(self, checkpoint, platform, said, capability):
        platform("cuda", capability)
        kernels = "Humming, or Marlin where it is not installed" if capability == 90 else "Marlin"
        assert not list(nvfp4(checkpoint))
        assert said == [
            (
                "info",
                f"NVFP4 weights of 1 modules are used weight-only, through {kernels}: compute capability "
                f"{capability // 10}.{capability % 10} has no FP4.",
            )
        ]

    @pytest.mark.parametrize("capability", [0, 70])
    def test_older_cards(self, checkpoint, platform, capability):
        platform("cuda", capability)
        (finding,) = nvfp4(checkpoint)
        assert isinstance(finding, Nvfp4NeedsNewerGpu)
        assert "for 1 modules, the first of them layers.0.mlp.experts.0.up_proj, found compute capability" in str(
            finding
        )
        assert "dequantized on a CPU" in str(finding)

    @pytest.mark.parametrize("capability", [100, 120])
    def test_cards_with_fp4(self, checkpoint, platform, said, capability):
        platform("cuda", capability)
        assert not list(nvfp4(checkpoint)) and not said

    def test_only_the_table_is_nvfp4(self, checkpoint, platform):
        platform("cpu")
        checkpoint.storages["layers.0.mlp.experts.0.up_proj"].kind = "plain"
        assert not list(nvfp4(checkpoint))

    @pytest.mark.parametrize("capability", [80, 86, 89])
    def test_upstream_chooses_marlin_there(self, monkeypatch, capability):
        """What is said above is what upstream does, for layers and for experts."""
        from vllm.model_executor.kernels import linear
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
        from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4
        from vllm.platforms.interface import DeviceCapability

        card = DeviceCapability(capability // 10, capability % 10)
        platform = SimpleNamespace(
            is_cuda=lambda: True,
            is_cpu=lambda: False,
            get_device_capability=lambda: card,
            has_device_capability=lambda wanted: (
                card.to_int() >= (wanted if isinstance(wanted, int) else wanted[0] * 10 + wanted[1])
            ),
        )
        monkeypatch.setattr(linear, "current_platform", platform)
        monkeypatch.setattr(marlin_utils_fp4, "current_platform", platform)
        monkeypatch.setattr(sys.modules[MarlinExperts.__module__], "current_platform", platform)
        monkeypatch.setattr(linear, "_get_linear_backend", lambda **_: "auto")
        assert type(linear.init_nvfp4_linear_kernel(use_a16=True)).__name__ == "MarlinNvFp4LinearKernel"
        assert MarlinExperts._supports_current_device()


@pytest.mark.slow
def test_a_server_ends_with_the_sentence(model):
    """No traceback, status 1, and no engine was started."""
    cut(model)
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(model), "--max-model-len", "128"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 1, done.stderr[-2000:]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("refused: ")]
    assert "A weight file is shorter than its header says: model-0000" in line
    assert "Traceback" not in done.stdout + done.stderr
    assert "EngineCore" not in done.stdout + done.stderr


def test_a_library_gets_the_exception(model, config_of):
    from vllm.entrypoints.cli.refusals import in_a_sentence

    cut(model)
    with pytest.raises(SystemExit) as ended:
        in_a_sentence(lambda _: verify_checkpoint(config_of(model)))(None)
    assert ended.value.code == 1
    with pytest.raises(KeyError):
        in_a_sentence(lambda _: {}["x"])(None)
