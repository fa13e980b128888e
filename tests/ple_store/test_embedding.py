"""The layer without a weight, against upstream's table in memory, and what is staged for it."""

import errno
import os

import numpy as np
import pytest
import torch

from demo.checkpoint.table_formats import FORMS
from vllm.config import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.models.qwen4_exp.ple_store import embedding, errors, staging
from vllm.models.qwen4_exp.ple_store.formats import dequantize
from vllm.models.qwen4_exp.ple_store.staging import PLERowStager

from .steps import (
    DIM,
    HEADS,
    MAX_TOKENS,
    PARTS,
    ROWS,
    STEPS,
    answer_with,
    batch_of,
    build_layer,
    look_up,
    random_tokens,
    stage,
)


@pytest.fixture(params=[1 << 20, 0], ids=["repeated on the host", "repeated on the device"])
def build(monkeypatch, write_table, request):
    """``build(in_file)``: the n-gram layer over one table in bf16, in memory or in files."""
    written = []
    monkeypatch.setattr(embedding, "_FEW", request.param)

    def build(in_file, **settings):
        if not written:
            written.append(write_table(rows=ROWS, dim=DIM, parts=PARTS))
        return build_layer(monkeypatch, written[0], in_file, **settings)

    return build


@pytest.mark.parametrize("requests", STEPS.values(), ids=STEPS)
def test_equal_to_a_table_in_memory(build, requests):
    assert torch.equal(stage(build(True), requests), look_up(build(False), requests))


@pytest.mark.parametrize("form", ["plain", *FORMS])
@pytest.mark.parametrize("ahead", [0, 20, 30])
def test_rows_of_every_format_partly_read_ahead(monkeypatch, write_table, form, ahead):
    """Repeated after they were turned into activations, and before."""
    layer = build_layer(monkeypatch, write_table(rows=ROWS, dim=32, parts=PARTS, form=form), True).ngram_embedding
    ids, rows = np.random.default_rng(0).integers(0, ROWS, (30, HEADS)), []
    for few in (0, 1 << 20):
        monkeypatch.setattr(embedding, "_FEW", few)
        if ahead:
            layer.fetcher.read_ahead(lambda: ids[:ahead])
            layer.fetcher._ahead.records.result()
        assert layer.stage(ids, 30) is None
        rows.append(layer.rows[:30].clone())
    assert torch.equal(*rows) and rows[0].any()
    scales = layer.table.gather(torch.from_numpy(ids))
    assert torch.equal(rows[0], dequantize(layer.table.table, *scales, layer.rows.dtype))


def test_rows_differ_between_tokens(build):
    """The comparison above would notice a wrong order."""
    rows = stage(build(True), STEPS["one prompt"])
    assert len({row.numpy().tobytes() for row in rows.view(torch.int16)}) == len(rows)


def test_chunks_give_the_rows_of_the_whole_prompt(build):
    layer, prompt = build(True), random_tokens(30, 10)
    whole = stage(layer, [([], prompt)]).clone()
    for size in (1, 2, 7):
        pieces = [stage(layer, [(prompt[:a], prompt[a : a + size])]).clone() for a in range(0, len(prompt), size)]
        assert torch.equal(torch.cat(pieces), whole)


def test_padding_is_zero_and_the_rest_untouched(build):
    layer = build(True)
    layer.ngram_embedding.rows.fill_(torch.nan)
    rows = stage(layer, STEPS["one prompt"], padded=24)
    assert torch.equal(rows[:20], look_up(build(False), STEPS["one prompt"]))
    assert not rows[20:].any()
    assert layer.ngram_embedding.rows[24:].isnan().all()


def test_the_buffer_never_moves(build):
    """A captured graph has its address."""
    layer = build(True)
    address = layer.ngram_embedding.rows.data_ptr()
    for requests in STEPS.values():
        assert stage(layer, requests).data_ptr() == address


@pytest.mark.parametrize("names", [None, ["_warmup_0_", "_warmup_1_", "_warmup_2_"], ["_v2_mixed_warmup_decode_"] * 3])
def test_made_up_batches_stage_zeros_and_touch_no_file(build, names):
    """Without requests in the runner's states, and those that the warm-up of kernels adds."""
    layer = build(True)
    stage(layer, STEPS["one prompt"])
    before = layer.ngram_embedding.counters.snapshot()
    layer.ngram_embedding.table.close()  # any read would now raise
    assert not stage(layer, STEPS["packed prompts"], held=bool(names), names=names).any()
    assert layer.ngram_embedding.counters.snapshot() == before


def test_a_client_cannot_pass_for_a_warm_up(build):
    """vLLM puts a random end behind the name that a client gives its request."""
    rows = stage(build(True), STEPS["one prompt"], names=["_warmup_0_-a1b2c3d4"])
    assert torch.equal(rows, look_up(build(False), STEPS["one prompt"]))


def test_a_lost_file_fails_the_step(build, monkeypatch):
    """Also where requests could be ended one by one: all of them would be."""
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    layer = build(True)
    layer.ngram_embedding.table.close()
    with pytest.raises(errors.RowReadFailed, match="No row of that file can be read any more"):
        stage(layer, STEPS["decodes"])
    assert layer.ngram_embedding.counters.failures == 1


@pytest.fixture
def damaged(build):
    """A layer, a step, the file and offset of a row that only its third request needs, and which tokens need it."""
    layer, requests = build(True), STEPS["packed prompts"]
    batch, _, inputs = batch_of(requests)
    ids = layer.compute_ngram_ids(batch.input_ids, inputs["query_start_loc"], inputs["ngram_context"]).numpy()
    bounds = batch.query_start_loc_np
    of = [set(ids[a:b].ravel()) for a, b in zip(bounds[:-1], bounds[1:])]
    rows = layer.ngram_embedding.table.table.rows
    # The last row of its file: nothing behind it is cut off with it.
    row = max(of[2] - of[0] - of[1])
    files, offsets = rows.place(np.array([row]))
    return layer, requests, rows.paths[files[0]], int(offsets[0]), np.isin(ids, row)


def test_a_failing_read_names_the_requests_that_needed_it(damaged, monkeypatch):
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "0")
    layer, requests, path, offset, _ = damaged
    os.truncate(path, offset + 3)
    with pytest.raises(errors.RowReadFailed, match=f"{path}: expected .* at offset {offset}, found 3 bytes") as caught:
        stage(layer, requests)
    assert "r2" in caught.value.requests


def test_only_the_requests_that_needed_it_get_nan(build, damaged, monkeypatch):
    """Which their logits then are, for which the scheduler ends them; nothing else stands in place of the rows."""
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    layer, requests, path, offset, needed = damaged
    wanted = look_up(build(False), requests)
    queue = layer.ngram_embedding.table._rows.pool.queue

    def fail(spans, results):
        hit = (spans.offset <= offset) & (offset < spans.offset + spans.size) & (spans.fd == descriptor)
        return np.where(hit, -errno.EIO, results)

    files = layer.ngram_embedding.table._rows
    descriptor = files._descriptors[files.location.paths.index(path)]
    answer_with(monkeypatch, queue, fail)
    rows = stage(layer, requests)
    lost = rows.view(len(needed), -1, DIM).isnan()
    assert torch.from_numpy(needed)[..., None].expand_as(lost)[lost].any() and (lost.any(-1) == lost.all(-1)).all()
    assert lost.all(-1)[torch.from_numpy(needed)].all()
    assert torch.equal(torch.where(rows.isnan(), wanted, rows), wanted)
    # Neighbours on disk are read together, and lost together: which requests that are is on the exception.
    assert not lost[: len(requests[0][1])].all()


def test_why_requests_end_is_kept_for_the_scheduler(damaged, monkeypatch):
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    layer, requests, path, offset, _ = damaged
    os.truncate(path, offset + 3)
    batch, states, inputs = batch_of(requests)
    stager = PLERowStager(torch.nn.ModuleList([layer]))
    stager.stage(batch, states, inputs)
    reason = stager._reasons["r2"]
    assert reason.startswith("Row ") and f"from {path.name} ({path}): expected 12 bytes at offset {offset}" in reason
    assert layer.ngram_embedding.counters.failures == 1
    monkeypatch.setattr(staging, "_REASONS", 1)
    for _ in range(3):
        stager.stage(batch, states, inputs)
    assert len(stager._reasons) == 1


def test_each_request_hears_of_a_row_of_its_own(build, monkeypatch):
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    layer, requests = build(True), STEPS["packed prompts"]
    for path in layer.ngram_embedding.table.paths:
        os.truncate(path, 0)
    batch, states, inputs = batch_of(requests)
    ids = layer.compute_ngram_ids(batch.input_ids, inputs["query_start_loc"], inputs["ngram_context"]).numpy()
    stager = PLERowStager(torch.nn.ModuleList([layer]))
    stager.stage(batch, states, inputs)
    bounds = batch.query_start_loc_np
    rows = layer.ngram_embedding.table.table.rows
    for name, begin, end in zip(batch.req_ids, bounds[:-1], bounds[1:], strict=True):
        row = int(ids[begin:end].ravel()[0])
        files, offsets = rows.place(np.array([row]))
        place = f"Row {row} of the n-gram table could not be read from {rows.paths[files[0]].name} "
        assert stager._reasons[name].startswith(place) and f"at offset {offsets[0]}, found" in stager._reasons[name]
        assert "needed by" not in stager._reasons[name]


def test_a_row_that_the_table_does_not_have_ends_the_requests_that_need_it(build, monkeypatch):
    """As when numbers for hashing are damaged."""
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    layer, requests = build(True), STEPS["packed prompts"]
    batch, states, inputs = batch_of(requests)
    stager = PLERowStager(torch.nn.ModuleList([layer]))
    hash_, begin = stager._hashes[0], int(batch.query_start_loc_np[2])

    def beyond(*step):
        ids = hash_(*step).copy()
        ids[begin + 1, 3] = ROWS + 5
        return ids

    monkeypatch.setattr(stager, "_hashes", [beyond])
    stager.stage(batch, states, inputs)
    assert list(stager._reasons) == ["r2"] and layer.ngram_embedding.counters.failures == 1
    assert f"Row {ROWS + 5} of the n-gram table could not be read from " in stager._reasons["r2"]
    assert f"found a table of {ROWS} rows." in stager._reasons["r2"]
    lost = layer.ngram_embedding.rows[: batch.num_tokens].isnan().all(-1)
    assert lost.sum() == 1 and lost[begin + 1, 3]


def test_a_stage_without_the_layer_has_nothing_to_do(build):
    batch, states, inputs = batch_of(STEPS["decodes"])
    PLERowStager(torch.nn.Linear(2, 2)).stage(batch, states, inputs)
    in_memory = build(False)
    PLERowStager(torch.nn.ModuleList([in_memory])).stage(batch, states, inputs)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_of_two_reads_all_rows(build, rank):
    expected = look_up(build(False), STEPS["packed prompts"])
    layer = build(True, world=2, rank=rank, sp=True)
    assert not layer.use_reduce_scatter and not layer.ngram_embedding.reduce_results
    layer.use_sequence_parallel = False  # sharding by token needs a real group
    assert torch.equal(stage(layer, STEPS["packed prompts"]), expected)
    assert build(False, sp=True).use_reduce_scatter  # upstream's choice stays for a table in memory


def test_rows_are_cast_like_a_loaded_table(build):
    assert torch.equal(
        stage(build(True, params=torch.float32), STEPS["one prompt"]),
        look_up(build(False, params=torch.float32), STEPS["one prompt"]),
    )


def test_the_table_is_no_parameter(build):
    embedding = build(True).ngram_embedding
    assert not list(embedding.parameters()) and not embedding.state_dict()
    assert embedding.weight.is_meta and embedding.weight.shape == (ROWS, DIM)
    assert sum(b.nbytes for b in embedding.buffers()) == MAX_TOKENS * HEADS * DIM * 2


def test_weights_for_the_table_are_refused(build):
    """A weight update must not be dropped in silence."""
    layer = build(True)
    with pytest.raises(errors.TableNotLoadable, match="host_file_gather"):
        layer.load_weights([("ngram_embedding.shard_0.weight", torch.zeros(85, DIM))])


@pytest.mark.parametrize("quantized", [False, True])
def test_missing_weights_are_still_noticed(build, quantized):
    model = torch.nn.ModuleDict({"ple": build(True), "proj": torch.nn.Linear(2, 2)})
    loader = DefaultModelLoader(LoadConfig())
    loader.track_weights_loading(model, {"proj.weight", "proj.bias"}, quantized)
    with pytest.raises(ValueError, match="proj.bias"):
        loader.track_weights_loading(model, {"proj.weight"}, quantized)


def test_the_forward_does_not_hash(build, monkeypatch):
    layer = build(True)
    monkeypatch.setattr(layer, "compute_ngram_ids", lambda *_, **__: pytest.fail("hashed in the forward"))
    batch, _, inputs = batch_of(STEPS["decodes"])
    layer.start_prefetch(batch.input_ids, inputs["query_start_loc"], inputs["ngram_context"])
    layer(None, batch.input_ids, inputs["query_start_loc"], inputs["ngram_context"])


def test_a_damaged_table_stops_the_construction(build):
    build(True).ngram_embedding.table.table.rows.shards[2].path.unlink()
    with pytest.raises(errors.MissingShard, match="model-02.safetensors"):
        build(True)
