"""The random checkpoint: published layout, same bytes from the same seed, decisive, and no part without effect."""

import json
import re
from functools import cache

import pytest
import torch
from safetensors import safe_open

from demo import reference
from demo.checkpoint.geometry import geometry
from demo.checkpoint.layout import INDEX, LayoutError, read_layout
from demo.checkpoint.write import build

#: Effect of each part on the logits, as a multiple of what bfloat16 alone does to them (its standard deviation where
#: no discrete choice changes, 0.014).  Measured: 0.1 or more for every part, that is 8 times and up.
PARTS = {
    "PLE values": r"ple\.value_proj",
    "PLE gate": r"ple\.key_proj",
    "PLE convolution": r"ple\.conv1d",
    "indexer": r"index_qk_proj",
    "QSA output": r"self_attn\.o_proj",
    "QSA query norm": r"self_attn\.q_norm",
    "hyper-connection input mix": r"hyper_connection\.input_mix_weight_down",
    "hyper-connection injection": r"block_inject_weight",
    "hyper-connection norms": r"hyper_connection\.hc_norm",
    "last mixer": r"hyper_connection_mixer",
    "routed experts": r"experts\.down_proj",
    "router": r"mlp\.gate\.weight",
    "shared expert": r"shared_expert\.down_proj",
    "shared expert's gate": r"shared_expert_gate",
    "GDN": r"linear_attn\.out_proj",
    "GDN decay": r"linear_attn\.A_log",
    "GDN convolution": r"linear_attn\.conv1d",
}


@pytest.fixture(scope="module")
def logits_of(checkpoint):
    """Logits [128, vocab] in float32 of one prompt that is past the indexer's budget, with some parameters zeroed."""
    path = checkpoint("ple-early")
    model = reference.load(path, torch.float32)
    original = {name: value.clone() for name, value in model.named_parameters()}
    prompt = torch.randint(3, 500, (1, 128), generator=torch.Generator().manual_seed(7))

    @torch.inference_mode()
    def logits(pattern: str = "(?!)") -> torch.Tensor:
        hit = [value for name, value in model.named_parameters() if re.search(pattern, name)]
        assert hit or pattern == "(?!)", f"no parameter matches {pattern}"
        for value in hit:
            value.data.zero_()
        result = model(prompt, use_cache=False).logits[0]
        for name, value in model.named_parameters():
            value.data.copy_(original[name])
        return result

    # Most of a forward's time is the reference indexer's loop over queries: the whole model runs once.
    return cache(logits)


@pytest.mark.parametrize("part", PARTS)
def test_every_part_moves_the_logits(logits_of, part):
    # The last 48 positions: the indexer has had to leave something out there.
    whole, without = logits_of()[-48:], logits_of(PARTS[part])[-48:]
    assert (whole - without).std() > 5 * 0.014


def test_layout_is_the_published_one(checkpoint):
    path = checkpoint("ple-early")
    layout = read_layout(path)
    assert layout.files > 1
    assert layout.table_shards == 8
    assert layout.expert_tensors == 12 * 8 * 3
    table_files = {
        file for name, file in json.loads((path / INDEX).read_text())["weight_map"].items() if ".shard_" in name
    }
    assert table_files, "no table shard in the index"


def test_layout_reader_refuses_fused_tensors(checkpoint, tmp_path):
    """A save without transformers' reverse conversion is what a broken writer would leave."""
    model = reference.load(checkpoint("ple-early"))
    model.save_pretrained(tmp_path, save_original_format=False, max_shard_size="1MB")
    with pytest.raises(LayoutError, match="fused"):
        read_layout(tmp_path)


def test_same_seed_same_tensors_and_layers_do_not_depend_on_depth(tmp_path):
    shape = geometry("tiny", num_hidden_layers=4)
    build(tmp_path / "a", shape, seed=3)
    build(tmp_path / "b", shape, seed=3)
    build(tmp_path / "c", geometry("tiny", num_hidden_layers=5), seed=3)
    a, b, c = (_tensors(tmp_path / name) for name in "abc")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    # Weights that leave a block are scaled with depth; all others are the same in a deeper model.
    same = "model.layers.3.self_attn.q_proj.weight"
    assert torch.equal(a[same], c[same])


def test_another_seed_gives_another_model(checkpoint, tmp_path):
    build(tmp_path, geometry("tiny", num_hidden_layers=4), seed=1)
    name = "model.embed_tokens.weight"
    assert not torch.equal(_tensors(tmp_path)[name], _tensors(checkpoint("ple-early"))[name])


def test_greedy_choices_are_decisive(references):
    """Rounding (0.014, some tenths at a changed discrete choice) must not decide more than a token in eight."""
    prompt = torch.randint(3, 500, (80,), generator=torch.Generator().manual_seed(11)).tolist()
    margins = torch.tensor(reference.greedy(references("ple-early"), prompt, 96).margins)
    assert margins.median() > 2
    assert (margins < 0.5).float().mean() < 0.125


def test_answers_do_not_repeat_themselves(references):
    tokens = reference.greedy(references("ple-early"), list(range(100, 140)), 48).tokens
    assert len(set(tokens)) > 24


def test_tokenizer_round_trip_and_chat_template(checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint("ple-early"))
    for text in ("Grüße, 世界 🙂", "a  b\n\tc", "three small cards"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    # Special tokens are single ids, also inside a rendered conversation.
    assert tokenizer.encode(rendered).count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2


def _tensors(path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            tensors |= {name: handle.get_tensor(name) for name in handle.keys()}
    return tensors
