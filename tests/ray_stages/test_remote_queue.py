"""A reader of a queue from another machine hears that it was shut down; through vLLM's own queues over a socket."""

import threading
import time

import pytest

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def queues():
    """(writer, reader) without shared memory, as between machines."""
    writer = MessageQueue(n_reader=1, n_local_reader=0, connect_ip="127.0.0.1")
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    greeting = threading.Thread(target=writer.wait_until_ready)
    greeting.start()
    reader.wait_until_ready()
    greeting.join()
    return writer, reader


def test_messages_arrive_at_once(queues):
    writer, reader = queues
    threading.Timer(0.05, writer.enqueue, [{"step": 1}]).start()
    start = time.monotonic()
    assert reader.dequeue(timeout=30) == {"step": 1}
    assert time.monotonic() - start < 1


@pytest.mark.parametrize("timeout", [30, None], ids=["in a step", "while loading"])
def test_a_waiting_reader_is_woken(queues, timeout):
    _, reader = queues
    threading.Timer(0.1, reader.shutdown).start()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="cancelled"):
        reader.dequeue(timeout=timeout)
    assert time.monotonic() - start < 5


def test_a_timeout_is_kept(queues):
    _, reader = queues
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.3)


def test_nothing_to_wait_for_is_a_timeout(queues):
    """What `failures_first` asks: is there an answer yet?"""
    _, reader = queues
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0)
