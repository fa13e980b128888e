"""The layer without a weight, against upstream's table in memory, and what is staged for it."""

from types import SimpleNamespace

import pytest
import torch

from vllm.config import EngramConfig, LoadConfig
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.models.qwen4_exp.common import ngram_embedding as common
from vllm.models.qwen4_exp.nvidia import ngram_embedding as upstream
from vllm.models.qwen4_exp.ple_store import embedding as ours
from vllm.models.qwen4_exp.ple_store import errors
from vllm.models.qwen4_exp.ple_store.staging import PLERowStager

EOS = 0
HEADS, DIM, PARTS = 4, 6, 5
MAX_TOKENS = 40
CONFIG = SimpleNamespace(
    ngram_size=3,
    heads_per_ngram=2,
    eos_token_id=EOS,
    vocab_size=64,
    ngram_vocab_size_base=101,
    make_ngram_vocab_size_divisible_by=8,
    split_ngram_parts=PARTS,
)
ROWS = 424  # 101 + 103 + 107 + 109 = 420, padded


@pytest.fixture
def build(monkeypatch, write_table):
    """``build(in_file=True)``: the n-gram layer over a fresh table, in memory or in files.

    ``world`` and ``rank`` pretend a tensor-parallel group.
    """
    written = {}

    def build(in_file, table=torch.bfloat16, params=torch.bfloat16, world=1, rank=0, row_format=None, sp=False):
        if table not in written:
            written[table] = write_table(rows=ROWS, dim=DIM, parts=PARTS, dtype=table)
        engram = EngramConfig(host_file_gather=in_file, cpu_offload=in_file)
        model = SimpleNamespace(model=str(written[table].folder), hf_text_config=CONFIG)
        config = SimpleNamespace(engram_config=engram, model_config=model, load_config=LoadConfig())
        group = SimpleNamespace(world_size=world, rank_in_group=rank)
        for module in (upstream, ours):
            monkeypatch.setattr(module, "get_current_vllm_config", lambda: config)
        for module in (upstream, common):
            monkeypatch.setattr(module, "get_etp_group", lambda: group)
        for module in (upstream, common, parallel_state):
            monkeypatch.setattr(module, "get_tp_group", lambda: group)
        layer = upstream.Qwen4ExpNGramEmbedding(
            SimpleNamespace(**CONFIG.__dict__, ple_embedding_dtype=row_format),
            HEADS * DIM,
            0,
            MAX_TOKENS,
            data_parallel_rank=0,
            prefix="language_model.model.layers.1.ple.ple_embedding",
            params_dtype=params,
            use_sequence_parallel=sp,
        )
        layer.table_values = written[table].values
        if not in_file:
            full = -(-ROWS // PARTS)
            shards = written[table].values.view(torch.uint8).split(full)
            layer.load_weights((f"ngram_embedding.shard_{i}.weight", s.view(table)) for i, s in enumerate(shards))
        return layer

    return build


def batch_of(requests, padded=None, held=True):
    """A packed step. ``requests``: (tokens before this step, tokens of this step) each."""
    starts = [0]
    context = torch.full((8, 2), EOS, dtype=torch.int32)
    for number, (before, now) in enumerate(requests):
        starts.append(starts[-1] + len(now))
        past = ([EOS, EOS] + list(before))[-2:]
        context[number] = torch.tensor(past)
    total = starts[-1]
    padded = total if padded is None else padded
    tokens = torch.cat([torch.tensor(now) for _, now in requests] + [torch.full((padded - total,), 7)]).int()
    batch = SimpleNamespace(
        req_ids=[f"r{i}" for i in range(len(requests))],
        num_reqs=len(requests),
        num_tokens=total,
        num_tokens_after_padding=padded,
        input_ids=tokens,
    )
    states = SimpleNamespace(req_id_to_index={name: i for i, name in enumerate(batch.req_ids)} if held else {})
    bounds = torch.tensor(starts + [total] * (9 - len(starts)), dtype=torch.int32)
    return batch, states, {"query_start_loc": bounds, "ngram_context": context}


def stage(layer, requests, **kwargs):
    """Stage a step and run the layer's forward: ``[padded tokens, HEADS * DIM]``."""
    batch, states, inputs = batch_of(requests, **kwargs)
    PLERowStager(torch.nn.ModuleList([layer])).stage(batch, states, inputs)
    return layer(None, batch.input_ids, inputs["query_start_loc"], inputs["ngram_context"])


def look_up(layer, requests, **kwargs):
    """Upstream's forward over a table in memory, for the same step."""
    batch, _, inputs = batch_of(requests, **kwargs)
    return layer(None, batch.input_ids, inputs["query_start_loc"], inputs["ngram_context"])


def random_tokens(count, seed):
    tokens = torch.randint(1, 64, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens if count < 4 else [*tokens[:-3], EOS, *tokens[-2:]]  # an end of text within


STEPS = {
    "one prompt": [([], random_tokens(20, 0))],
    "packed prompts": [([], random_tokens(9, 1)), ([], random_tokens(1, 2)), ([], random_tokens(13, 3))],
    "a chunk after another": [(random_tokens(8, 4), random_tokens(12, 5))],
    "decodes": [(random_tokens(n, n), random_tokens(1, 90 + n)) for n in (1, 2, 5, 9)],
    "decodes beside a chunk": [(random_tokens(5, 6), [3]), (random_tokens(2, 7), random_tokens(11, 8)), ([], [9])],
}


@pytest.mark.parametrize("requests", STEPS.values(), ids=STEPS)
def test_equal_to_a_table_in_memory(build, requests):
    assert torch.equal(stage(build(True), requests), look_up(build(False), requests))


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


def test_dummy_batches_stage_zeros_and_touch_no_file(build, monkeypatch):
    layer = build(True)
    stage(layer, STEPS["one prompt"])
    layer.ngram_embedding.table.close()  # any read would now raise
    monkeypatch.setattr(layer, "compute_ngram_ids", lambda *_: pytest.fail("hashed a dummy batch"))
    assert not stage(layer, STEPS["packed prompts"], held=False).any()


def test_a_failing_read_fails_the_step(build):
    layer = build(True)
    layer.ngram_embedding.table.close()
    with pytest.raises(errors.RowReadFailed):
        stage(layer, STEPS["decodes"])


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


def test_fp8_rows_are_dequantized_by_the_scale(build):
    kind = dict(table=torch.float8_e4m3fn, row_format="float8_e4m3fn")
    in_file, in_memory = build(True, **kind), build(False, **kind)
    results = []
    for layer, run in ((in_file, stage), (in_memory, look_up)):
        layer.load_weights([("ngram_embedding.weight_scale", torch.tensor(0.37))])
        rows = run(layer, STEPS["packed prompts"])
        assert rows.dtype == torch.float8_e4m3fn
        results.append(layer.ngram_embedding.dequantize(rows, torch.bfloat16))
    assert results[0].any() and torch.equal(*results)


def test_fp8_rows_without_an_fp8_config(build):
    with pytest.raises(errors.WrongDtype, match="BF16 or F16 or F32 .*found F8_E4M3.*ple_embedding_dtype"):
        build(True, table=torch.float8_e4m3fn)


def test_nvfp4_is_refused(build):
    with pytest.raises(errors.HostFileGatherRefused, match="NVFP4' for language_model.*two tensors"):
        build(True, row_format="nvfp4")


def test_the_table_is_no_parameter(build):
    embedding = build(True).ngram_embedding
    assert not list(embedding.parameters()) and not embedding.state_dict()
    assert embedding.weight.is_meta and embedding.weight.shape == (ROWS, DIM)
    assert sum(b.nbytes for b in embedding.buffers()) == MAX_TOKENS * HEADS * DIM * 2


def test_weights_for_the_table_are_refused(build):
    """A weight update must not be dropped in silence."""
    layer = build(True)
    with pytest.raises(errors.TableNotLoadable, match="host_file_gather"):
        layer.load_weights([("ngram_embedding.shard_0.weight", layer.table_values[:85])])


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
    build(True).ngram_embedding.table.location.shards[2].path.unlink()
    with pytest.raises(errors.MissingShard, match="model-02.safetensors"):
        build(True)
