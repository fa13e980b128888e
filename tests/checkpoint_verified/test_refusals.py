"""What was refused before a process was started ends a command with its sentence; anything else keeps its traceback."""

import pytest
from pydantic import ValidationError, model_validator
from pydantic.dataclasses import dataclass

from vllm.ampere.checkpoint.errors import ShardTruncated
from vllm.entrypoints.cli.refusals import in_a_sentence
from vllm.models.qwen4_exp.partition import PartitionSum


@dataclass
class Settings:
    """As upstream's configuration objects: checked when they are built."""

    error: object
    number: int = 0

    @model_validator(mode="after")
    def check(self):
        raise self.error


def ends_with(capsys, command) -> str:
    with pytest.raises(SystemExit) as ended:
        in_a_sentence(command)(None)
    assert ended.value.code == 1
    return capsys.readouterr().err


def test_a_setting(capsys):
    sentence = "VLLM_PP_LAYER_PARTITION='16,16,17' adds up to 49"
    assert ends_with(capsys, lambda _: Settings(PartitionSum(sentence))) == f"refused: {sentence}\n"


def test_a_checkpoint_with_further_refusals(capsys):
    finding = ShardTruncated("model-1.safetensors", "2 bytes", "1 byte")
    finding.add_note("and another")

    def command(_):
        raise finding

    first, second = ends_with(capsys, command).splitlines()
    assert first.startswith("refused: A weight file is shorter") and second == "refused: and another"


@pytest.mark.parametrize(
    ("wrong", "raised"),
    [
        (lambda _: Settings(ValueError("upstream's")), ValidationError),
        (lambda _: Settings(PartitionSum("ours"), number="three"), ValidationError),
        (lambda _: {}["x"], KeyError),
    ],
)
def test_anything_else_keeps_its_traceback(wrong, raised):
    with pytest.raises(raised):
        in_a_sentence(wrong)(None)
