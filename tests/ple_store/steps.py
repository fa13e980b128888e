"""The n-gram layer over a table on disk, and steps to run it on."""

from types import SimpleNamespace

import numpy as np
import torch

from vllm.config import EngramConfig, LoadConfig
from vllm.distributed import parallel_state
from vllm.models.qwen4_exp.common import ngram_embedding as common
from vllm.models.qwen4_exp.nvidia import ngram_embedding as upstream
from vllm.models.qwen4_exp.ple_store import embedding as ours
from vllm.models.qwen4_exp.ple_store import methods
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


def answer_with(monkeypatch, queue, change) -> None:
    """Let a queue of reads answer ``change(spans, results)`` instead of its results."""
    prepare = queue.prepare

    def changed(spans, target, nowait):
        batch = prepare(spans, target, nowait)
        return SimpleNamespace(run=batch.run, results=lambda: change(spans, batch.results()))

    monkeypatch.setattr(queue, "prepare", changed)


def build_layer(
    monkeypatch, written, in_file, params=torch.bfloat16, world=1, rank=0, declared=None, sp=False, quant_config=None
):
    """Upstream's n-gram layer over ``written``, in memory or in files.

    ``world`` and ``rank`` pretend a tensor-parallel group; ``declared`` is ple_embedding_dtype.
    """
    text_config = SimpleNamespace(**CONFIG.__dict__, ple_embedding_dtype=declared)
    config = SimpleNamespace(
        engram_config=EngramConfig(host_file_gather=in_file, cpu_offload=in_file),
        model_config=SimpleNamespace(model=str(written.folder), hf_text_config=text_config),
        load_config=LoadConfig(),
    )
    group = SimpleNamespace(world_size=world, rank_in_group=rank)
    for module in (upstream, ours, methods):
        monkeypatch.setattr(module, "get_current_vllm_config", lambda: config)
    for module in (upstream, common):
        monkeypatch.setattr(module, "get_etp_group", lambda: group)
    for module in (upstream, common, parallel_state):
        monkeypatch.setattr(module, "get_tp_group", lambda: group)
    layer = upstream.Qwen4ExpNGramEmbedding(
        text_config,
        HEADS * written.shape.dim,
        0,
        MAX_TOKENS,
        data_parallel_rank=0,
        prefix="language_model.model.layers.1.ple.ple_embedding",
        quant_config=quant_config,
        params_dtype=params,
        use_sequence_parallel=sp,
    )
    if not in_file:
        layer.load_weights(written.tensors())
    return layer


def batch_of(requests, padded=None, held=True, names=None):
    """A packed step. ``requests``: (tokens before this step, tokens of this step) each; ``names`` of them."""
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
        req_ids=names or [f"r{i}" for i in range(len(requests))],
        num_reqs=len(requests),
        num_tokens=total,
        num_tokens_after_padding=padded,
        num_draft_tokens=0,
        input_ids=tokens,
        idx_mapping_np=np.arange(len(requests)),
        num_computed_tokens_np=np.array([len(before) for before, _ in requests]),
        query_start_loc_np=np.array(starts),
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
