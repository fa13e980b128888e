"""What a layer on a GPU calls, on stand-ins: which kernels get what, and upstream's where they are chosen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm.models.qwen4_exp.compact_kv import impl as module
from vllm.models.qwen4_exp.compact_kv.choice import Kernels
from vllm.models.qwen4_exp.compact_kv.prepare import prepare, warm_up
from vllm.models.qwen4_exp.qsa import reference, write_reference
from vllm.models.qwen4_exp.qsa.formats import FP8, INT8, kv_format, views

HEADS, KV_HEADS, WIDTH, PAGE = 4, 2, 16, 4


def cache_of(cache_dtype, blocks=3):
    form = kv_format(cache_dtype)
    return torch.zeros(blocks, KV_HEADS, PAGE, form.content(WIDTH), dtype=form.dtype)


def test_prepare_writes_the_main_cache_and_leaves_the_index_to_upstream():
    """Upstream's launcher derives heads from shapes: it has to see none of the main attention's."""
    calls = {}
    positions, table = torch.arange(3), torch.zeros(8, WIDTH)
    index = (torch.zeros(3, 8), torch.zeros(3, 8), positions, table, "norms and side caches")

    def write_main(qkv, *rest, **keywords):
        calls["main"] = (qkv, *rest), keywords
        return "query", "gate"

    def upstream(*arguments, main_qkv, main_kv_cache, main_slot_mapping, **keywords):
        kv_heads = main_kv_cache.shape[2]
        calls["heads"] = main_qkv.shape[1] // (2 * (main_kv_cache.shape[-1] // 2)) - kv_heads, kv_heads
        assert arguments == index and main_qkv.shape[0] == 3 and main_qkv.stride(-1) == 1
        assert main_kv_cache.dtype == torch.bfloat16 and keywords["compress_ratio"] == 4

    qkv = torch.zeros(3, 2 * (HEADS + KV_HEADS) * WIDTH).bfloat16()
    # As the indexer passes an fp8 cache.
    bound = cache_of("fp8").transpose(1, 2).view(torch.float8_e4m3fn)
    slots = torch.tensor([4, 5, -1])
    keywords = dict(
        compress_ratio=4,
        mrope_section=None,
        rope_pos_offset=None,
        main_qkv=qkv,
        main_q_norm_weight="q norm",
        main_k_norm_weight="k norm",
        main_eps=1e-6,
        main_kv_cache=bound,
        main_slot_mapping=slots,
        main_k_scale=0.5,
        main_v_scale=0.25,
    )
    assert prepare(FP8, WIDTH, write_main, upstream, *index, **keywords) == ("query", "gate")
    assert calls["heads"] == (0, 0)
    (given_qkv, given_positions, given_table, q_norm, k_norm, eps, keys, values, given_slots), options = calls["main"]
    assert given_qkv is qkv and given_positions is positions and given_table is table and given_slots is slots
    assert (q_norm, k_norm, eps, options["k_scale"], options["v_scale"]) == ("q norm", "k norm", 1e-6, 0.5, 0.25)
    assert keys.shape == values.shape == (3, PAGE, KV_HEADS, WIDTH) and keys.dtype == torch.uint8
    assert values.data_ptr() - keys.data_ptr() == WIDTH and keys.data_ptr() == bound.data_ptr()


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


def layer_of(*, fused: bool, mrope: tuple[int, ...] | None = None, index_width: int = 0):
    """What a warm-up reads of a sparse layer."""
    table = torch.zeros(8, WIDTH // 2)
    norm = SimpleNamespace(weight=torch.ones(WIDTH).bfloat16(), variance_epsilon=1e-6)
    return SimpleNamespace(
        use_fused_qsa_prepare=fused,
        fuse_indexer_projection=bool(index_width),
        index_qk_size=index_width,
        rotary_emb=SimpleNamespace(cos_sin_cache=table, **({"mrope_section": mrope} if mrope else {})),
        q_norm=norm,
        k_norm=norm,
        _k_scale_float=1.0,
        _v_scale_float=1.0,
    )


SHAPE = {"num_query_heads": HEADS, "selection_width": 11}


@pytest.mark.parametrize("fused", [False, True])
def test_warming_up_touches_nothing(built, fused):
    impl = built("int8_per_token_head", Kernels.OURS)
    cache = cache_of("int8_per_token_head")
    views(cache, INT8, WIDTH).key_scales[:] = torch.nan
    before = cache.clone()
    said = warm_up(impl, cache, torch.zeros(4, 1, dtype=torch.int32), layer=layer_of(fused=fused), **SHAPE)
    assert torch.equal(cache, before)
    assert said == (f"int8 {'fused ' if fused else ''}write", "int8 decode", "int8 prefill")


def compiled_for(arguments, constants) -> list:
    """What Triton compiles a launch apart by: types, addresses and whole numbers as far as it looks at them."""

    def seen(value):
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        return (value == 1, value % 16 == 0) if isinstance(value, int) else type(value)

    return [*map(seen, arguments), constants]


@pytest.mark.parametrize("mrope", [None, (2, 1, 1)])
@pytest.mark.parametrize("index_width", [0, 48])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "int8_per_token_head"])
def test_the_writer_of_requests_is_compiled(monkeypatch, cache_dtype, index_width, mrope):
    """A request's launch, as the indexer makes it through `prepare`, is one that the warm-up has made before."""
    from vllm.models.qwen4_exp.qsa import write

    launches = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: launches.append(compiled_for(arguments, constants))

    monkeypatch.setattr(write, "_norm_rope_gate_write_kernel", Kernel())
    monkeypatch.setattr(write, "_write_rows_kernel", None)
    monkeypatch.setattr(module, "choose", lambda name: (kv_format(name), Kernels.OURS))
    impl = module.own_impl(Upstream)(HEADS, WIDTH, 1.0, KV_HEADS, None, None, cache_dtype, None, "decoder", None)
    monkeypatch.setattr(impl, "attend", lambda *arguments, **keywords: None)
    layer, cache = layer_of(fused=True, mrope=mrope, index_width=index_width), cache_of(cache_dtype)
    impl.warm_up(cache, torch.zeros(4, 1, dtype=torch.int32), layer=layer, **SHAPE)
    assert len(launches) == 1

    projected = torch.zeros(5, 2 * (HEADS + KV_HEADS) * WIDTH + index_width).bfloat16()
    positions = torch.zeros(3, 65, dtype=torch.int64) if mrope else torch.zeros(64, dtype=torch.int64)
    prepare(
        impl.form,
        WIDTH,
        impl.write_packed,
        lambda *index, **keywords: None,
        *(projected, projected, positions[..., :5], layer.rotary_emb.cos_sin_cache),
        mrope_section=mrope,
        main_qkv=projected[:, : 2 * (HEADS + KV_HEADS) * WIDTH],
        main_q_norm_weight=layer.q_norm.weight,
        main_k_norm_weight=layer.k_norm.weight,
        main_eps=layer.q_norm.variance_epsilon,
        main_kv_cache=cache.transpose(1, 2),
        main_slot_mapping=torch.arange(5),
        main_k_scale=layer._k_scale_float,
        main_v_scale=layer._v_scale_float,
    )
    assert launches[1] == launches[0]


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
    assert impl.ours == (cache_dtype != "auto")
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
