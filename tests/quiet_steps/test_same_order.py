"""Upstream's queue and its stages, fed with the same steps with and without empty ones: they do the same."""

import pickle
import random
from collections import deque
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.quiet_steps import QuietSteps, catch_up
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.pp_utils import PendingRecv, PPHandler

from .test_steps import config


class Stage:
    """A stage that is not the last: upstream's ring of tokens, and what it did in order."""

    def __init__(self, stages):
        self.handler = handler = PPHandler.__new__(PPHandler)
        handler.queue = deque([None] * stages)
        handler.req_idx_gen_np = np.zeros(8, dtype=np.int32)
        handler.main_stream = SimpleNamespace(wait_event=lambda event: None)
        self.log = []

    def update_pp_decode_requests(self):
        if (outputs := self.handler.get_prev_sampled_outputs()) is not None:
            self.log.append(("took in", outputs["sampled_tokens"]))

    def execute_model(self, output):
        catch_up(self, output)
        for name in sorted(output.finished_req_ids):
            self.handler.on_req_idx_freed(int(name))
            self.log.append(("freed", name))

    def sample_tokens(self, output):
        names = list(output.num_scheduled_tokens)
        self.log.append(("computed", output.number))
        rows = np.array([int(name) for name in names])
        self.handler.queue[-1] = PendingRecv(
            event=None,
            sampled_tokens=output.number,
            num_sampled=None,
            num_rejected=None,
            idx_mapping=rows,
            idx_mapping_np=rows,
            need_sampled_mask=np.ones(len(rows), dtype=bool),
            gen_at_receive_np=self.handler.req_idx_gen_np[rows].copy(),
        )


class Executor:
    """Stages behind a queue of messages; a result comes when it is asked for."""

    def __init__(self, stage):
        self.stage = stage
        self.messages = 0
        self.output = None

    def execute_model(self, output, non_block):
        self.messages += 1
        self.output = pickle.loads(pickle.dumps(output))
        self.stage.execute_model(self.output)
        return self._result()

    def sample_tokens(self, grammar, non_block):
        self.stage.sample_tokens(self.output)
        return self._result()

    def _result(self):
        future = Future()
        future.set_result(ModelRunnerOutput(req_ids=list(self.output.num_scheduled_tokens), req_id_to_index={}))
        return future


class Scheduler:
    """Schedules what a list says: each entry the requests of a step and those that ended before it."""

    def __init__(self, script):
        self.script = deque(script)
        self.number = 0
        self.updates = []

    def has_requests(self):
        return bool(self.script)

    def schedule(self, throttle):
        names, finished = self.script.popleft()
        output = SchedulerOutput.make_empty()
        output.number = self.number
        self.number += 1
        output.num_scheduled_tokens = dict.fromkeys(names, 1)
        output.total_num_scheduled_tokens = len(names)
        output.finished_req_ids = set(finished)
        output.skip_drafts = True
        return output

    def get_grammar_bitmask(self, output):
        return None

    def update_from_output(self, output, result):
        self.updates.append((output.number, list(result.req_ids)))
        return {}


class Core(EngineCore):
    """Upstream's step_with_batch_queue, over the stand-ins above."""

    def __init__(self, stages, script, quiet):
        self.batch_queue_size = stages + 1
        self.batch_queue = deque(maxlen=stages + 1)
        self.scheduler = Scheduler(script)
        self.stage = Stage(stages)
        self.model_executor = Executor(self.stage)
        self.quiet_steps = QuietSteps(config(stages, additional_config={"quiet_steps": quiet}))
        self.is_mm_encoder_only = self.is_pooling_model = False

    def log_error_detail(self, output):
        return nullcontext()

    capture_iteration_details = log_error_detail

    def _process_aborts_queue(self):
        pass

    def _attach_iteration_details(self, outputs, details):
        pass

    def _attach_weight_version(self, outputs):
        pass

    def run(self):
        turns = []
        while self.scheduler.has_requests() or self.batch_queue:
            turns.append(self.step_with_batch_queue()[1])
        # Enough steps for every token to be taken in.
        for _ in range(self.batch_queue_size):
            self.quiet_steps.on = False
            self.stage.execute_model(SchedulerOutput.make_empty())
        return turns


def script(dice, steps):
    """Mostly empty steps, as one user gives; requests decode, end, and their rows are used again."""
    made = []
    for _ in range(steps):
        names = [name for name in "01234" if dice.random() < 0.15]
        finished = [name for name in "56" if dice.random() < 0.1]
        made.append((names, finished))
    # The last step is sent, and with it what was kept back before it.
    return [*made, (["0"], [])]


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
@pytest.mark.parametrize("seed", range(5))
def test_the_same_is_done_in_the_same_order(stages, seed):
    steps = script(random.Random(seed), 200)
    upstream, ours = Core(stages, steps, quiet=False), Core(stages, steps, quiet=True)
    assert upstream.run() == ours.run()
    assert ours.scheduler.updates == upstream.scheduler.updates
    assert ours.stage.log == upstream.stage.log
    assert any(what == "took in" for what, _ in ours.stage.log)
    silent = sum(1 for names, finished in steps if not names and not finished)
    assert upstream.model_executor.messages - ours.model_executor.messages == silent > 0
