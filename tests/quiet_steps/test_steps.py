"""Which steps are kept back, and what the next message says of them."""

from concurrent.futures import Future
from dataclasses import fields
from types import SimpleNamespace

import pytest

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.quiet_steps import ABOUT_REQUESTS, QuietSteps, catch_up, says_nothing
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT


def config(stages=3, **changed):
    """What is read of a VllmConfig."""
    settings = {
        "additional_config": {},
        "use_v2_model_runner": True,
        "kv_transfer_config": None,
        "ec_transfer_config": None,
        "parallel_config": SimpleNamespace(pipeline_parallel_size=stages, data_parallel_size=1),
    }
    return SimpleNamespace(**settings | changed)


class Executor:
    def __init__(self):
        self.sent = []

    def execute_model(self, output, non_block):
        assert non_block
        self.sent.append(output)
        return Future()


def decode(requests=1):
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {str(number): 1 for number in range(requests)}
    output.total_num_scheduled_tokens = requests
    return output


def empty(**changed):
    output = SchedulerOutput.make_empty()
    for name, value in changed.items():
        setattr(output, name, value)
    return output


def test_an_empty_step_is_answered_here_and_counted():
    steps, executor = QuietSteps(config()), Executor()
    answers = [steps.execute(executor, empty()) for _ in range(2)]
    assert not executor.sent
    assert all(answer.result() is EMPTY_MODEL_RUNNER_OUTPUT for answer in answers)
    assert not steps.execute(executor, decode()).done()
    steps.execute(executor, decode())
    assert [getattr(output, "quiet_steps", 0) for output in executor.sent] == [2, 0]


@pytest.mark.parametrize("name", sorted({field.name for field in fields(SchedulerOutput)} - ABOUT_REQUESTS))
def test_a_step_that_holds_anything_is_sent(name):
    """Every field of this release, so that a new one is sent until somebody has looked at it."""
    cached = SchedulerOutput.make_empty().scheduled_cached_reqs
    cached.req_ids.append("0")
    output = empty(**{name: cached if name == "scheduled_cached_reqs" else [1]})
    assert not says_nothing(output)


def test_what_is_said_of_requests_does_not_count():
    assert says_nothing(empty(num_common_prefix_blocks=[0, 0], num_spec_tokens_to_schedule=3, skip_drafts=True))


def test_no_more_are_told_than_can_matter():
    steps, executor = QuietSteps(config(stages=3)), Executor()
    for _ in range(1000):
        steps.execute(executor, empty())
    steps.execute(executor, decode())
    assert executor.sent[0].quiet_steps == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"additional_config": {"quiet_steps": False}},
        {"use_v2_model_runner": False},
        {"kv_transfer_config": object()},
        {"ec_transfer_config": object()},
        {"parallel_config": SimpleNamespace(pipeline_parallel_size=3, data_parallel_size=2)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_where_somebody_needs_them_all_are_sent_and_the_sleep_stays(changed):
    steps, executor = QuietSteps(config(**changed)), Executor()
    assert not steps.execute(executor, empty()).done()
    assert executor.sent
    assert not steps.busy([(None, decode(), None)])


def entry(output):
    return None, output, None


def test_no_sleep_while_something_is_computed_and_once_after_it():
    steps, executor = QuietSteps(config()), Executor()
    steps.execute(executor, decode())
    assert steps.busy([entry(empty()), entry(decode())]) and steps.busy([entry(decode())])
    # Answered: its requests may go on, so the next turn comes at once, and only that one.
    assert steps.busy([entry(empty())])
    # Requests that wait for something else: without a sleep the loop would spin.
    assert not steps.busy([entry(empty())])
    assert not steps.busy([]) and not steps.busy(None)


def test_an_answer_is_noticed_though_another_micro_batch_went_out():
    steps, executor = QuietSteps(config()), Executor()
    steps.execute(executor, decode())
    assert steps.busy([entry(decode())])
    steps.execute(executor, decode())  # this turn is not asked about
    assert steps.busy([])
    assert not steps.busy([])


def test_an_answer_that_came_before_anybody_asked_is_noticed():
    steps, executor = QuietSteps(config()), Executor()
    steps.execute(executor, decode())  # sent, computed and answered within a turn
    assert steps.busy([])
    assert not steps.busy([])


def test_a_stage_catches_up_first():
    taken = []
    runner = SimpleNamespace(update_pp_decode_requests=lambda: taken.append(1))
    catch_up(runner, decode())
    assert len(taken) == 1
    output = decode()
    output.quiet_steps = 2
    catch_up(runner, output)
    assert len(taken) == 4
