"""Every parameter was filled or has a reason; every tensor was taken or is warned about."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm.model_executor.model_loader import accounted_load
from vllm.model_executor.model_loader.accounted_load import WeightsNotFilled, reason
from vllm.model_executor.model_loader.canary import Hole

from .conftest import EXPERTS, WIDTH, Qwen4ExpForCausalLM

LAYER = "model.language_model.layers"


def without(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def test_an_intact_checkpoint(checkpoint, said):
    model = Qwen4ExpForCausalLM()
    checkpoint().load(model)
    assert not said
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    assert model.model.layers[3].qk_proj.k_scale == 1  # not in the checkpoint; its default is back


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (f"{LAYER}.5.norm.weight", "model.layers.5.norm.weight."),
        (f"{LAYER}.5.k_proj.weight", r"model.layers.5.qk_proj.weight \(36 of 72 values, from \[6, 0\] on\)"),
        (
            f"{LAYER}.5.mlp.experts.2.down_proj.weight",
            rf"model.layers.5.mlp.experts.w2_weight \(36 of {36 * EXPERTS} values, from \[2, 0, 0\] on\)",
        ),
        ("lm_head.weight", "lm_head.weight."),
        ("model.language_model.hyper_connection_mixer.weight", "model.hyper_connection_mixer.weight."),
    ],
)
def test_one_tensor_less(checkpoint, stages, name, found):
    """Upstream's check by name, where it is on, notices only whole parameters."""
    stages(2, 1)
    with pytest.raises(WeightsNotFilled, match=rf"1 of \d+ parameters of pipeline stage 1 \(layers 4 to 7\).*{found}"):
        checkpoint(without(name)).load(Qwen4ExpForCausalLM(4, 8))


def test_the_stage_that_lacks_it_says_so(checkpoint, stages):
    files = checkpoint(without(f"{LAYER}.5.norm.weight"))
    stages(2, 0)
    files.load(Qwen4ExpForCausalLM(0, 4))
    stages(2, 1)
    with pytest.raises(WeightsNotFilled, match="layers.5"):
        files.load(Qwen4ExpForCausalLM(4, 8))


def test_serving_all_the_same(checkpoint, said):
    model = Qwen4ExpForCausalLM()
    files = checkpoint(without(f"{LAYER}.5.q_proj.weight"))
    files.load(model, model_loader_extra_config={"enable_weights_track": False})
    assert len(said) == 1 and "model.layers.5.qk_proj.weight (36 of 72" in said[0]
    weight = model.model.layers[5].qk_proj.weight
    assert weight[WIDTH:].any() and not (weight[:WIDTH].view(torch.int32) == 0x7FA57FA5).any()


def test_many_missing_are_counted(checkpoint):
    names = [f"{LAYER}.{i}.norm.weight" for i in range(7)]
    with pytest.raises(WeightsNotFilled, match=r"^7 of .*layers.4.norm.weight; …\. The checkpoint lacks") as caught:
        checkpoint(without(*names)).load(Qwen4ExpForCausalLM())
    assert "enable_weights_track" in str(caught.value) and len(caught.value.parameters) == 7


def test_a_tensor_without_a_taker(checkpoint, said):
    extra = {f"{LAYER}.{i}.odd": torch.zeros(2) for i in (2, 3)}
    checkpoint(lambda tensors: tensors.update(extra)).load(Qwen4ExpForCausalLM())
    assert (
        len(said) == 1
        and f"2 tensors of the checkpoint are not used by the model, nor by another: {LAYER}.2.odd" in said[0]
    )


def test_tensors_with_a_reason_are_not_warned_about(checkpoint, said):
    extra = {
        name: torch.zeros(2)
        for name in ("mtp.layers.0.norm.weight", "model.visual.a", f"{LAYER}.1.self_attn.rotary_emb.inv_freq")
    }
    files = checkpoint(lambda tensors: tensors.update(extra))
    files.load(Qwen4ExpForCausalLM())
    assert not said
    assert "mtp.layers.0.norm.weight" not in files.taken and "model.visual.a" not in files.taken


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_of_another_rank(checkpoint, said, ranks):
    """Under expert parallelism each rank is handed all experts and stores its own."""
    model = Qwen4ExpForCausalLM()
    experts = model.model.layers[5].mlp.experts
    sizes = dict.fromkeys(("hidden_dim", "intermediate_size_per_partition"), WIDTH)
    sizes |= {f"{name}_unpadded": size for name, size in sizes.items()}
    experts.moe_config = SimpleNamespace(ep_size=ranks, has_bias=True, **sizes)
    store = experts.load_weights
    experts.load_weights = lambda weights: store((n, w) for n, w in weights if not n.startswith("3."))
    with pytest.raises(WeightsNotFilled):  # the stand-in's parameter has room for all
        checkpoint().load(model)
    assert len(said) == (1 if ranks == 1 else 0)


def test_other_models_are_left_alone(checkpoint, said):
    class Other(Qwen4ExpForCausalLM):
        pass

    checkpoint(without(f"{LAYER}.5.norm.weight")).load(Other())
    assert not said


class TestReasons:
    def of(self, module, leaf="weight", missing=None, shape=(4, 8)):
        model = nn.ModuleDict({"part": module})
        parameter = nn.Parameter(torch.zeros(shape))
        hole = Hole(parameter.numel() if missing is None else missing, parameter.numel(), (0, 0))
        return reason(model, f"part.{leaf}", parameter, hole)

    def test_none(self):
        assert self.of(nn.Module()) is None

    @pytest.mark.parametrize("leaf", ["k_scale", "v_scale", "q_scale", "prob_scale", "input_scale_ub"])
    def test_by_name(self, leaf):
        assert self.of(nn.Module(), leaf)

    def test_empty(self):
        assert "empty" in self.of(nn.Module(), shape=(0,))

    def test_online_quantization(self):
        module = nn.Module()
        module.quant_method = SimpleNamespace(uses_meta_device=True)
        assert "online" in self.of(module)

    @pytest.mark.parametrize("has_bias", [False, True])
    def test_room_for_biases_of_experts(self, has_bias):
        module = nn.Module()
        sizes = dict(hidden_dim=8, hidden_dim_unpadded=8)
        sizes |= dict(intermediate_size_per_partition=4, intermediate_size_per_partition_unpadded=4)
        module.moe_config = SimpleNamespace(has_bias=has_bias, **sizes)
        assert bool(self.of(module, "w13_bias")) is not has_bias
        assert self.of(module, "w13_scales") is None

    @pytest.mark.parametrize("leaf", ["input_scale", "w13_input_scale", "w2_input_global_scale"])
    def test_scales_of_activations_that_are_not_quantized(self, leaf):
        module = nn.Module()
        for weight_only in (SimpleNamespace(use_a16=True), SimpleNamespace(spec=SimpleNamespace(activation=None))):
            module.quant_method = weight_only
            assert "16 bits" in self.of(module, leaf)
            assert self.of(module, "weight_scale") is None
        for both in (SimpleNamespace(use_a16=False), SimpleNamespace(spec=SimpleNamespace(activation="nvfp4"))):
            module.quant_method = both
            assert self.of(module, leaf) is None

    def test_padding_of_the_hyper_connection(self):
        parent = nn.Module()
        parent.pad_size = 2
        parent.down = nn.Module()
        model = nn.ModuleDict({"part": parent})
        weight = nn.Parameter(torch.zeros(6, 8))
        assert "padded" in reason(model, "part.down.weight", weight, Hole(16, 48, (4, 0)))
        assert reason(model, "part.down.weight", weight, Hole(24, 48, (3, 0))) is None

    def test_padded_experts(self):
        module = nn.Module()
        sizes = dict(hidden_dim=64, hidden_dim_unpadded=64, intermediate_size_per_partition=32)
        module.moe_config = SimpleNamespace(**sizes, intermediate_size_per_partition_unpadded=32)
        assert self.of(module) is None
        module.moe_config.intermediate_size_per_partition_unpadded = 24
        assert "padded" in self.of(module)


def test_the_error_survives_the_way_from_a_worker():
    error = pickle.loads(pickle.dumps(WeightsNotFilled("the model", ["a.weight"], 9)))
    assert str(error).startswith("1 of 9 parameters of the model were not filled from the checkpoint: a.weight. ")
    assert accounted_load.stored_names(iter(["a", "b", "a"])) == {"a", "b"}
