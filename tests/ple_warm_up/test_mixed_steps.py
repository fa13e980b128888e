"""What mixed steps launch is compiled at start: upstream's dispatch and builder on the CPU, its kernels recorded.

A launch is what Triton compiles by: of a pointer its type and whether it is a multiple of 16 bytes, of an integer
whether it is 1 or a multiple of 16, and all constants.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.model_executor.layers.mamba.checkpoint import MambaPrefillCheckpointExporter
from vllm.models.qwen4_exp import ple_warm_up
from vllm.models.qwen4_exp.common.ops import ple as ops
from vllm.models.qwen4_exp.nvidia import ple_layer
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.short_conv_attn import PleShortConvAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

CHANNELS, TAPS, DILATION, SLOTS, DEVICE = 64, 4, 3, 40, torch.device("cpu")
WINDOW = (TAPS - 1) * DILATION


@pytest.fixture
def launches(monkeypatch) -> set[tuple]:
    """Every launch of upstream's two kernels so far; nothing is computed."""
    seen: set[tuple] = set()

    class Recorder:
        def __init__(self, kernel, any_number: set[str]) -> None:
            self.name, self.names, self.any_number = kernel.__name__, kernel.arg_names, any_number

        def __getitem__(self, grid):
            return self.launch

        def launch(self, *given, **constants) -> None:
            arguments = tuple(self.kind(name, value) for name, value in zip(self.names, given))
            seen.add((self.name, arguments, tuple(sorted(constants.items()))))

        def kind(self, name, value):
            if isinstance(value, torch.Tensor):
                return value.dtype, value.data_ptr() % 16 == 0
            if value is None or name in self.any_number:
                return type(value)
            return "1" if value == 1 else "16" if value % 16 == 0 else "any"

    monkeypatch.setattr(
        ops, "_ple_conv_kernel", Recorder(ops._ple_conv_kernel, {"num_reqs", "bs_iters", "has_token_map"})
    )
    monkeypatch.setattr(ops, "_ple_conv_writeback_kernel", Recorder(ops._ple_conv_writeback_kernel, {"has_token_map"}))
    monkeypatch.setattr(ple_layer, "ple_conv", ops.ple_conv)
    return seen


def config(drafts: int, mode: str, requests: int = 16) -> SimpleNamespace:
    compilation = SimpleNamespace(
        max_cudagraph_capture_size=None,
        cudagraph_mode=CUDAGraphMode.PIECEWISE,
        fast_moe_cold_start=False,
        static_forward_context={},
    )
    speculative = SimpleNamespace(
        num_speculative_tokens=drafts, parallel_drafting=False, use_eagle_block_drop=lambda: False
    )
    return SimpleNamespace(
        compilation_config=compilation,
        speculative_config=speculative if drafts else None,
        num_speculative_tokens=drafts,
        num_hash_lookahead_tokens=0,
        cache_config=SimpleNamespace(use_replayssm=False, replayssm_buffer_len=0, mamba_cache_mode=mode),
        scheduler_config=SimpleNamespace(max_num_seqs=requests),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )


def layer(drafts: int, dtype=torch.bfloat16, sequence_parallel=False) -> nn.Module:
    made = ple_layer.Qwen4ExpPLELayer.__new__(ple_layer.Qwen4ExpPLELayer)
    nn.Module.__init__(made)
    made.prefix, made.use_sequence_parallel, made.num_spec_tokens = "ple", sequence_parallel, drafts
    made.hc_hidden_size, made.short_conv_dilation, made.conv_state_len = CHANNELS, DILATION, WINDOW
    made.conv1d = nn.Conv1d(CHANNELS, CHANNELS, TAPS, groups=CHANNELS, bias=False, dtype=dtype)
    made.model_config = SimpleNamespace(dtype=dtype)
    made._checkpoint_exporter = MambaPrefillCheckpointExporter(state_len=WINDOW)
    made.kv_cache = (torch.zeros(SLOTS, WINDOW + drafts, CHANNELS, dtype=dtype),)
    return made


def step(made: nn.Module, vllm_config, decodes=(), prompts=(), drafted=()) -> None:
    """A step of upstream's, as its builder describes it: tokens of each request, requests with drafts first."""
    spec = MambaSpec(
        block_size=64,
        shapes=((WINDOW, CHANNELS),),
        dtypes=(torch.bfloat16,),
        mamba_cache_mode=vllm_config.cache_config.mamba_cache_mode,
        num_speculative_blocks=made.num_spec_tokens,
    )
    builder = PleShortConvAttentionMetadataBuilder(spec, ["ple"], vllm_config, DEVICE)
    lengths = torch.tensor([*drafted, *decodes, *prompts], dtype=torch.int32)
    count, before = len(lengths), len(drafted) + len(decodes)
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()))
    past = torch.tensor([5] * before + [0] * len(prompts), dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=past + lengths,
        seq_lens_cpu_upper_bound=past + lengths,
        num_reqs=count,
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(lengths.max()),
        max_seq_len=64,
        # Wider than one column, as a runner's.
        block_table_tensor=torch.arange(1, 1 + 7 * 16, dtype=torch.int32).view(16, 7)[:count],
        slot_mapping=torch.zeros(0),
        is_prefilling=past == 0,
    )
    kinds = {}
    if made.num_spec_tokens:
        of_drafts = [length - 1 for length in drafted] + [-1] * (count - len(drafted))
        kinds = {
            "num_accepted_tokens": torch.ones(count, dtype=torch.int32),
            "num_decode_draft_tokens_cpu": torch.tensor(of_drafts, dtype=torch.int32),
        }
    metadata = builder.build(0, common, **kinds)
    inputs = torch.zeros(int(starts[-1]), CHANNELS, dtype=made.model_config.dtype)
    with override_forward_context(create_forward_context({"ple": metadata}, vllm_config)):
        made._short_conv(inputs, torch.zeros_like(inputs), inputs)


def upstream_warm_up(made, vllm_config) -> None:
    """The steps of ``warmup_kernels``: prompts, decodes, and one decode beside a request with drafts."""
    query = made.num_spec_tokens + 1
    step(made, vllm_config, prompts=[query + 1] * 8)
    if not made.num_spec_tokens:
        for count in (8, 2, 1):
            step(made, vllm_config, decodes=[1] * count)
        return
    for case in (
        {"drafted": [query] * 8},
        {"drafted": [query], "decodes": [1]},
        {"decodes": [1, 1]},
        {"drafted": [query]},
        {"decodes": [1]},
    ):
        step(made, vllm_config, **case)


def worker(made: nn.Module, vllm_config, requests: int = 16) -> SimpleNamespace:
    return SimpleNamespace(
        get_model=lambda: nn.Sequential(nn.Linear(2, 2), made),
        model_runner=SimpleNamespace(max_num_reqs=requests, max_num_tokens=2048),
        vllm_config=vllm_config,
    )


def mixed(drafts: int, most: int = 16) -> list[dict]:
    """Steps of prompts beside others, of up to ``most`` requests."""
    found = []
    for decodes in range(10):
        for prompts in ([7], [2, 16], [5, 5, 5, 5]):
            for drafted in ([], [drafts + 1], [2], [1, 2], [2, 1, 2, 1, 2]) if drafts else ([],):
                if (decodes or drafted) and decodes + len(prompts) + len(drafted) <= most:
                    found.append({"decodes": [1] * decodes, "prompts": prompts, "drafted": drafted})
    return found


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("drafts", [0, 1, 2, 3])
def test_every_mixed_step_is_compiled_at_start(launches, drafts, mode):
    """And upstream's warm-up alone leaves some of them to the first users: else this topic can go."""
    made, vllm_config = layer(drafts), config(drafts, mode)
    upstream_warm_up(made, vllm_config)
    by_upstream = set(launches)
    ple_warm_up.warm_up(worker(made, vllm_config))
    at_start = set(launches)
    for case in mixed(drafts):
        step(made, vllm_config, **case)
    assert not launches - at_start
    assert launches - by_upstream


@pytest.mark.parametrize(("requests", "drafts"), [(2, 0), (4, 0), (2, 2), (3, 2), (4, 2)])
def test_few_users(launches, requests, drafts):
    """Steps that a small server cannot have are left out, those that it can have are not."""
    made, vllm_config = layer(drafts), config(drafts, "none", requests)
    upstream_warm_up(made, vllm_config)
    ple_warm_up.warm_up(worker(made, vllm_config, requests))
    at_start = set(launches)
    for case in mixed(drafts, requests):
        step(made, vllm_config, **case)
    assert not launches - at_start


def test_one_user_has_no_mixed_steps(launches):
    ple_warm_up.warm_up(worker(layer(3), config(3, "none", 1), 1))
    assert not launches


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_nothing_is_written_to_the_cache(sequence_parallel):
    """By the twins that run here instead of the kernels; every state is NaN, and stays so."""
    made, vllm_config = layer(2, sequence_parallel=sequence_parallel), config(2, "none")
    made.kv_cache[0].fill_(float("nan"))
    ple_warm_up.warm_up(worker(made, vllm_config))
    assert made.kv_cache[0].isnan().all()


@pytest.mark.parametrize("wanted", [*ple_warm_up.steps(2, 16, 64)])
def test_nothing_is_written_by_the_kernels(monkeypatch, wanted):
    """In the interpreter, in fp32: it multiplies bf16 as integers."""
    monkeypatch.setattr(ple_layer, "ple_conv", ops.ple_conv)
    made = layer(2, torch.float32)
    made.kv_cache[0].fill_(float("nan"))
    ple_warm_up.run(made, wanted, config(2, "none"))
    assert made.kv_cache[0].isnan().all()


def test_a_stage_without_the_layer(launches, monkeypatch):
    made = worker(nn.Linear(2, 2), config(0, "none"))
    ple_warm_up.warm_up(made)
    monkeypatch.delitem(sys.modules, ple_layer.__name__)
    ple_warm_up.warm_up(worker(layer(0), config(0, "none")))
    assert not launches


def test_upstreams_warm_up_calls_it(monkeypatch):
    """After the sparse layers', and not where nothing is to be compiled at start."""
    from vllm.model_executor.warmup import kernel_warmup

    called = []
    for name in vars(kernel_warmup).copy():
        if name.endswith("_warmup") and callable(getattr(kernel_warmup, name)) and name != "kernel_warmup":
            monkeypatch.setattr(kernel_warmup, name, lambda *_, name=name: called.append(name))
    for other in ("minimax_m3_msa_warmup", "step5_dsa_warmup"):
        stand_in = SimpleNamespace(**{other: None})
        monkeypatch.setitem(sys.modules, f"vllm.model_executor.warmup.{other}", stand_in)
    monkeypatch.setattr(ple_warm_up, "warm_up", lambda given: called.append(given))
    for enabled in (True, False):
        called.clear()
        kernels = SimpleNamespace(enable_jit_warmup=enabled, enable_cutedsl_warmup=False)
        made = SimpleNamespace(
            use_v2_model_runner=True,
            vllm_config=SimpleNamespace(
                kernel_config=kernels,
                model_config=None,
                compilation_config=SimpleNamespace(cudagraph_capture_sizes=[]),
            ),
            model_runner=SimpleNamespace(jit_warmup_registry=SimpleNamespace(warmup=lambda: None)),
        )
        kernel_warmup.kernel_warmup(made, process_local_only=True)
        assert (made in called) is enabled
        if enabled:
            assert called.index(made) == called.index("qwen4_exp_qsa_triton_warmup") + 1
