# SPDX-License-Identifier: Apache-2.0
"""Compile the PLE layer's short convolution for mixed steps before the first of them comes.

Upstream's warm-up runs prompts, then decodes, and mixes at most decodes with and without drafts.  Triton compiles a
pointer that is a multiple of 16 bytes another way than one that is not, and a stride of 1 another way than a longer one.
Behind decodes a prompt's launch gets slices that begin later: of the step's numbers of states (int32) after as many as
there are decodes, and with drafts of its numbers of tokens (int64) after as many as there are tokens of others.  So

    prompts behind decodes        are one kernel where the decodes are a multiple of four, and another where they are not
    where others have drafts      each of these twice, for an even and an odd number of tokens before; decodes there too
    without prefix caching        both kinds of launches lose the stride that they have alone, a column's of the block table

and a user would wait for each: for 2 to 14 launches by these settings, each compiled once.  Here all such steps are run
at start, on rows without a state: nothing is read from or written to the cache.
"""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm.forward_context import create_forward_context, override_forward_context
from vllm.logger import init_logger
from vllm.v1.attention.backends.short_conv_attn import PleShortConvAttentionMetadata
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

logger = init_logger(__name__)

#: Tokens of the one prompt of a step, at least two.
_PROMPT = 2


class Step(NamedTuple):
    """Requests of a mixed step beside its prompt.

    Attributes:
        decodes: requests with one token
        drafted: tokens of one request that has drafts; 0 for no such request
    """

    decodes: int
    drafted: int

    @property
    def requests(self) -> int:
        return self.decodes + bool(self.drafted) + 1

    @property
    def tokens(self) -> int:
        return self.decodes + self.drafted + _PROMPT


def steps(drafts: int, max_requests: int, max_tokens: int) -> Iterator[Step]:
    """Steps whose kernels are all that mixed steps have.

    Args:
        drafts: the most that a request has
    """
    # Behind one decode a prompt's numbers of states begin at no multiple of 16 bytes, behind four or none they do. Two
    # drafted tokens and one are an even and an odd beginning of the numbers of tokens that follow.
    wanted = [Step(1, 0), Step(4, 0)]
    if drafts:
        wanted += [Step(decodes, drafted) for drafted in (2, 1) for decodes in (0, 1)]
    return (step for step in wanted if step.requests <= max_requests and step.tokens <= max_tokens)


def warm_up(worker: "Worker") -> None:
    """Compile what mixed steps of this stage will launch; nothing on a stage without a PLE layer."""
    module = sys.modules.get("vllm.models.qwen4_exp.nvidia.ple_layer")
    if module is None:
        return
    runner = worker.model_runner
    for layer in worker.get_model().modules():
        if not isinstance(layer, module.Qwen4ExpPLELayer) or not layer.kv_cache[0].numel():
            continue
        done = [*steps(layer.num_spec_tokens, runner.max_num_reqs, runner.max_num_tokens)]
        for step in done:
            run(layer, step, worker.vllm_config)
        logger.info("Warmed up the short convolution of %s for %d kinds of mixed steps.", layer.prefix, len(done))


@torch.inference_mode()
def run(layer: Any, step: Step, vllm_config: Any) -> None:
    """One mixed step of the convolution, through the layer's own dispatch, which cuts it into launches.

    Args:
        layer: a ``Qwen4ExpPLELayer`` whose cache is there
    """
    weight = layer.conv1d.weight
    inputs = torch.zeros(step.tokens, layer.hc_hidden_size, dtype=layer.model_config.dtype, device=weight.device)
    # Under sequence parallelism the residual is added elsewhere.
    outer = None if layer.use_sequence_parallel else inputs
    context = create_forward_context({layer.prefix: metadata(step, layer.num_spec_tokens, weight.device)}, vllm_config)
    with override_forward_context(context):
        layer._short_conv(inputs, torch.zeros_like(inputs), outer)


def metadata(step: Step, drafts: int, device: torch.device) -> PleShortConvAttentionMetadata:
    """What upstream's builder makes of such a step, in rows whose state is the null block."""

    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def nulls(count: int) -> torch.Tensor:
        return torch.full((count,), NULL_BLOCK_ID, dtype=torch.int32, device=device)

    decodes, drafted = step.decodes, step.drafted
    with_drafts: dict[str, Any] = {}
    if drafted:
        tokens = torch.arange(step.tokens, device=device)
        with_drafts = {
            "num_spec_decodes": 1,
            "num_spec_decode_tokens": drafted,
            "spec_sequence_masks": torch.arange(step.requests, device=device) == 0,
            "spec_query_start_loc": numbers(0, drafted),
            "spec_state_indices_tensor": nulls(1),
            "spec_token_indx": tokens[:drafted],
            "non_spec_token_indx": tokens[drafted:],
        }
    return PleShortConvAttentionMetadata(
        num_prefills=1,
        num_prefill_tokens=_PROMPT,
        num_decodes=decodes,
        num_decode_tokens=decodes,
        num_reqs=step.requests,
        num_actual_tokens=step.tokens,
        spec_query_len=drafts + 1,
        state_indices_tensor=nulls(decodes + 1),
        has_initial_states_d=torch.zeros(decodes, dtype=torch.bool, device=device) if decodes else None,
        has_initial_states_p=torch.zeros(1, dtype=torch.bool, device=device),
        query_start_loc_p=numbers(0, _PROMPT),
        num_accepted_tokens=numbers(1) if drafted else None,
        # Of no concern to the convolution.
        state_indices_tensor_p=None,
        state_indices_tensor_d=None,
        query_start_loc_d=None,
        seq_lens=numbers(),
        **with_drafts,
    )
