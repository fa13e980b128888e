"""The numbers of a report: against published figures at the published geometry, and against the files' sizes."""

from __future__ import annotations

import json

import pytest

from demo.checkpoint import mixes
from demo.checkpoint.sparse import published, write
from tests.ampere.drafts import Draft
from vllm.ampere.checkpoint import read
from vllm.ampere.findings import findings
from vllm.ampere.report import summary, text


@pytest.fixture(scope="module")
def seed_mix(tmp_path_factory):
    """The summary of the mix that was published for three cards, packed as exporters did then."""
    out = tmp_path_factory.mktemp("mix") / "model"
    config = mixes.PUBLISHED | {"quantization_config": mixes.autoround_config()}
    write(out, config, published(config, mixes.autoround_loose), files=40)
    checkpoint = read(out)
    return summary(checkpoint, findings(checkpoint), pipeline_size=3)


def test_bytes_of_a_decode_step(seed_mix) -> None:
    """5.83 GB were counted for this mix: 4.62 GB dense and 1.22 GB of experts, 10 of 512.

    The count agrees with the whole token embedding among the dense weights, and with six bits packed five to a word;
    a step itself reads one row of the embedding.
    """
    step = seed_mix["decode_step"]
    assert step["experts_bytes"] == pytest.approx(1.22e9, rel=0.004)
    assert step["dense_bytes"] + step["embedding_table_bytes"] == pytest.approx(4.62e9, rel=0.004)
    assert step["row_bytes"] == 2560 + 2560 * 2 // 128 + 16 * 320
    assert step["total_bytes"] == step["dense_bytes"] + step["experts_bytes"] + step["row_bytes"]


def test_classes_of_the_published_model(seed_mix) -> None:
    """125.75 G weights on the cards, 120.8 G of them experts; the table of 95.4 GiB beside them."""
    weights = {item["class"]: item["weights"] for item in seed_mix["classes"]}
    assert weights["experts"] == 48 * 512 * 3 * 2560 * 640
    assert seed_mix["body"]["weights"] == pytest.approx(125.75e9, rel=0.001)
    table = next(item for item in seed_mix["classes"] if item["class"] == "ngram_table")
    assert table["bytes"] == 320_001_536 * 160 * 2
    experts = next(item for item in seed_mix["classes"] if item["class"] == "experts")
    # Four bits, and a scale of 16 for 128 of them; the shape of each tensor is written beside it, 16 bytes.
    assert experts["bits_per_weight"] == pytest.approx(4.125, abs=0.001)
    assert [(s["scheme"], s["bits"], s["group_size"]) for s in experts["schemes"]] == [("INT4 g128", 4, 128)]
    norms = next(item for item in seed_mix["classes"] if item["class"] == "hyper_connection")
    # Left in BF16 these would be 1.193 GiB; in INT8 they were measured at 0.622.
    assert norms["bytes"] == pytest.approx(0.622 * 2**30, rel=0.002)


def test_stages_of_the_published_model(seed_mix) -> None:
    stages = seed_mix["stages"]
    assert [(s["first_layer"], s["last_layer"]) for s in stages] == [(0, 15), (16, 31), (32, 47)]
    assert [(s["gdn_layers"], s["qsa_layers"]) for s in stages] == [(12, 4)] * 3
    assert [s["ple_layers"] for s in stages] == [[1], [], []]
    assert [s["ngram_table_bytes"] > 0 for s in stages] == [True, False, False]
    assert [s["embedding_bytes"] > 0 for s in stages] == [True, False, False]
    assert [s["lm_head_bytes"] > 0 for s in stages] == [False, False, True]
    # Every byte is on some stage, once.
    everything = sum(s["resident_bytes"] + s["ngram_table_bytes"] for s in stages)
    assert everything == sum(item["bytes"] for item in seed_mix["classes"])


def test_a_partition_moves_layers(tmp_path) -> None:
    checkpoint = read(Draft().write(tmp_path / "model"))
    stages = summary(checkpoint, [], pipeline_size=2, partition="1,3")["stages"]
    assert [(s["first_layer"], s["last_layer"]) for s in stages] == [(0, 0), (1, 3)]
    assert stages[1]["ple_layers"] == [1] and stages[1]["ngram_table_bytes"] == 9216 * 16 * 2


def test_tied_embeddings_are_read_as_the_lm_head(tmp_path) -> None:
    draft = Draft()
    untied = summary(read(draft.write(tmp_path / "untied")), [])["decode_step"]
    draft.config["tie_word_embeddings"] = True
    del draft.tensors["lm_head.weight"]
    checkpoint = read(draft.write(tmp_path / "tied"))
    assert findings(checkpoint) == []
    assert summary(checkpoint, [])["decode_step"]["dense_bytes"] == untied["dense_bytes"]


def test_bytes_add_up_to_the_files(tmp_path) -> None:
    made = summary(read(Draft.multimodal().write(tmp_path / "model")), [])
    headers = made["file_bytes"] - sum(item["bytes"] for item in made["classes"])
    assert 0 < headers < 100_000


def test_keys_are_stable(seed_mix) -> None:
    """Scripts read these; a key may be added, and none may go."""
    assert seed_mix.keys() >= set(
        "checkpoint verdict format files file_bytes tensors layers classes body decode_step stages findings".split()
    )
    assert seed_mix["classes"][0].keys() >= set("class modules weights bytes bits_per_weight schemes".split())
    assert seed_mix["findings"][0].keys() == set("name severity where expected found remedy message".split())
    json.dumps(seed_mix)


def test_text_is_aligned(seed_mix) -> None:
    lines = text(seed_mix).splitlines()
    table = lines[3 : 3 + 1 + sum(len(item["schemes"]) for item in seed_mix["classes"]) + 1]
    assert len({len(line) for line in table}) == 1, table
    assert max(map(len, lines)) <= 110


def test_a_draft_module_is_beside_its_stage(tmp_path) -> None:
    """It is loaded for speculative decoding only, on the last stage, and with a token embedding of its own there."""
    draft = Draft()
    without = summary(read(draft.write(tmp_path / "without")), [], pipeline_size=2)["stages"]
    draft = Draft(draft.config | {"mtp_num_hidden_layers": 1})
    checkpoint = read(draft.write(tmp_path / "with"))
    assert findings(checkpoint) == []
    stages = summary(checkpoint, [], pipeline_size=2)["stages"]
    assert [s["resident_bytes"] for s in stages] == [s["resident_bytes"] for s in without]
    embedding = stages[0]["embedding_bytes"]
    layers = sum(module.bytes for module in checkpoint.modules.values() if module.kind == "mtp")
    assert [s["mtp_bytes"] for s in stages] == [0, layers + embedding]
