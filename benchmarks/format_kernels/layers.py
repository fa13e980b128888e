"""vLLM's own layers for a case, loaded from on-disk tensors, and the exact result beside them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from benchmarks.format_kernels.cases import COMPRESSED, GPTQ, MODELOPT, Case, Geometry
from benchmarks.format_kernels.packed import packed, quant_config

NAME = "model.layers.0.mlp.experts"
#: An expert's numbers and their scales, by the layout's names.
_OF_EXPERTS = {
    GPTQ: ("qweight", "scales"),
    COMPRESSED: ("weight_packed", "weight_scale"),
    MODELOPT: ("weight", "weight_scale", "weight_scale_2", "input_scale"),
}
#: What says nothing about values (shapes, an order that is the natural one) or is not used is read by nobody.
_UNREAD = ("weight_shape", "g_idx", "qzeros", "input_scale")


@dataclass
class Built:
    kernel: str
    #: makes the input of so many tokens
    inputs: Callable[[int], tuple[torch.Tensor, ...]]
    run: Callable[..., torch.Tensor]
    #: the same in float32, from the dequantized weight
    reference: Callable[..., torch.Tensor]
    #: bytes of weights that one call reads, from its input
    weight_bytes: Callable[..., int]
    #: the plain layer's matrix product with the dequantized bfloat16 weight; None where it would be another computation
    plain: Callable[..., torch.Tensor] | None


def build(case: Case, geometry: Geometry, device: str, seen: Collection[str] = ()) -> Built | None:
    """The layer, loaded; None where its kernel is one of `seen`, before any weight is made."""
    torch.manual_seed(0)
    return {"linear": _linear, "head": _head, "embedding": _embedding, "experts": _experts}[case.kind](
        case, geometry, device, seen
    )


def _load(layer: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> int:
    """Load, convert for the kernel, and count the packed bytes."""
    for name, parameter in layer.named_parameters():
        parameter.weight_loader(parameter, tensors[name])
    layer.quant_method.process_weights_after_loading(layer)
    return sum(t.nbytes for name, t in tensors.items() if name not in _UNREAD)


def _fill(layer: torch.nn.Module, product: str, expert: int, tensors: dict[str, torch.Tensor]) -> int:
    """Put one expert's tensors into the layer's; returns as `_load`."""
    for name, tensor in tensors.items():
        # A single number is that of gate and up alike.
        getattr(layer, f"{product}_{name}").data[expert].copy_(tensor)
    return sum(tensor.nbytes for name, tensor in tensors.items() if name not in _UNREAD)


def _linear(case: Case, geometry: Geometry, device: str, seen: Collection[str]) -> Built | None:
    from vllm.model_executor.layers.linear import ReplicatedLinear

    layer = ReplicatedLinear(
        case.inputs, case.outputs, bias=False, quant_config=quant_config(case, NAME), prefix=NAME, return_bias=False
    )
    return _product(case, layer, layer, device, seen)


def _head(case: Case, geometry: Geometry, device: str, seen: Collection[str]) -> Built | None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    layer = ParallelLMHead(case.outputs, case.inputs, quant_config=quant_config(case, NAME), prefix=NAME)
    return _product(case, layer, lambda x: layer.quant_method.apply(layer, x)[:, : case.outputs], device, seen)


def _product(
    case: Case, layer: torch.nn.Module, run: Callable[..., torch.Tensor], device: str, seen: Collection[str]
) -> Built | None:
    kernel = type(getattr(layer.quant_method, "kernel", None) or layer.scheme.kernel).__name__
    if kernel in seen:
        return None
    tensors, plain = packed(case.outputs, case.inputs, case.scheme, case.layout, device)
    size = _load(layer, tensors)
    return Built(
        kernel,
        lambda tokens: (torch.randn(tokens, case.inputs, dtype=torch.bfloat16, device=device),),
        run,
        lambda x: x.float() @ plain.float().t(),
        lambda x: size,
        lambda x: torch.nn.functional.linear(x, plain),
    )


def _embedding(case: Case, geometry: Geometry, device: str, seen: Collection[str]) -> Built | None:
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    layer = VocabParallelEmbedding(case.outputs, case.inputs, quant_config=quant_config(case, NAME), prefix=NAME)
    kernel = type(layer.quant_method).__name__
    if kernel in seen:
        return None
    tensors, plain = packed(case.outputs, case.inputs, case.scheme, case.layout, device)
    size = _load(layer, tensors)
    return Built(
        kernel,
        lambda tokens: (torch.randint(0, case.outputs, (tokens,), device=device),),
        layer,
        lambda ids: plain[ids].float(),
        lambda ids: ids.unique().numel() * size // case.outputs,
        lambda ids: plain[ids],
    )


def _experts(case: Case, geometry: Geometry, device: str, seen: Collection[str]) -> Built | None:
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

    count, visits = geometry.experts
    runner = FusedMoEFactory(
        num_experts=count,
        top_k=visits,
        hidden_size=case.inputs,
        intermediate_size=case.outputs,
        renormalize=True,
        quant_config=quant_config(case, NAME),
        prefix=NAME,
    )
    layer = runner.routed_experts
    kernel = layer.quant_method.experts_cls.__name__
    if kernel in seen:
        return None
    inner, size = case.outputs, 0
    plain = {"w13": [], "w2": []}
    for expert in range(count):
        # Gate and up are one matrix here; with the outputs stacked it is what two tensors would give.
        for product, outputs, inputs in (("w13", 2 * inner, case.inputs), ("w2", case.inputs, inner)):
            tensors, dequantized = packed(outputs, inputs, case.scheme, case.layout, device)
            size += _fill(layer, product, expert, {name: tensors[name] for name in _OF_EXPERTS[case.layout]})
            plain[product].append(dequantized)
    method = layer.quant_method
    method.process_weights_after_loading(layer)

    def inputs(tokens: int) -> tuple[torch.Tensor, ...]:
        logits = torch.randn(tokens, count, device=device)
        weights, ids = logits.softmax(-1).topk(visits)
        x = torch.randn(tokens, case.inputs, dtype=torch.bfloat16, device=device)
        return x, (weights / weights.sum(-1, keepdim=True)).float(), ids.to(torch.int32)

    def reference(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        result = torch.zeros(x.shape, dtype=torch.float32, device=device)
        for expert in ids.unique().tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            gate, up = (x[token].float() @ plain["w13"][expert].float().t()).chunk(2, -1)
            out = (torch.nn.functional.silu(gate) * up) @ plain["w2"][expert].float().t()
            result.index_add_(0, token, out * weights[token, slot, None])
        return result

    return Built(
        kernel,
        inputs,
        # The kernel may use its input as scratch space.
        lambda x, weights, ids: method.apply(layer, x.clone(), weights, ids, None, None),
        reference,
        lambda x, weights, ids: ids.unique().numel() * size // count,
        None,
    )
