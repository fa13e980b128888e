"""A failure in any stage reaches the engine: through the executor's own functions, with queues that stand in."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from vllm.v1.executor import stage_failures
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.executor.stage_failures import UnheardFailure, end_after_death, end_unheard, failures_first
from vllm.v1.outputs import AsyncModelRunnerOutput

SUCCESS, FAILURE = WorkerProc.ResponseStatus.SUCCESS, WorkerProc.ResponseStatus.FAILURE


class Queue:
    """Gives its answers in turn, and TimeoutError when there is none."""

    def __init__(self, *answers, log=None, name=""):
        self.answers = list(answers)
        self.log = log
        self.name = name

    def dequeue(self, timeout=None):
        if self.answers:
            return self.answers.pop(0)
        assert timeout is not None, "waits for ever for a stage that cannot answer"
        time.sleep(timeout)
        raise TimeoutError

    def enqueue(self, message):
        pass

    def shutdown(self):
        self.log.append(f"{self.name} woken")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(stage_failures, "SETTLE", 0.2)


@pytest.fixture
def ends(monkeypatch):
    seconds = []
    monkeypatch.setattr(stage_failures, "end_within", seconds.append)
    return seconds


def executor(*queues):
    config = SimpleNamespace(parallel_config=SimpleNamespace(enable_fault_tolerance=False))
    return SimpleNamespace(
        rpc_broadcast_mq=Queue(),
        response_mqs=queues,
        is_failed=False,
        futures_queue=__import__("collections").deque(),
        vllm_config=config,
    )


def test_answers_keep_the_order_of_the_stages():
    stub = executor(Queue((SUCCESS, "a")), Queue((SUCCESS, "b")))
    assert MultiprocExecutor.collective_rpc(stub, "load") == ["a", "b"]


def test_a_failed_stage_is_heard_over_a_silent_one():
    """The warm-up: the last stage's sampler fails, the first waits for its tokens and never answers."""
    stub = executor(Queue(), Queue((FAILURE, "no sampler")))
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="no sampler"):
        MultiprocExecutor.collective_rpc(stub, "compile_or_warm_up_model")
    assert time.monotonic() - start < 2


def test_other_answers_do_not_stay_behind():
    later = Queue((SUCCESS, "a"), (SUCCESS, "of the next call"))
    stub = executor(Queue((FAILURE, "x")), later)
    with pytest.raises(RuntimeError):
        MultiprocExecutor.collective_rpc(stub, "add_lora")
    assert later.answers == [(SUCCESS, "of the next call")]


def test_a_deadline_is_kept():
    stub = executor(Queue(), Queue((SUCCESS, "b")))
    with pytest.raises(TimeoutError, match="check_health"):
        MultiprocExecutor.collective_rpc(stub, "check_health", timeout=0.3)


def test_one_queue_is_read_as_it_is():
    queue = Queue()
    assert list(failures_first([queue], None, SUCCESS)) == [queue]


#: What a stage raises that runs out of memory: on the host, and on a device. Both are exceptions like any other here;
#: the second needs no device to be raised.
ERRORS = pytest.mark.parametrize(
    "error",
    [MemoryError("full"), torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")],
    ids=str,
)


def fail_a_step(rank: int, error: Exception):
    def execute_model():
        raise error

    config = SimpleNamespace(parallel_config=SimpleNamespace(enable_fault_tolerance=False))
    heard = []
    worker = SimpleNamespace(
        worker=SimpleNamespace(execute_model=execute_model, vllm_config=config), rank=rank, handle_output=heard.append
    )
    WorkerProc._execute_worker_rpc(worker, ("execute_model", (), {}, 1))
    return heard


@ERRORS
def test_a_failed_step_of_the_answering_stage_is_its_answer(ends, error):
    (heard,) = fail_a_step(1, error)
    assert heard is error and not ends


@ERRORS
def test_a_failed_step_of_another_stage_ends_the_worker(ends, error):
    with pytest.raises(UnheardFailure, match=f"execute_model failed with {type(error).__name__}: {error}"):
        fail_a_step(0, error)
    assert ends == [stage_failures.END]


class Late(AsyncModelRunnerOutput):
    """A step that fails only when its result is fetched, as kernels that were launched before do."""

    def __init__(self, error: Exception):
        self.error = error

    def get_output(self):
        raise self.error

    def get_kv_connector_output(self):
        return None


@ERRORS
@pytest.mark.parametrize("late", [False, True], ids=["in the step", "in its result"])
def test_the_answer_reaches_the_engine_as_a_failure(error, late):
    sent = []
    worker = SimpleNamespace(worker_response_mq=SimpleNamespace(enqueue=sent.append))
    WorkerProc.enqueue_output(worker, Late(error) if late else error)
    stub = executor(Queue(*sent))
    with pytest.raises(RuntimeError, match=str(error)):
        MultiprocExecutor.collective_rpc(stub, "execute_model")


def test_fault_tolerance_keeps_the_worker(ends):
    end_unheard("execute_model", MemoryError(), fault_tolerance=True)
    assert not ends


def test_the_engine_hears_before_the_others_are_waited_for(monkeypatch):
    monkeypatch.setattr(stage_failures, "END", 0.1)
    log = []
    killed = threading.Event()

    def shutdown():
        log.append("shut down")
        assert killed.wait(5), "nobody ended the worker that waits in a collective"

    survivor = SimpleNamespace(proc=SimpleNamespace(kill=killed.set))
    stub = SimpleNamespace(response_mqs=[Queue(log=log, name="last")], workers=[survivor], shutdown=shutdown)
    end_after_death(stub)
    assert log == ["last woken", "shut down"]
