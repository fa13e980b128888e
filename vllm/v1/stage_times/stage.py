# SPDX-License-Identifier: Apache-2.0
"""Times of a stage: the loop of a worker process and, where results are copied on a thread of its own, that thread.

Phases of the loop:

- `wait` for a message of the engine core, `deserialise` it
- `announcement`: wait for the shapes that the stage before announces; `receive` activations (posted, not waited for, on
  GPUs; all of the transfer on a CPU)
- `update` what is known of the requests, with the tokens sampled meanwhile; prepare `inputs`, `attention` metadata,
  `model inputs` (rows of the n-gram table, and on GPUs waiting for the tokens they belong to), and the rest, `prepare`
- `forward`: launch it; on a CPU, compute it
- `send on` to the next stage
- `sample`; `tokens`: hand the sampled ones to the other stages, or receive them; `output`, the rest of it
- `answer` the engine core, or give the answer to the thread

A step of a micro-batch is two messages, execute_model and sample_tokens, with the wait before each; an empty step is
one.  Phases of the thread, in steps of one answer: `wait` for one, `result` from the GPU, `send` it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm.config.switches import switch
from vllm.v1.stage_times.gpu_clock import FORWARD, GpuClock
from vllm.v1.stage_times.kinds import CALL, DECODE, EMPTY, kind_of
from vllm.v1.stage_times.recorder import Recorder, time_methods, time_reads, time_writes, timed
from vllm.v1.stage_times.summary import Log, summarise


def watch_worker(process: Any) -> None:
    """Time a WorkerProc that is about to begin its loop, if its configuration asks for it.

    Raises:
        SwitchNotBoolean: see switches.py.
    """
    if not switch(process.worker.vllm_config.additional_config, "stage_times"):
        return
    stage = Stage(process.rank)
    stage.watch_process(process)
    stage.watch_steps(process.worker)
    # Only after the warm-up: before, there is neither a cache nor a graph to run, and kernels are compiled.
    worker = process.worker.worker
    warm_up = worker.compile_or_warm_up_model

    @functools.wraps(warm_up)
    def then_watch(*args: Any, **kwargs: Any) -> Any:
        result = warm_up(*args, **kwargs)
        stage.watch_runner(worker)
        stage.reset()
        return result

    worker.compile_or_warm_up_model = then_watch


class Stage:
    """One worker's recorders, and what it answers with."""

    def __init__(self, rank: int) -> None:
        self.recorder = Recorder(f"stage {rank}")
        self.answers: Recorder | None = None
        self.gpu = GpuClock() if torch.cuda.is_available() else None
        self._in_forward = False
        Log(self.recorder)

    def reset(self) -> None:
        self.recorder.reset()
        if self.answers is not None:
            self.answers.reset()
        if self.gpu is not None:
            self.gpu.reset()

    def figures(self) -> list[dict[str, Any]]:
        """One summary for each thread."""
        if self.gpu is not None:
            self.gpu.read()
        summaries = [summarise(self.recorder, self.gpu.series if self.gpu is not None else None)]
        return summaries + ([summarise(self.answers)] if self.answers is not None else [])

    def watch_process(self, process: Any) -> None:
        """Time a WorkerProc's messages, and end steps where it goes back to wait for more."""
        recorder = self.recorder
        time_reads(recorder, process.rpc_broadcast_mq, "wait", "deserialise")
        time_methods(recorder, process, handle_output="answer")
        if process.use_async_scheduling:
            answers = self.answers = Recorder(f"{recorder.part}, answers")
            time_methods(answers, process.async_output_queue, get="wait")
            time_writes(answers, process.worker_response_mq, "room", "send")
            enqueue = timed(answers, "result", process.enqueue_output)

            @functools.wraps(enqueue)
            def answered(output: Any) -> None:
                enqueue(output)
                answers.finish(CALL)

            process.enqueue_output = answered
        execute = process._execute_worker_rpc

        @functools.wraps(execute)
        def ended(request: Any) -> None:
            execute(request)
            method = request[0]
            if method == "execute_model":
                if recorder.kind == EMPTY:
                    recorder.finish(EMPTY)
            else:
                recorder.finish((recorder.kind or CALL) if method == "sample_tokens" else CALL)

        process._execute_worker_rpc = ended

    def watch_steps(self, worker: Any) -> None:
        """Learn kinds of steps from a WorkerWrapperBase, and let it answer for us."""
        execute = worker.execute_model

        @functools.wraps(execute)
        def kind_noted(scheduler_output: Any) -> Any:
            self.recorder.kind = kind_of(scheduler_output)
            return execute(scheduler_output)

        worker.execute_model = kind_noted
        worker.stage_times, worker.reset_stage_times = self.figures, self.reset

    def end_steps(self, worker: Any) -> None:
        """End steps of a worker that the engine core calls in its own process; between them, it waits."""
        recorder, execute, sample = self.recorder, worker.execute_model, worker.sample_tokens

        @functools.wraps(execute)
        def executed(scheduler_output: Any) -> Any:
            recorder.end()
            output = execute(scheduler_output)
            if recorder.kind == EMPTY:
                recorder.finish(EMPTY)
                recorder.begin("wait")
            return output

        @functools.wraps(sample)
        def sampled(grammar_output: Any) -> Any:
            output = sample(grammar_output)
            recorder.finish(recorder.kind or CALL)
            recorder.begin("wait")
            return output

        worker.execute_model, worker.sample_tokens = executed, sampled
        recorder.begin("wait")

    def watch_runner(self, worker: Any) -> None:
        """Time what a Worker, its model runner and the pipeline group do in a step."""
        from vllm.distributed.parallel_state import get_pp_group
        from vllm.v1.worker.gpu_worker import AsyncIntermediateTensors

        recorder, runner = self.recorder, worker.model_runner
        group = get_pp_group()
        time_methods(
            recorder, group, recv_object="announcement", irecv_tensor_dict="receive", isend_tensor_dict="send on"
        )
        time_methods(recorder, AsyncIntermediateTensors, wait_for_comm="receive")
        time_methods(recorder, runner, execute_model="prepare", sample_tokens="output")
        if not worker.use_v2_model_runner:
            return  # the older runner has other parts: what it does before and in the forward stays in one
        update = ("update_pp_decode_requests", "finish_requests", "free_states", "add_requests", "update_requests")
        time_methods(recorder, runner, **dict.fromkeys(update, "update"))
        time_methods(recorder, runner, prepare_inputs="inputs", prepare_attn="attention", sample="sample")
        time_methods(recorder, runner.model_state, prepare_attn="attention", prepare_inputs="model inputs")
        if runner.pp_handler is not None:
            time_methods(recorder, runner.pp_handler, broadcast="tokens", receive="tokens")
        self._watch_forward(runner)

    def _watch_forward(self, runner: Any) -> None:
        """Upstream marks the begin of a forward for its own timing, and tells the connector of its end."""
        before, after = runner.step_timing.forward_start, runner.kv_connector.finish_forward

        @functools.wraps(before)
        def begins() -> None:
            before()
            self._in_forward = True
            if self.gpu is not None:
                self.gpu.begin()
            self.recorder.begin("forward")

        @functools.wraps(after)
        def ends() -> None:
            # A connector calls it on steps without a forward too.
            if self._in_forward:
                self._in_forward = False
                self.recorder.end()
                if self.gpu is not None:
                    self.gpu.end(self.recorder.kind or DECODE, FORWARD)
            after()

        runner.step_timing.forward_start, runner.kv_connector.finish_forward = begins, ends
        if self.gpu is not None:
            sample = runner.sample

            @functools.wraps(sample)
            def sampled(*args: Any, **kwargs: Any) -> Any:
                self.gpu.begin()
                try:
                    return sample(*args, **kwargs)
                finally:
                    self.gpu.end(self.recorder.kind or DECODE, "sample")

            runner.sample = sampled
