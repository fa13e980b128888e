"""Each of the vocabulary's matrices is built where it is used."""

from types import SimpleNamespace

import pytest

from vllm.model_executor.models.utils import PPMissingLayer
from vllm.models.qwen4_exp import stage_vocabulary


@pytest.mark.parametrize(
    ("rank", "stages", "draft", "embeds", "scores"),
    [
        (0, 1, False, True, True),
        (0, 3, False, True, False),
        (1, 3, False, False, False),
        (2, 3, False, False, True),
        (2, 3, True, True, True),  # the draft model on the last stage may take it
    ],
)
def test_who_has_what(monkeypatch, rank, stages, draft, embeds, scores):
    group = SimpleNamespace(is_first_rank=rank == 0, is_last_rank=rank == stages - 1)
    monkeypatch.setattr(stage_vocabulary, "get_pp_group", lambda: group)
    config = SimpleNamespace(speculative_config=object() if draft else None)
    embedding, head = stage_vocabulary.missing_embedding(config), stage_vocabulary.missing_head()
    assert (embedding is None) is embeds and (head is None) is scores
    # `missing or built` takes what is missing for true.
    assert all(isinstance(layer, PPMissingLayer) and bool(layer) for layer in (embedding, head) if layer is not None)
