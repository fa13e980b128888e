"""A pipeline without a model: the real scheduler, the engine's batch queue, and stages that only keep books.

`Pipeline.step` does what the engine's loop does in one round: schedule a micro-batch, and take back the oldest one
once as many are on their way as the pipeline holds.  The first stage notes a micro-batch when it is sent and the last
when it comes back; in between the scheduler goes on working with the same objects, so notes that differ show that it
changed what it had already handed out.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field

import torch

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.outputs import RequestError
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.pipeline_options import KEY, SCHEDULER
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

VOCABULARY = 1000


def token_at(seed: int, position: int) -> int:
    """The token of a request at a position: a function of both, so that one that is lost or moved shows."""
    return (seed * 7919 + position * 104729) % VOCABULARY


@dataclass(frozen=True)
class Setup:
    """What a scheduler is built from; tokens, requests and blocks."""

    stages: int = 3
    asynchronous: bool = False
    budget: int = 64
    seats: int = 8
    block: int = 16
    blocks: int = 512
    states: bool = False
    policy: str = "fcfs"
    options: dict = field(default_factory=dict)


def engine_config(model: str, setup: Setup) -> VllmConfig:
    """The configuration as the engine makes it, then sized for the harness."""
    config = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        # There are no weights, and none are looked for.
        load_format="dummy",
        pipeline_parallel_size=setup.stages,
        max_model_len=4096,
        max_num_batched_tokens=max(setup.budget, setup.seats),
        max_num_seqs=setup.seats,
        scheduling_policy=setup.policy,
        # Named because one stage, the simplest pipeline, does not get it by default.
        scheduler_cls=SCHEDULER,
        enable_prefix_caching=setup.states,
        # The GPUs' default, which is another one on the CPU that tests run on.
        additional_config={KEY: {"min_decode_batch": 1} | setup.options},
    ).create_engine_config()
    # The CPU platform turns it off, and the scheduler does not depend on a platform.
    config.scheduler_config.async_scheduling = setup.asynchronous
    config.cache_config.block_size = setup.block
    config.cache_config.num_gpu_blocks = setup.blocks
    return config


def build(config: VllmConfig, setup: Setup, scheduler: type[Scheduler] | None = None) -> Scheduler:
    attention = FullAttentionSpec(block_size=setup.block, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec(["attention"], attention)]
    if setup.states:
        state = MambaSpec(
            block_size=setup.block,
            shapes=((8,),),
            dtypes=(torch.bfloat16,),
            page_size_padded=attention.page_size_bytes,
            mamba_cache_mode="align",
        )
        groups.append(KVCacheGroupSpec(["state"], state))
    cls = scheduler or config.scheduler_config.get_scheduler_cls()
    return cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=setup.blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=setup.block,
        hash_block_size=setup.block,
        log_stats=True,
    )


class Stage:
    """What a worker remembers of each request, and refuses to believe."""

    def __init__(self) -> None:
        self.prefill: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.blocks: dict[str, list[list[int]]] = {}

    def receive(self, output: SchedulerOutput) -> dict[str, int]:
        """Positions of the tokens that the micro-batch samples, by request id."""
        for name in output.finished_req_ids | output.preempted_req_ids:
            self.prefill.pop(name, None), self.computed.pop(name, None), self.blocks.pop(name, None)
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.prefill, f"{new.req_id} starts twice"
            self.prefill[new.req_id] = len(new.prefill_token_ids)
            self.computed[new.req_id] = new.num_computed_tokens
            self.blocks[new.req_id] = [list(ids) for ids in new.block_ids]
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            assert self.computed[name] == computed, f"{name}: {self.computed[name]} computed here, {computed} there"
            for own, more in zip(self.blocks[name], blocks or (), strict=bool(blocks)):
                own.extend(more)
        samples = {}
        for name, tokens in output.num_scheduled_tokens.items():
            assert tokens > 0
            self.computed[name] += tokens
            if self.computed[name] >= self.prefill[name]:
                samples[name] = self.computed[name]
        return samples

    def books(self) -> dict:
        return copy.deepcopy({"prefill": self.prefill, "computed": self.computed, "blocks": self.blocks})


@dataclass
class Sent:
    """A micro-batch on its way."""

    output: SchedulerOutput
    samples: dict[str, int]
    books: dict


class Pipeline:
    """The engine's loop around a scheduler."""

    def __init__(self, scheduler: Scheduler, setup: Setup) -> None:
        self.scheduler = scheduler
        self.size = scheduler.vllm_config.max_concurrent_batches
        self.queue: deque[Sent] = deque()
        self.first, self.last = Stage(), Stage()
        self.seeds: dict[str, int] = {}
        self.received: dict[str, list[int]] = {}
        #: Per micro-batch: tokens by request id, and which of them decode.
        self.batches: list[dict[str, int]] = []
        self.decodes: list[list[str]] = []
        #: Request id to the number of micro-batches that had been sent when its first token came.
        self.first_token: dict[str, int] = {}
        self.preemptions = 0
        #: Requests whose logits are NaN from now on, and the errors that ended requests.
        self.damaged: set[str] = set()
        self.errors: dict[str, RequestError] = {}
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(setup.block, sha256) if setup.states else None

    def add(self, name: str, prompt: int, length: int, seed: int = 0, priority: int = 0, arrival: float = 0.0) -> None:
        self.seeds[name] = seed
        self.received[name] = []
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=[token_at(seed, position) for position in range(prompt)],
                sampling_params=SamplingParams(max_tokens=length, ignore_eos=True),
                pooling_params=None,
                arrival_time=arrival,
                priority=priority,
                block_hasher=self.hasher,
            )
        )

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        if self.scheduler.has_requests():
            decoding = {request.request_id for request in self.scheduler.running if not request.is_prefill_chunk}
            output = self.scheduler.schedule()
            self.preemptions += len(output.preempted_req_ids)
            self.batches.append(dict(output.num_scheduled_tokens))
            self.decodes.append([name for name in output.num_scheduled_tokens if name in decoding])
            samples = self.first.receive(output)
            self.queue.append(Sent(output, samples, self.first.books()))
            if len(self.queue) < self.size and (output.num_scheduled_tokens or self.scheduler.has_requests()):
                return
        if not self.queue:
            return
        sent = self.queue.popleft()
        samples = self.last.receive(sent.output)
        assert samples == sent.samples and self.last.books() == sent.books, "stages keep different books"
        names = list(sent.output.num_scheduled_tokens)
        sampling = samples.keys() - self.damaged
        tokens = [[token_at(self.seeds[name], samples[name])] if name in sampling else [] for name in names]
        returned = self.scheduler.update_from_output(
            sent.output,
            ModelRunnerOutput(
                names,
                {name: i for i, name in enumerate(names)},
                tokens,
                num_nans_in_logits={name: 512 * (name in self.damaged) for name in names},
            ),
        )
        for outputs in returned.values():
            for output in outputs.outputs:
                self.received[output.request_id].extend(output.new_token_ids)
                self.first_token.setdefault(output.request_id, len(self.batches))
                if output.error is not None:
                    self.errors[output.request_id] = output.error

    def run(self, steps: int | None = None) -> None:
        """For that many rounds; unless said, until nothing is left, which a small test reaches in far fewer than here."""
        for _ in range(5000 if steps is None else steps):
            if not self.queue and not self.scheduler.has_requests():
                return
            self.step()
        assert steps is not None, f"waiting forever: {list(self.scheduler.requests)}"

    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
