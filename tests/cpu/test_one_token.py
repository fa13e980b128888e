"""A prompt of one token reaches upstream's convolution with strides that it takes. Red without the edit: the server died."""

from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

DIM, BEHIND = 32, 16


class Convolved(Exception):
    """Ends the layer where it calls the convolution."""


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("tokens", [1, 2])
def test_rows_reach_the_convolution_with_strides_of_their_shape(monkeypatch, tokens, drafts):
    def convolve(*, x, **others):
        raise Convolved(x)

    monkeypatch.setattr(gdn_attention, "_causal_conv1d_fwd_cpu", convolve)
    monkeypatch.setattr(gdn_attention, "causal_conv1d_torch", convolve)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    width, state = 4, torch.zeros(2, 3 + drafts, DIM)
    layer = SimpleNamespace(
        conv1d=SimpleNamespace(weight=torch.zeros(DIM, 1, width), bias=None),
        kv_cache=[state, torch.zeros(2, 1, 4, 4)],
        activation="silu",
    )
    metadata = SimpleNamespace(
        spec_sequence_masks=None,
        num_accepted_tokens=None,
        non_spec_state_indices_tensor=torch.zeros(1, dtype=torch.int32),
        non_spec_query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
        has_initial_state=torch.tensor([False]),
        num_decodes=0,
        num_decode_tokens=0,
        num_prefills=1,
        num_prefill_tokens=tokens,
    )
    wider = torch.randn(tokens, DIM + BEHIND)
    rows, ba = wider[:, :DIM], torch.zeros(tokens, 2)
    with pytest.raises(Convolved) as given:
        if drafts:
            gdn_attention._cpu_gdn_attention_spec_aware(layer, metadata, rows, ba, ba, rows, width, 4)
        else:
            gdn_attention._cpu_gdn_attention_nonspec(layer, metadata, rows, ba, ba, rows)
    (x,) = given.value.args
    assert x.stride() == (1, DIM) and torch.equal(x, rows.T)
