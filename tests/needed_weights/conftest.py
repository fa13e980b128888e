"""Stand-ins for a stage's model, and a checkpoint of eight layers for them."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from vllm.config import LoadConfig
from vllm.model_executor.model_loader import accounted_load, needed_weights, weight_utils
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.utils import AutoWeightsLoader, PPMissingLayer, WeightsMapper

from ..ple_store.conftest import write_table

__all__ = ["write_table"]

LAYERS, EXPERTS, WIDTH = 8, 4, 6
TABLE = "layers.1.ple.ple_embedding.ngram_embedding"


class Experts(nn.Module):
    """All experts of a layer in one parameter, as upstream has them."""

    def __init__(self) -> None:
        super().__init__()
        self.w2_weight = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.w2_weight.data[int(name.split(".")[0])].copy_(tensor)
            yield "w2_weight"


class Joined(nn.Module):
    """q and k in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * WIDTH, WIDTH), requires_grad=False)
        self.weight.weight_loader = self.put
        self.k_scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def put(self, parameter, tensor):
        parameter.data.narrow(0, tensor.shard_id * WIDTH, WIDTH).copy_(tensor)


class NGram(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.ngram_embedding = nn.Module()
        self.ngram_embedding.weight = nn.Parameter(torch.empty(rows, WIDTH), requires_grad=False)
        self.register_buffer("hash", torch.zeros(3))

    def load_weights(self, weights):
        for name, tensor in weights:
            if "shard_" in name:
                number = int(name.split("shard_")[1].split(".")[0])
                self.ngram_embedding.weight.data.narrow(0, number * len(tensor), len(tensor)).copy_(tensor)
        return {"ngram_embedding.weight"}


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.qk_proj = Joined()
        self.mlp = nn.Module()
        self.mlp.experts = Experts()
        if index == 1:
            self.ple = nn.Module()
            self.ple.ple_embedding = NGram(rows=4)


class Inner(nn.Module):
    def __init__(self, start: int, end: int) -> None:
        super().__init__()
        self.start_layer, self.end_layer = start, end
        self.layers = nn.ModuleList(Layer(i) if start <= i < end else PPMissingLayer() for i in range(LAYERS))
        self.hyper_connection_mixer = None
        if end == LAYERS:
            self.hyper_connection_mixer = nn.Linear(WIDTH, WIDTH, bias=False)


class Qwen4ExpForCausalLM(nn.Module):
    """The stage of layers ``start`` to ``end``; its class's name is what the loader goes by."""

    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"model.language_model.": "model."})

    def __init__(self, start: int = 0, end: int = LAYERS) -> None:
        super().__init__()
        self.model = Inner(start, end)
        self.lm_head = nn.Linear(WIDTH, 5, bias=False) if end == LAYERS else PPMissingLayer()

    def load_weights(self, weights):
        stacked = WeightsMapper(
            orig_to_new_stacked={".q_proj": (".qk_proj", 0), ".k_proj": (".qk_proj", 1)},
            orig_to_new_substr={"mtp.": None},
        )
        loader = AutoWeightsLoader(self, ignore_unexpected_suffixes=[".odd"])
        return loader.load_weights(weights, mapper=self.hf_to_vllm_mapper | stacked)


def tensors() -> dict[str, torch.Tensor]:
    """Everything that the whole model takes, by name."""
    made = {"lm_head.weight": torch.randn(5, WIDTH)}
    made["model.language_model.hyper_connection_mixer.weight"] = torch.randn(WIDTH, WIDTH)
    for index in range(LAYERS):
        layer = f"model.language_model.layers.{index}"
        made[f"{layer}.norm.weight"] = torch.randn(WIDTH)
        for name in ("q_proj", "k_proj"):
            made[f"{layer}.{name}.weight"] = torch.randn(WIDTH, WIDTH)
        for expert in range(EXPERTS):
            made[f"{layer}.mlp.experts.{expert}.down_proj.weight"] = torch.randn(WIDTH, WIDTH)
    for shard in range(2):
        made[f"model.language_model.{TABLE}.shard_{shard}.weight"] = torch.randn(2, WIDTH)
    return made


@dataclass
class Files:
    """A checkpoint on disk, and what was taken out of it."""

    folder: Path
    opened: list[str] = field(default_factory=list)
    taken: dict[str, int] = field(default_factory=dict)

    def load(self, model: nn.Module, **settings) -> set[str]:
        """Load the stage ``model`` as the default loader does."""
        loader = DefaultModelLoader(LoadConfig(use_tqdm_on_load=False, **settings))
        model_config = SimpleNamespace(model=str(self.folder), revision=None)
        return accounted_load.load_accounted(loader, model, loader.get_all_weights(model_config, model))


def watched(taken, opened=lambda path: None) -> type:
    """A stand-in for safe_open: calls ``opened(path)`` for each file, ``taken(name, tensor)`` for each tensor."""

    class Watched:
        def __init__(self, path, *args, **kwargs):
            opened(path)
            self._file = safe_open(path, *args, **kwargs)

        def __enter__(self):
            self._file.__enter__()
            return self

        def __exit__(self, *error):
            return self._file.__exit__(*error)

        def keys(self):
            return self._file.keys()

        def get_tensor(self, name):
            tensor = self._file.get_tensor(name)
            taken(name, tensor)
            return tensor

    return Watched


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """``checkpoint(change, index=True)``: files of two layers each, the table's shards in two of their own.

    ``change`` gets the tensors by name before they are written. Opening is watched.
    """

    def write(change=None, index=True) -> Files:
        made = tensors()
        if change:
            change(made)
        by_file: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in made.items():
            part = name.split("layers.")[1].split(".")[0] if "layers." in name else "0"
            file = f"model-{int(part) // 2}.safetensors"
            if TABLE in name:
                file = f"table-{name.split('shard_')[1][0]}.safetensors"
            by_file.setdefault(file, {})[name] = tensor
        weight_map = {}
        for file, content in by_file.items():
            save_file(content, tmp_path / file)
            weight_map |= dict.fromkeys(content, file)
        if index:
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        files = Files(tmp_path)

        def opened(path) -> None:
            files.opened.append(Path(path).name)

        def taken(name, tensor) -> None:
            files.taken[name] = tensor.nbytes

        monkeypatch.setattr(weight_utils, "safe_open", watched(taken, opened))
        return files

    return write


@pytest.fixture(autouse=True)
def stages(monkeypatch):
    """``stages(2, 1)``: there are two stages, and this is the second."""

    def configure(count: int, rank: int) -> None:
        group = SimpleNamespace(world_size=count, rank_in_group=rank)
        monkeypatch.setattr(accounted_load, "get_pp_group", lambda: group)

    configure(1, 0)
    return configure


@pytest.fixture
def said(monkeypatch):
    """Warnings of the accounting."""
    texts: list[str] = []
    monkeypatch.setattr(accounted_load.logger, "warning", lambda text, *values: texts.append(text % values))
    return texts


@pytest.fixture
def in_files(monkeypatch):
    """Rows of the table are read from its files while serving."""
    monkeypatch.setattr(needed_weights, "serves_from_files", lambda: True)
