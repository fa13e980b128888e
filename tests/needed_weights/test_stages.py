"""A stage opens the files that hold something for it, and takes nothing else out of them."""

from types import SimpleNamespace

import pytest
from torch import nn

from vllm.model_executor.model_loader import needed_weights, weight_utils
from vllm.model_executor.model_loader.needed_weights import DRAFT, IN_FILES, OTHER_STAGE, VISION, NeededWeights
from vllm.model_executor.models.utils import StageMissingLayer, WeightsMapper

from .conftest import EXPERTS, LAYERS, TABLE, WIDTH, Qwen4ExpForCausalLM, tensors

LAYER = "model.language_model.layers"
#: bytes of what a layer takes, without the table
LAYER_BYTES = 4 * (WIDTH + (2 + EXPERTS) * WIDTH * WIDTH)
TABLE_BYTES = 4 * 4 * WIDTH
LAST_BYTES = 4 * (5 * WIDTH + WIDTH * WIDTH)
TABLE_FILES = {"table-0.safetensors", "table-1.safetensors"}


@pytest.mark.parametrize("cuts", [(0, 8), (0, 4, 8), (0, 1, 8), (0, 3, 6, 8), (0, 2, 4, 8)])
@pytest.mark.parametrize("index", [True, False])
def test_files_and_bytes_of_each_stage(checkpoint, cuts, index, stages, said):
    """Counted: files whose header is read, and bytes of the tensors taken out of them (`safe_open`, `get_tensor`).

    Taking a tensor maps its bytes; only those are read from the disk.
    """
    files = checkpoint(index=index)
    total = 0
    for rank, (start, end) in enumerate(zip(cuts, cuts[1:])):
        stages(len(cuts) - 1, rank)
        files.opened.clear(), files.taken.clear()
        model = Qwen4ExpForCausalLM(start, end)
        files.load(model)
        owns_table, last = start <= 1 < end, end == LAYERS
        taken = sum(files.taken.values())
        assert taken == LAYER_BYTES * (end - start) + TABLE_BYTES * owns_table + LAST_BYTES * last
        total += taken
        if index:
            wanted = {f"model-{i // 2}.safetensors" for i in range(start, end)}
            wanted |= {"model-0.safetensors"} if last else set()  # where lm_head is
            wanted |= TABLE_FILES if owns_table else set()
            assert set(files.opened) == wanted and len(files.opened) == len(wanted)
    assert total == sum(tensor.nbytes for tensor in tensors().values())
    assert not said


def test_a_table_in_files_is_opened_by_no_stage(checkpoint, stages, in_files):
    files = checkpoint()
    for rank, (start, end) in enumerate([(0, 4), (4, 8)]):
        stages(2, rank)
        model = Qwen4ExpForCausalLM(start, end)
        if rank == 0:
            del model.model.layers[1].ple.ple_embedding.ngram_embedding.weight
        files.load(model)
    assert not TABLE_FILES & set(files.opened)
    assert not any(TABLE in name for name in files.taken)


def test_a_file_that_the_index_does_not_name(checkpoint, stages):
    """Upstream leaves it out before; asked all the same, its header decides."""
    files = checkpoint()
    paths = sorted(map(str, files.folder.glob("*.safetensors")))
    (files.folder / "model.safetensors.index.json").unlink()
    unused = NeededWeights(Qwen4ExpForCausalLM(0, 2)).unused
    kept = needed_weights.needed_files(paths, str(files.folder), "model.safetensors.index.json", unused)
    assert [path.rsplit("/", 1)[1] for path in kept] == ["model-0.safetensors", *sorted(TABLE_FILES)]
    assert len(files.opened) == len(paths)


def test_all_files_where_none_is_needed(checkpoint):
    files = checkpoint()
    paths = sorted(map(str, files.folder.glob("*.safetensors")))
    kept = needed_weights.needed_files(paths, str(files.folder), "model.safetensors.index.json", lambda name: True)
    assert kept == paths


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (f"{LAYER}.5.norm.weight", None),
        (f"{LAYER}.5.mlp.experts.3.down_proj.weight", None),
        (f"{LAYER}.3.norm.weight", OTHER_STAGE),
        (f"{LAYER}.{TABLE.removeprefix('layers.')}.shard_0.weight", OTHER_STAGE),
        ("model.language_model.hyper_connection_mixer.weight", OTHER_STAGE),
        ("lm_head.weight", OTHER_STAGE),
        ("mtp.layers.0.mlp.experts.3.down_proj.weight", DRAFT),
        ("mtp.fc.weight", DRAFT),
        ("model.visual.blocks.0.attn.qkv.weight", VISION),
        (f"{LAYER}.5.unheard_of.weight", None),  # the loader's to refuse
        ("unheard_of", None),
    ],
)
def test_reasons(name, why):
    assert NeededWeights(Qwen4ExpForCausalLM(4, 6)).why_not(name) == why


def test_vision_that_is_not_run():
    class Qwen4ExpForConditionalGeneration(nn.Module):
        hf_to_vllm_mapper = WeightsMapper(
            orig_to_new_prefix={
                "model.visual.": "visual.",
                "lm_head.": "language_model.lm_head.",
                "model.language_model.": "language_model.model.",
            }
        )

        def __init__(self, visual):
            super().__init__()
            self.visual = visual
            self.language_model = Qwen4ExpForCausalLM(4, 6)

    without = NeededWeights(Qwen4ExpForConditionalGeneration(StageMissingLayer("vision_tower")))
    assert without.why_not("model.visual.blocks.0.attn.qkv.weight") == VISION
    assert without.why_not("lm_head.weight") == OTHER_STAGE
    assert without.why_not(f"{LAYER}.0.norm.weight") == OTHER_STAGE
    assert without.why_not(f"{LAYER}.4.norm.weight") is None
    assert NeededWeights(Qwen4ExpForConditionalGeneration(nn.Linear(1, 1))).why_not("model.visual.bias") is None


def test_rows_in_files(in_files):
    table = f"{LAYER}.{TABLE.removeprefix('layers.')}"
    for model in (Qwen4ExpForCausalLM(0, 2), nn.Module()):
        needed = NeededWeights(model)
        assert needed.why_not(f"{table}.shard_0.weight") == needed.why_not(f"{table}.weight_scale") == IN_FILES
        assert needed.why_not("lm_head.weight") in (None, OTHER_STAGE)


def test_other_models_load_everything():
    class Other(Qwen4ExpForCausalLM):
        pass

    assert needed_weights.unused_weight_filter(Other(4, 6)) is None


def test_each_stage_prefetches_its_own_files(monkeypatch):
    """Dealt out over all ranks, half of a stage's files would be nobody's."""
    files = [f"{i}" for i in range(6)]
    groups = {"pp": SimpleNamespace(world_size=1), "tp": SimpleNamespace(world_size=1, rank_in_group=0)}
    monkeypatch.setattr("vllm.distributed.get_pp_group", lambda: groups["pp"])
    monkeypatch.setattr("vllm.distributed.get_tp_group", lambda: groups["tp"])
    assert needed_weights.prefetch_share(files, 1, 2) == files[1::2]
    groups["pp"].world_size = 2
    assert needed_weights.prefetch_share(files, 1, 2) == files
    groups["tp"].__init__(world_size=2, rank_in_group=1)
    assert needed_weights.prefetch_share(files, 3, 4) == files[1::2]


def test_prefetching_goes_by_the_share(monkeypatch, tmp_path):
    read = []
    monkeypatch.setattr(needed_weights, "prefetch_share", lambda files, rank, world: files[:1])
    monkeypatch.setattr(weight_utils, "_prefetch_checkpoint", lambda path, block: read.append(path))
    at_once = SimpleNamespace(Thread=lambda target, daemon: SimpleNamespace(start=target))
    monkeypatch.setattr(weight_utils, "threading", at_once)
    weight_utils._prefetch_all_checkpoints(["a", "b"])
    assert read == ["a"]


def test_skipping_ends_with_loading():
    assert not needed_weights.skips_weight("x")
    with needed_weights.skipping(lambda name: name == "x"):
        assert needed_weights.skips_weight("x") and not needed_weights.skips_weight("y")
        with needed_weights.skipping(lambda name: True):
            assert needed_weights.skips_weight("y")
        assert not needed_weights.skips_weight("y")
    assert not needed_weights.skips_weight("x")
