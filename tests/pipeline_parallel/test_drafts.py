"""A number of drafts that the workers would stop at is refused while the configuration is built."""

from types import SimpleNamespace

import pytest

from tests.pipeline_parallel.geometry import text_config
from vllm.models.qwen4_exp.common.qsa_cache import QSAKeyStateCache
from vllm.models.qwen4_exp.drafts import BLOCK_MULTIPLE, DraftCountNotServed, check_drafts, ring_length, served


def configured(drafts, method="mtp", ratio=4):
    text = text_config()
    text.indexer_compress_ratio = ratio
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text),
        speculative_config=drafts and SimpleNamespace(method=method, num_speculative_tokens=drafts),
    )


@pytest.mark.parametrize("drafts", [None, 1, 4, 9, 12])
@pytest.mark.parametrize("method", ["mtp", "ngram"])
def test_served(drafts, method):
    check_drafts(configured(drafts, method))


@pytest.mark.parametrize(("drafts", "ring"), [(5, 12), (8, 12), (13, 20)])
@pytest.mark.parametrize("method", ["mtp", "ngram"])
def test_refused(drafts, ring, method):
    with pytest.raises(DraftCountNotServed) as refusal:
        check_drafts(configured(drafts, method))
    said = str(refusal.value)
    assert f"num_speculative_tokens={drafts} in --speculative-config is not served" in said
    assert f"{ring} raw keys" in said and said.endswith("use 1 to 4 or 9 to 12")


def test_a_model_without_an_indexer_has_no_ring():
    check_drafts(configured(5, ratio=None))


def test_other_ratios():
    assert (served(2), served(8), served(16)) == ("1 to 2 or 5 to 6 or 13 to 14", "1 to 8", "none")


@pytest.mark.parametrize("drafts", range(1, 14))
def test_it_is_what_the_cache_asserts(drafts):
    """Upstream's own plan of the ring, on the smallest block that a backend may have."""
    state = SimpleNamespace(
        compress_ratio=4, cache_config=SimpleNamespace(block_size=BLOCK_MULTIPLE), head_size=128, dtype=None
    )
    config = SimpleNamespace(num_speculative_tokens=drafts)
    if BLOCK_MULTIPLE % ring_length(4, drafts):
        with pytest.raises(AssertionError, match=f"ring capacity {ring_length(4, drafts)} must divide"):
            QSAKeyStateCache.get_kv_cache_spec(state, config)
    else:
        assert QSAKeyStateCache.get_kv_cache_spec(state, config).block_size == ring_length(4, drafts)
