"""Sampled tokens on their way to the host: in the order of the stream that received them. No GPU: stand-ins."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from vllm.models.qwen4_exp.ple_store import received
from vllm.models.qwen4_exp.ple_store.received import Copy

SIDE = "the stream of the exchange"


class Pinned:
    def __init__(self, log):
        self.log = log

    def copy_(self, tokens, non_blocking):
        self.log.append("copied" if non_blocking else "waited for the copy")


@pytest.fixture
def log(monkeypatch) -> list[str]:
    """What is asked of a GPU, in order."""
    done: list[str] = []

    @contextmanager
    def stream(which):
        assert which == SIDE
        done.append("on the side")
        yield
        done.append("back")

    class Event:
        def record(self, which):
            assert which == SIDE
            done.append("marked")

        def synchronize(self):
            done.append("arrived")

    def empty(shape, dtype, pin_memory):
        assert pin_memory, "a copy to other memory waits, and for everything"
        return Pinned(done)

    monkeypatch.setattr(
        received, "torch", SimpleNamespace(empty=empty, cuda=SimpleNamespace(stream=stream, Event=Event))
    )
    return done


def test_a_copy_is_waited_for_before_it_is_read_and_only_once(log):
    copy = Copy(SimpleNamespace(is_cuda=True, shape=(2, 1), dtype=None), SIDE)
    # The mark is behind the copy, on the same stream: whoever waits for it has the tokens.
    assert log == ["on the side", "copied", "marked", "back"]
    assert isinstance(copy.wait(), Pinned) and log[4:] == ["arrived"]
    copy.wait()
    assert log[4:] == ["arrived"]


def test_on_a_cpu_tokens_are_there(log):
    tokens = SimpleNamespace(is_cuda=False)
    assert Copy(tokens, None).wait() is tokens and not log
