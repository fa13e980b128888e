"""What a layer on a GPU calls, on stand-ins: which kernels get what, and upstream's where they are chosen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm.models.qwen4_exp.compact_kv import impl as module
from vllm.models.qwen4_exp.compact_kv.choice import Kernels
from vllm.models.qwen4_exp.compact_kv.prepare import prepare, warm_up
from vllm.models.qwen4_exp.qsa import reference
from vllm.models.qwen4_exp.qsa.formats import FP8, INT8, kv_format, views
from vllm.models.qwen4_exp.qsa.write import reference as write_reference

HEADS, KV_HEADS, WIDTH, PAGE = 4, 2, 16, 4


def cache_of(cache_dtype, blocks=3):
    form = kv_format(cache_dtype)
    return torch.zeros(blocks, KV_HEADS, PAGE, form.content(WIDTH), dtype=form.dtype)


@pytest.fixture
def launches(monkeypatch):
    """Launches of the kernel before attention, which does not run: programs, arguments by name, constants."""
    import vllm.models.qwen4_exp.nvidia.model  # noqa: F401  the kernel's module cannot be imported first
    from vllm.models.qwen4_exp.compact_kv import one_launch

    seen, names = [], one_launch.prepare_kernel.arg_names

    class Kernel:
        def __getitem__(self, grid):
            return lambda *given, num_warps, **constants: seen.append((grid[0], dict(zip(names, given)), constants))

    monkeypatch.setattr(one_launch, "prepare_kernel", Kernel())
    return seen


def index_of(tokens: int, positions, table, projected=None) -> tuple:
    """Upstream's positional arguments: an indexer of two heads, whose groups are of four tokens."""
    rows = torch.zeros(tokens, 3 * WIDTH).bfloat16() if projected is None else projected
    slots, starts = torch.full((tokens,), -1), torch.tensor([0, tokens], dtype=torch.int32)
    norm = torch.ones(WIDTH).bfloat16()
    state, compressed = (torch.zeros(2, size, WIDTH).bfloat16() for size in (8, PAGE))
    query = torch.zeros(tokens, 2, WIDTH).bfloat16()
    return (
        *rows.split((2 * WIDTH, WIDTH), dim=1), positions, table, norm, norm, 1e-6, query, state, slots,
        torch.zeros(1, 1, dtype=torch.int32), starts, torch.arange(tokens), compressed, slots,
        torch.tensor([[-1, 0]], dtype=torch.int32),
    )  # fmt: skip


def test_one_launch_has_upstreams_index_and_our_main_part(launches):
    """Upstream's launcher derives heads from shapes: it has to see none of the main attention's."""
    positions, table = torch.arange(3), torch.zeros(8, WIDTH // 2)
    qkv = torch.zeros(3, 2 * (HEADS + KV_HEADS) * WIDTH).bfloat16()
    # As the indexer passes an fp8 cache.
    bound = cache_of("fp8").transpose(1, 2).view(torch.float8_e4m3fn)
    slots = torch.tensor([4, 5, -1])
    index = index_of(3, positions, table)
    query, gate = prepare(
        FP8,
        WIDTH,
        *index,
        compress_ratio=4,
        mrope_section=None,
        rope_pos_offset=None,
        main_qkv=qkv,
        main_q_norm_weight=torch.ones(WIDTH),
        main_k_norm_weight=torch.ones(WIDTH),
        main_eps=1e-5,
        main_kv_cache=bound,
        main_slot_mapping=slots,
        main_k_scale=0.5,
        main_v_scale=0.25,
    )
    ((programs, given, constants),) = launches
    # One group of keys, and two heads of three tokens by two and two.
    assert given["index_programs"] == 1 + 2 and programs == 3 + 3 * (HEADS + 2 * KV_HEADS)
    assert query.shape == gate.shape == (3, HEADS, WIDTH) and given["query_ptr"] is query and given["gate_ptr"] is gate
    assert given["q_ptr"] is index[0] and given["num_tokens"] == 3 and given["eps"] == 1e-6
    assert given["qkv_ptr"] is qkv and given["positions_ptr"] is positions and given["slots_ptr"] is slots
    assert (given["main_eps"], given["k_scale"], given["v_scale"]) == (1e-5, 0.5, 0.25)
    keys, values = given["keys_ptr"], given["values_ptr"]
    assert keys.shape == values.shape == (3, PAGE, KV_HEADS, WIDTH) and keys.dtype == torch.uint8
    assert values.data_ptr() - keys.data_ptr() == WIDTH and keys.data_ptr() == bound.data_ptr()
    assert (constants["HQ"], constants["MAIN_Q_HEADS"], constants["MAIN_KV_HEADS"]) == (2, HEADS, KV_HEADS)


class Upstream:
    """Stands for upstream's class: refuses what that refuses, and notes its calls."""

    def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi, window, kv_cache_dtype, *rest):
        assert kv_cache_dtype in ("auto", "fp8")
        self.head_size, self.calls = head_size, []

    def do_kv_cache_update(self, *arguments):
        self.calls.append("write")

    def forward_qsa(self, *arguments, **keywords):
        self.calls.append("attend")


@pytest.fixture
def built(monkeypatch):
    """An implementation as a layer builds it, with the references for kernels."""
    import sys

    package = "vllm.models.qwen4_exp.qsa"
    own = SimpleNamespace(sparse_paged_attention=reference.sparse_paged_attention)
    monkeypatch.setitem(sys.modules, f"{package}.attention", own)
    monkeypatch.setitem(sys.modules, f"{package}.write", write_reference)

    def build(cache_dtype, kernels):
        monkeypatch.setattr(module, "choose", lambda name: (kv_format(name), kernels))
        return module.own_impl(Upstream)(HEADS, WIDTH, 1.0, KV_HEADS, None, None, cache_dtype, None, "decoder", None)

    return build


def test_upstream_serves_what_it_is_chosen_for(built):
    impl = built("auto", Kernels.UPSTREAM)
    impl.do_kv_cache_update(None)
    impl.forward_qsa(None, output_gate=None)
    assert impl.calls == ["write", "attend"] and not impl.ours and impl.kv_cache_dtype == "auto"


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "int8_per_token_head"])
def test_ours_write_and_attend(built, cache_dtype):
    impl = built(cache_dtype, Kernels.OURS)
    layer = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0)
    cache = cache_of(cache_dtype)
    rows = torch.randn(2, KV_HEADS, WIDTH).bfloat16()
    impl.do_kv_cache_update(layer, rows, rows, cache, torch.tensor([5, -1]))
    layer.topk_indices_buffer = torch.tensor([[1, 1]], dtype=torch.int32)
    metadata = SimpleNamespace(num_actual_tokens=1, block_table=torch.tensor([[1]], dtype=torch.int32))
    out = torch.full((2, HEADS, WIDTH), torch.nan).bfloat16()
    gate = torch.full((2, HEADS, WIDTH), 50.0)
    query = torch.randn(2, HEADS, WIDTH).bfloat16()
    impl.forward_qsa(layer, query, None, None, cache, metadata, out, torch.tensor([0]), True, output_gate=gate)
    assert impl.calls == [] and impl.ours and impl.kv_cache_dtype == cache_dtype
    torch.testing.assert_close(out[0].view(KV_HEADS, -1, WIDTH)[:, 0], rows[0], rtol=2**-4, atol=1e-2)
    assert (out[1] == 0).all()


def test_scales_of_a_layer_are_for_fp8_alone(built):
    layer = SimpleNamespace(_k_scale_float=0.5, _v_scale_float=0.25)
    assert built("fp8", Kernels.OURS)._layer_scales(layer) == (0.5, 0.25)
    assert built("int8_per_token_head", Kernels.OURS)._layer_scales(layer) == (1.0, 1.0)


def layer_of(*, fused: bool, mrope: tuple[int, ...] | None = None, beside: bool = False):
    """What a warm-up reads of a sparse layer."""
    table = torch.zeros(8, WIDTH // 2)
    norm = SimpleNamespace(weight=torch.ones(WIDTH).bfloat16(), variance_epsilon=1e-6)
    return SimpleNamespace(
        use_fused_qsa_prepare=fused,
        fuse_indexer_projection=beside,
        indexer=SimpleNamespace(
            index_n_heads=2,
            index_kv_heads=1,
            index_head_dim=WIDTH,
            indexer_dtype=torch.bfloat16,
            compress_ratio=4,
            q_layernorm=norm,
            k_layernorm=norm,
            raw_key_cache=SimpleNamespace(
                kv_cache=torch.zeros(2, 8, WIDTH).bfloat16(), rope_position_offset=None, rope_position_cache=None
            ),
            compressed_key_cache=SimpleNamespace(kv_cache=torch.zeros(2, PAGE, WIDTH).bfloat16()),
        ),
        rotary_emb=SimpleNamespace(cos_sin_cache=table, **({"mrope_section": mrope} if mrope else {})),
        q_norm=norm,
        k_norm=norm,
        _k_scale_float=1.0,
        _v_scale_float=1.0,
    )


SHAPE = {"num_query_heads": HEADS, "selection_width": 11, "state_table": torch.zeros(4, 1, dtype=torch.int32)}


@pytest.mark.parametrize("fused", [False, True])
def test_warming_up_touches_nothing(monkeypatch, fused):
    monkeypatch.setattr(module, "choose", lambda name: (kv_format(name), Kernels.OURS))
    impl = module.own_impl(Upstream)(
        HEADS, WIDTH, 1.0, KV_HEADS, None, None, "int8_per_token_head", None, "decoder", None
    )
    impl.attend = reference.sparse_paged_attention
    cache, layer = cache_of("int8_per_token_head"), layer_of(fused=fused)
    views(cache, INT8, WIDTH).key_scales[:] = torch.nan
    kept = (cache, layer.indexer.raw_key_cache.kv_cache, layer.indexer.compressed_key_cache.kv_cache)
    before = [tensor.clone().view(torch.uint8) for tensor in kept]
    said = warm_up(impl, cache, torch.zeros(4, 1, dtype=torch.int32), layer=layer, **SHAPE)
    assert all(torch.equal(tensor.view(torch.uint8), was) for tensor, was in zip(kept, before))
    assert said == (f"int8 {'fused ' if fused else ''}write", "int8 decode", "int8 prefill")


def compiled_for(launch) -> list:
    """What Triton compiles a launch apart by: types, addresses and whole numbers as far as it looks at them."""
    _, given, constants = launch
    unspecialised = ("num_tokens", "num_state_blocks", "num_compressed_blocks", "num_k_work", "index_programs")

    def seen(value):
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        return (value == 1, value % 16 == 0) if isinstance(value, int) else type(value)

    return [*(seen(value) for name, value in given.items() if name not in unspecialised), constants]


@pytest.mark.parametrize("mrope", [None, (2, 1, 1)])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "int8_per_token_head"])
def test_the_writer_of_requests_is_compiled(monkeypatch, launches, cache_dtype, beside, mrope):
    """A request's launch, as the indexer makes it, is one that the warm-up has made before."""
    monkeypatch.setattr(module, "choose", lambda name: (kv_format(name), Kernels.OURS))
    impl = module.own_impl(Upstream)(HEADS, WIDTH, 1.0, KV_HEADS, None, None, cache_dtype, None, "decoder", None)
    monkeypatch.setattr(impl, "attend", lambda *arguments, **keywords: None)
    layer, cache = layer_of(fused=True, mrope=mrope, beside=beside), cache_of(cache_dtype)
    impl.warm_up(cache, torch.zeros(4, 1, dtype=torch.int32), layer=layer, **SHAPE)
    assert len(launches) == 1

    width = 2 * (HEADS + KV_HEADS) * WIDTH
    projected = torch.zeros(5, width + 3 * WIDTH * beside).bfloat16()
    positions = torch.zeros(3, 65, dtype=torch.int64) if mrope else torch.zeros(64, dtype=torch.int64)
    table = layer.rotary_emb.cos_sin_cache
    impl.prepare(
        *index_of(5, positions[..., :5], table, projected[:, width:] if beside else None),
        compress_ratio=4,
        mrope_section=mrope,
        rope_pos_offset=None,
        main_qkv=projected[:, :width],
        main_q_norm_weight=layer.q_norm.weight,
        main_k_norm_weight=layer.k_norm.weight,
        main_eps=layer.q_norm.variance_epsilon,
        main_kv_cache=cache.transpose(1, 2),
        main_slot_mapping=torch.arange(5),
        main_k_scale=layer._k_scale_float,
        main_v_scale=layer._v_scale_float,
    )
    assert compiled_for(launches[1]) == compiled_for(launches[0])


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "int8_per_token_head"])
def test_upstreams_own_class_can_be_built(monkeypatch, cache_dtype):
    """The constructor of the class that GPUs get, with the arguments that a layer passes; it refuses int8 by itself."""
    import vllm.models.qwen4_exp.nvidia.model  # noqa: F401  the layer's module cannot be imported first
    from vllm.models.qwen4_exp.compact_kv import choice
    from vllm.models.qwen4_exp.nvidia import qsa
    from vllm.v1.attention.backend import AttentionType

    upstream = qsa.Qwen4ExpQSAFlashAttentionImpl
    monkeypatch.setattr(qsa, "is_flash_attn_varlen_func_available", lambda: True)
    monkeypatch.setattr(choice, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    arguments = (24, 256, 256**-0.5, 2, None, None, cache_dtype, None, AttentionType.DECODER, None)
    impl = module.own_impl(upstream)(*arguments)
    assert (impl.kv_cache_dtype, impl.form, impl.head_size) == (cache_dtype, kv_format(cache_dtype), 256)
    assert impl.ours
    if cache_dtype == "int8_per_token_head":
        with pytest.raises(NotImplementedError):
            upstream(*arguments)


def test_one_backend_for_all_layers():
    import vllm.models.qwen4_exp.nvidia.model  # noqa: F401
    from vllm.models.qwen4_exp.compact_kv.backend import compact_backend
    from vllm.models.qwen4_exp.nvidia import qsa

    base = qsa.Qwen4ExpQSAFlashAttentionBackend
    backend = compact_backend(base)
    assert compact_backend(base) is backend and issubclass(backend, base)
    assert backend.supports_kv_cache_dtype("int8_per_token_head") and not base.supports_kv_cache_dtype(
        "int8_per_token_head"
    )
    assert not backend.supports_kv_cache_dtype("fp8_e5m2") and not backend.supports_kv_cache_dtype(
        "int4_per_token_head"
    )
