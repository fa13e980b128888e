"""The engine core's hooks, on stand-ins."""

from types import SimpleNamespace

import pytest

from vllm.v1.stage_times import watch_engine
from vllm.v1.stage_times.engine import StageTimesUnsupported

from .stand_ins import output, totals


class Core:
    """What of an EngineCoreProc takes part in a turn of its loop."""

    def __init__(self, clock, outputs, **executor):
        self.clock = clock
        self.vllm_config = SimpleNamespace(additional_config={"stage_times": True})
        queue = SimpleNamespace(n_local_reader=0, enqueue=clock.work(0.5))
        answers = SimpleNamespace(_is_local_reader=False, dequeue=clock.work(8))
        self.model_executor = SimpleNamespace(**({"rpc_broadcast_mq": queue, "response_mqs": [answers]} | executor))
        self.outputs = iter(outputs)
        self.scheduler = SimpleNamespace(schedule=self.schedule, update_from_output=clock.work(2))
        self.input_queue = SimpleNamespace(get=clock.work(16))

    def schedule(self, throttle):
        self.clock.now += 1
        return next(self.outputs)

    def collective_rpc(self, method, *args, **kwargs):
        return ["answer of a stage"]

    def post_step(self, executed):
        pass

    def step_fn(self):
        self.scheduler.schedule(False)
        self.model_executor.rpc_broadcast_mq.enqueue(())
        self.model_executor.response_mqs[0].dequeue()
        self.scheduler.update_from_output(None, None)


class CoreProc(Core):
    def _process_input_queue(self):
        self.clock.now += 0.25
        self.input_queue.get()

    def _process_engine_step(self):
        self.step_fn()
        self.post_step(False)
        self.clock.now += 4

    def turn(self):
        self._process_input_queue()
        self._process_engine_step()


STEP = {"schedule": 1, "send": 0.5, "wait": 8, "update": 2}


def figures(core):
    (found,), stage = core.collective_rpc("stage_times")
    assert stage == "answer of a stage"
    return found


def test_a_turn_of_the_loop(clock):
    core = CoreProc(clock, [output(), output(tokens=0, outputs=()), output()])
    watch_engine(core)
    core.turn()
    core.turn()
    found = figures(core)
    expected = STEP | {"input": 0.25, "idle": 16, "pause": 4, "other": 0}
    assert totals(found, "decode") == totals(found, "empty") == expected
    assert found["seconds"] == clock.now - 100
    core.collective_rpc("reset_stage_times")
    core.turn()
    assert list(figures(core)["steps"]) == ["decode"]


def test_in_the_callers_process(clock):
    core = Core(clock, [output(), output()])
    watch_engine(core)
    for _ in range(2):
        clock.now += 3
        core.step_fn()
    assert totals(figures(core), "decode") == {key: 2 * value for key, value in STEP.items()} | {
        "caller": 6,
        "other": 0,
    }


def test_other_calls_go_through(clock):
    core = CoreProc(clock, [])
    watch_engine(core)
    assert core.collective_rpc("list_loras") == ["answer of a stage"]


def test_workers_that_cannot_be_reached_are_refused(clock):
    with pytest.raises(StageTimesUnsupported, match="distributed-executor-backend mp"):
        watch_engine(CoreProc(clock, [], rpc_broadcast_mq=None))
