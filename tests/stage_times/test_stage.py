"""A stage's hooks, on a worker process of stand-ins; and that nothing is hooked unless asked for."""

from types import SimpleNamespace

import pytest

from vllm.v1.stage_times import kinds, watch_engine, watch_worker
from vllm.v1.stage_times.gpu_clock import GpuClock
from vllm.v1.stage_times.stage import Stage

from .stand_ins import output, totals


class Untouchable:
    """Has a configuration, and refuses to be changed or asked for anything else."""

    def __init__(self, additional_config):
        config = SimpleNamespace(additional_config=additional_config)
        object.__setattr__(self, "vllm_config", config)
        object.__setattr__(self, "worker", SimpleNamespace(vllm_config=config))

    def __setattr__(self, name, value):
        raise AssertionError(f"{name} was replaced")


@pytest.mark.parametrize("additional_config", [{}, {"stage_times": False}, {"pipeline_scheduler": {}}, None])
def test_off_nothing_is_replaced(additional_config):
    watch_engine(Untouchable(additional_config))
    watch_worker(Untouchable(additional_config))


def test_kinds():
    assert kinds.kind_of(output()) == kinds.DECODE
    assert kinds.kind_of(output(tokens=0, outputs=())) == kinds.EMPTY
    assert kinds.kind_of(output(new=["a"])) == kinds.PREFILL
    assert kinds.kind_of(output(resumed=["a"])) == kinds.PREFILL
    assert kinds.kind_of(output(outputs=(3, 0))) == kinds.PREFILL


class Process:
    """What of a WorkerProc takes part: it reads a message, calls the worker, and answers."""

    def __init__(self, clock, asynchronous):
        self.clock, self.rank, self.use_async_scheduling = clock, 1, asynchronous
        config = SimpleNamespace(additional_config={"stage_times": True})
        self.worker = SimpleNamespace(
            vllm_config=config, execute_model=clock.work(3), sample_tokens=clock.work(2), other=clock.work(1)
        )
        self.rpc_broadcast_mq = SimpleNamespace(_is_local_reader=False, dequeue=clock.work(5))
        self.worker_response_mq = SimpleNamespace(n_local_reader=0, enqueue=clock.work(0.25))
        self.async_output_queue = SimpleNamespace(get=clock.work(7))

    def handle_output(self, output):
        self.clock.now += 0.5

    def enqueue_output(self, output):
        self.clock.now += 4
        self.worker_response_mq.enqueue(output)

    def _execute_worker_rpc(self, request):
        method, args = request
        self.handle_output(getattr(self.worker, method)(*args))

    def take(self, method, *args):
        self.rpc_broadcast_mq.dequeue(indefinite=True)
        self._execute_worker_rpc((method, args))


def watched(process):
    one = Stage(process.rank)
    one.watch_process(process)
    one.watch_steps(process.worker)
    return one


def test_steps_of_a_stage(clock):
    process = Process(clock, asynchronous=False)
    one = watched(process)
    process.take("execute_model", output())
    process.take("sample_tokens", None)
    process.take("execute_model", output(tokens=0, outputs=()))
    process.take("other")
    (figures,) = process.worker.stage_times()
    assert figures["part"] == "stage 1"
    # Two messages and a wait for each are one step of a micro-batch, and one message is an empty one.
    assert figures["steps"]["decode"]["whole"]["count"] == 1
    assert totals(figures, "decode") == {"wait": 10, "other": 5, "answer": 1}
    assert totals(figures, "empty") == {"wait": 5, "other": 3, "answer": 0.5}
    assert totals(figures, "call") == {"wait": 5, "other": 1, "answer": 0.5}
    assert figures["seconds"] == clock.now - 100
    one.reset()
    assert process.worker.stage_times()[0]["steps"] == {}


def test_the_answering_thread_is_timed_apart(clock):
    process = Process(clock, asynchronous=True)
    watched(process)
    for _ in range(2):
        process.async_output_queue.get()
        process.enqueue_output("tokens")
    _, figures = process.worker.stage_times()
    assert figures["part"] == "stage 1, answers"
    assert totals(figures, "call") == {"wait": 14, "result": 8, "send": 0.5, "other": 0}
    process.worker.reset_stage_times()
    assert process.worker.stage_times()[1]["steps"] == {}


def test_a_worker_in_the_engines_process_ends_its_steps_itself(clock):
    worker = Process(clock, asynchronous=False).worker
    one = Stage(0)
    one.watch_steps(worker)
    one.end_steps(worker)
    clock.now += 6
    worker.execute_model(output())
    worker.sample_tokens(None)
    worker.execute_model(output(tokens=0, outputs=()))
    (figures,) = worker.stage_times()
    assert totals(figures, "decode") == {"wait": 6, "other": 5}
    assert totals(figures, "empty") == {"wait": 0, "other": 3}


class Event:
    """A CUDA event on a GPU that runs one unit behind for each record, until `passed`."""

    now, passed = 0.0, 0.0

    def record(self):
        Event.now += 2
        self.at = Event.now

    def query(self):
        return self.at <= Event.passed

    def elapsed_time(self, other):
        return other.at - self.at


def test_gpu_spans_are_read_once_they_have_passed():
    Event.now = Event.passed = 0.0
    clock = GpuClock(Event)
    for _ in range(3):
        clock.begin()
        clock.end("decode", "forward")
    assert clock.series == {}
    Event.passed = 8.0  # the first two
    clock.read()
    assert clock.series["decode"]["forward"].count == 2
    assert clock.series["decode"]["between"].total == pytest.approx(0.002)
    Event.passed = 100.0
    clock.begin()
    assert clock.series["decode"]["forward"].count == 3 and clock.series["decode"]["between"].count == 2
    clock.reset()
    assert clock.series == {}
