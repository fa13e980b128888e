"""Every published row format gives the values it stands for, from files and from memory."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from demo.checkpoint.table_formats import FORMS, encode
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.models.qwen4_exp.ple_store import errors, methods
from vllm.models.qwen4_exp.ple_store.formats import Kind, dequantize
from vllm.models.qwen4_exp.ple_store.lookup import lookup_row_scaled, lookup_row_scaled_reference
from vllm.models.qwen4_exp.ple_store.reader import TableReader

from .steps import PARTS, ROWS, STEPS, batch_of, build_layer, look_up, stage

LAYER = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"
KINDS = [Kind.SCALED, Kind.SCALED, Kind.ROW_SCALED, Kind.ROW_SCALED, Kind.NVFP4]


def edit(path, change):
    """Rewrite a safetensors file: ``change`` gets its tensors as a dict."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.fixture
def table_of(write_table):
    return lambda form, **kwargs: write_table(**{"rows": ROWS, "dim": 32, "parts": PARTS, "form": form} | kwargs)


@pytest.mark.parametrize(("form", "kind"), [("plain", Kind.PLAIN), *zip(FORMS, KINDS, strict=True)])
def test_every_row_means_its_value(table_of, form, kind):
    written = table_of(form)
    table = written.table()
    assert table.kind is kind
    reader = TableReader(table)
    ids = torch.randperm(ROWS).view(8, -1)
    got = dequantize(table, *reader.gather(ids), torch.float32)
    torch.testing.assert_close(got, written.values[ids].float(), rtol=1e-6, atol=0)
    reader.close()


def test_the_encodings_lose_little():
    """The values above are those of a table, not of a mistake in encoding it."""
    values = torch.randn(64, 160, generator=torch.Generator().manual_seed(3))
    errors_ = {form: float((encode(values, form).values - values).norm() / values.norm()) for form in FORMS}
    assert all(error < 0.03 for form, error in errors_.items() if form != "nvfp4"), errors_
    assert errors_["row-scaled-int8"] < 0.01 and errors_["nvfp4"] < 0.12, errors_


@pytest.mark.parametrize("form", ["plain", *FORMS])
def test_files_and_memory_give_the_dequantized_table(table_of, monkeypatch, form):
    """What the model sees is the dequantized table, rounded once to bf16."""
    written = table_of(form)
    in_file, in_memory = (build_layer(monkeypatch, written, place) for place in (True, False))
    for requests in STEPS.values():
        batch, _, inputs = batch_of(requests)
        ids = in_file.compute_ngram_ids(batch.input_ids, inputs["query_start_loc"], inputs["ngram_context"])
        expected = written.values.bfloat16()[ids].flatten(-2)
        assert torch.equal(stage(in_file, requests), expected)
        rows = look_up(in_memory, requests)
        assert torch.equal(in_memory.ngram_embedding.dequantize(rows, torch.bfloat16), expected)


@pytest.mark.parametrize(
    "quant_config",
    [
        None,
        AutoGPTQConfig(
            weight_bits=4,
            group_size=128,
            desc_act=False,
            is_sym=True,
            lm_head_quantized=False,
            dynamic={},
            full_config={},
        ),
        Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", ignored_layers=[]),
    ],
    ids=["none", "gptq", "fp8"],
)
@pytest.mark.parametrize("declared", [None, "bfloat16", "float8_e4m3fn", "nvfp4"])
@pytest.mark.parametrize(("form", "kind"), [("plain", Kind.PLAIN), *zip(FORMS, KINDS, strict=True)])
def test_headers_decide_whatever_the_config_says(table_of, monkeypatch, quant_config, declared, form, kind):
    written = table_of(form, rows=ROWS)
    classes = {
        Kind.PLAIN: "Qwen4ExpPLEUnquantizedEmbeddingMethod",
        Kind.SCALED: "ScaledMethod",
        Kind.ROW_SCALED: "RowScaledMethod",
        Kind.NVFP4: "Qwen4ExpPLENvFp4EmbeddingMethod",
    }
    layer = build_layer(monkeypatch, written, False, declared=declared, quant_config=quant_config)
    assert type(layer.ngram_embedding.embedding_method).__name__ == classes[kind]


@pytest.mark.parametrize("in_file", [True, False])
def test_a_config_that_says_otherwise_is_warned_about(table_of, monkeypatch, in_file):
    said = []
    monkeypatch.setattr(methods.logger, "warning", lambda text, *values: said.append(text % values))
    written = table_of("row-scaled")
    build_layer(monkeypatch, written, in_file, declared="float8_e4m3fn")
    assert not said
    build_layer(monkeypatch, written, in_file, declared="nvfp4")
    assert len(said) == 1 and "ple_embedding_dtype='nvfp4'" in said[0] and "float8_e4m3fn row-scaled" in said[0]


@pytest.mark.parametrize("form", ["row-scaled", "row-scaled-int8"])
@pytest.mark.parametrize("world", [1, 2])
def test_row_scales_are_cut_with_their_rows(table_of, monkeypatch, form, world):
    """Two tensor-parallel ranks hold the halves of rows and scales."""
    written = table_of(form)
    weights, scales = [], []
    for rank in range(world):
        embedding = build_layer(monkeypatch, written, False, world=world, rank=rank).ngram_embedding
        weights.append(embedding.weight.float())
        scales.append(embedding.weight_scale.float())
    torch.testing.assert_close(torch.cat(weights) * torch.cat(scales), written.values, rtol=1e-6, atol=0)


def test_dummy_weights_need_no_files(table_of, monkeypatch, tmp_path):
    """Upstream's choice by the config stays where there is nothing to read."""
    config = SimpleNamespace(
        engram_config=None, load_config=SimpleNamespace(load_format="dummy"), model_config=SimpleNamespace(model="none")
    )
    monkeypatch.setattr(methods, "get_current_vllm_config", lambda: config)
    method = methods.choose_method(
        None, "layers.1.ngram_embedding", SimpleNamespace(ple_embedding_dtype="nvfp4"), 8, 16
    )
    assert type(method).__name__ == "Qwen4ExpPLENvFp4EmbeddingMethod"
    config.load_config.load_format = "auto"
    config.model_config.model = str(tmp_path)  # no safetensors: weights are of another kind
    method = methods.choose_method(None, "layers.1.ngram_embedding", SimpleNamespace(), 8, 16)
    assert type(method).__name__ == "Qwen4ExpPLEUnquantizedEmbeddingMethod"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_pinned_rows(dtype, scale_dtype, output_dtype):
    """Every code, rows of 20 in a block of 32, and rows of another rank; in Triton's interpreter."""
    codes = torch.arange(260, dtype=torch.int32).to(torch.uint8).view(13, 20)
    if dtype is torch.float8_e4m3fn:
        codes[(codes & 0x7F) == 0x7F] = 3  # not a number
    weight = codes.view(dtype)
    scale = torch.linspace(0.001, 3, 13).view(13, 1).to(scale_dtype)
    ids = torch.tensor([100, 112, 99, 113, 105, 105, 0])
    outputs = [torch.full((len(ids), 20), torch.nan, dtype=output_dtype) for _ in range(2)]
    lookup_row_scaled(weight, scale, ids, outputs[0], 100, 113)
    lookup_row_scaled_reference(weight, scale, ids, outputs[1], 100, 113)
    assert torch.equal(*outputs)
    assert not outputs[0][[2, 3, 6]].any() and outputs[0][[0, 1, 4]].any(1).all()


class TestRefusals:
    def test_no_scale(self, table_of):
        written = table_of("scaled", index=False)
        edit(written.files[-1], lambda t: t.pop(f"{LAYER}.weight_scale"))
        with pytest.raises(errors.BadScale, match="expected one positive number .*weight_scale, found none"):
            written.table()

    @pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
    def test_a_scale_that_is_none(self, table_of, value):
        written = table_of("scaled")
        edit(written.files[-1], lambda t: t.update({f"{LAYER}.weight_scale": torch.tensor([value])}))
        with pytest.raises(errors.BadScale, match=f"found {value}"):
            written.table()

    def test_too_many_numbers(self, table_of):
        written = table_of("scaled")
        edit(written.files[-1], lambda t: t.update({f"{LAYER}.weight_scale": torch.ones(3)}))
        with pytest.raises(errors.BadScale, match=r"F32 of shape \(3,\)"):
            written.table()

    def test_a_row_scale_missing(self, table_of):
        written = table_of("row-scaled", index=False)
        edit(written.files[1], lambda t: t.pop(f"{LAYER}.shard_2.weight_scale"))
        with pytest.raises(errors.MissingShard, match="shard_<i>.weight_scale, found all but 1"):
            written.table()

    def test_row_scales_of_another_table(self, table_of):
        written = table_of("row-scaled")
        edit(written.files[1], lambda t: t.update({f"{LAYER}.shard_2.weight_scale": torch.ones(4, 1)}))
        with pytest.raises(errors.WrongShape, match="shard_2.weight_scale of shape"):
            written.table()

    def test_nvfp4_without_block_scales(self, table_of):
        written = table_of("nvfp4", index=False)
        for path in written.files:
            edit(path, lambda t: [t.pop(n) for n in list(t) if n.endswith("weight_scale")])
        with pytest.raises(errors.BadScale, match="weight_scale, found none"):
            written.table()

    def test_nvfp4_rows_of_another_width(self, table_of):
        with pytest.raises(errors.WrongShape, match="expected 32 bytes per row for nvfp4, found 16"):
            table_of("nvfp4").table(dim=64)

    @pytest.mark.parametrize("leaf", ["weight_scale", "weight_zero_point"])
    def test_something_beside_plain_rows(self, table_of, leaf):
        written = table_of("plain", index=False)
        edit(written.files[0], lambda t: t.update({f"{LAYER}.{leaf}": torch.ones(1)}))
        with pytest.raises(errors.UnknownRowFormat, match=f"weight with BF16 rows, found .*{leaf} too"):
            written.table()

    def test_rows_under_another_name(self, table_of):
        written = table_of("plain", index=False)
        for path in written.files:
            edit(path, lambda t: [t.update({n + "_packed": t.pop(n)}) for n in list(t) if n.endswith("weight")])
        with pytest.raises(errors.UnknownRowFormat, match="found .*weight_packed"):
            written.table()

    def test_an_unknown_dtype(self, table_of):
        written = table_of("plain")
        for path in written.files:
            edit(path, lambda t: [t.update({n: t[n].double()}) for n in list(t) if n.endswith("weight")])
        with pytest.raises(errors.UnknownRowFormat, match="found F64 rows"):
            written.table()


def test_an_undivided_table_with_row_scales(write_table, tmp_path, monkeypatch):
    coded = encode(torch.randn(ROWS, 32), "row-scaled")
    save_file({f"{LAYER}.{leaf}": tensor for leaf, tensor in coded.by_row.items()}, tmp_path / "whole.safetensors")
    written = write_table(rows=ROWS, dim=32, parts=PARTS)
    for path in [*written.files, tmp_path / "model.safetensors.index.json"]:
        path.unlink()
    written.files[:] = [tmp_path / "whole.safetensors"]
    rows = [stage(build_layer(monkeypatch, written, True), STEPS["decodes"])]
    rows.append(look_up(build_layer(monkeypatch, written, False), STEPS["decodes"]))
    assert rows[0].any() and torch.equal(*rows)
    assert json.dumps(str(written.table())) == '"float8_e4m3fn row-scaled"'
