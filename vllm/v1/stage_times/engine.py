# SPDX-License-Identifier: Apache-2.0
"""Times of the engine core's loop.

Phases: `schedule`; `send` a step to the stages (pickle and copy; `room` is waiting for a place in the ring); `wait` for
the oldest result; `deserialise` it; `update` the scheduler from it; `input` from clients, of which `idle` is waiting
for any; `pause`, a millisecond that upstream sleeps after a step that scheduled nothing; `caller`, outside of the engine
where it runs in the caller's process.  A step is one turn of the loop and has the kind of what was scheduled in it.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.config.switches import switch
from vllm.v1.stage_times.kinds import DRAIN, kind_of
from vllm.v1.stage_times.recorder import Recorder, time_methods, time_reads, time_writes
from vllm.v1.stage_times.stage import Stage
from vllm.v1.stage_times.summary import Log, summarise


class StageTimesUnsupported(ValueError):
    """The workers of this executor cannot be reached."""


def watch_engine(engine: Any) -> None:
    """Time an EngineCore that is about to begin its loop, if its configuration asks for it.

    Raises:
        SwitchNotBoolean: see switches.py.
        StageTimesUnsupported: its stages are not processes of this machine that vLLM started itself.
    """
    if not switch(engine.vllm_config.additional_config, "stage_times"):
        return
    recorder = Recorder("engine core")
    Log(recorder)
    _watch_executor(recorder, engine.model_executor)
    _watch_scheduler(recorder, engine.scheduler)
    _watch_loop(recorder, engine)
    _answer_rpc(recorder, engine)
    recorder.reset()


def _watch_executor(recorder: Recorder, executor: Any) -> None:
    """Time how the executor talks to its workers, or the one worker that lives in this very process."""
    if getattr(executor, "rpc_broadcast_mq", None) is not None:
        time_writes(recorder, executor.rpc_broadcast_mq, "room", "send")
        for queue in executor.response_mqs:
            time_reads(recorder, queue, "wait", "deserialise")
        return
    worker = getattr(executor, "driver_worker", None)
    if worker is None:
        raise StageTimesUnsupported(
            f"additional_config has stage_times, and {type(executor).__name__} starts its workers where they cannot be timed; "
            "use --distributed-executor-backend mp, or leave it out"
        )
    time_methods(recorder, executor, execute_model="stage", sample_tokens="stage")
    stage = Stage(worker.rpc_rank)
    stage.watch_steps(worker)
    stage.end_steps(worker)
    stage.watch_runner(worker.worker)


def _watch_scheduler(recorder: Recorder, scheduler: Any) -> None:
    time_methods(recorder, scheduler, schedule="schedule", update_from_output="update")
    schedule = scheduler.schedule

    @functools.wraps(schedule)
    def kind_noted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        recorder.kind = kind_of(output)
        return output

    scheduler.schedule = kind_noted


def _watch_loop(recorder: Recorder, engine: Any) -> None:
    if not hasattr(engine, "_process_engine_step"):
        # In the caller's process, which calls step_fn itself.
        step = engine.step_fn

        @functools.wraps(step)
        def step_ended() -> Any:
            recorder.end()
            outputs = step()
            recorder.finish(recorder.kind or DRAIN)
            recorder.begin("caller")
            return outputs

        engine.step_fn = step_ended
        recorder.begin("caller")
        return
    time_methods(recorder, engine, _process_input_queue="input")
    time_methods(recorder, engine.input_queue, get="idle")
    turn, post_step = engine._process_engine_step, engine.post_step

    @functools.wraps(post_step)
    def pause_begins(*args: Any) -> None:
        post_step(*args)
        # What follows is the sleep, if anything; the end of the step closes the phase.
        recorder.begin("pause")

    @functools.wraps(turn)
    def turn_ended() -> Any:
        result = turn()
        recorder.finish(recorder.kind or DRAIN)
        return result

    engine.post_step, engine._process_engine_step = pause_begins, turn_ended


def _answer_rpc(recorder: Recorder, engine: Any) -> None:
    rpc = engine.collective_rpc

    @functools.wraps(rpc)
    def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> list:
        if method == "reset_stage_times":
            recorder.reset()
        results = rpc(method, *args, **kwargs)
        # A list for each process, which may have several threads to tell about.
        return [[summarise(recorder)], *results] if method == "stage_times" else results

    engine.collective_rpc = collective_rpc
