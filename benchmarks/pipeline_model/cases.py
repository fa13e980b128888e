"""The model's predictions for published and measured cases, as samples for a record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.record import FOLDER, read
from vllm.v1.core.sched.pipeline_options import KEY, MEASURED, SCHEDULER

from . import results, workloads
from .arranged import in_groups
from .configs import Serving
from .cost import Measured
from .pipeline import Overheads
from .published import MACHINES, SIX, THREE, Calibration, Machine

#: Host time of a micro-batch and of an empty step on a stage.  Set from two runs of stock on two H200s, PP=2, 8 layers:
#: one user has a real and an empty step a token (200 tok/s, 5.0 ms), two have two real ones (135 tok/s, 7.4 ms).
HOST = Overheads(host_ms=3.7, empty_ms=1.3)
#: the same runs, users -> tok/s for each; 1 and 2 set HOST
TWO_H200 = {1: 200.0, 2: 135.0, 4: 142.0, 8: 126.0}
#: What a stage of those runs (4 layers, 128 experts, bf16) computes: half of 1.8 ms of kernels, 0.1 ms of experts for
#: each further row at 4 TB/s, prefill at 77k tok/s on one card.
TWO_H200_STAGES = Measured(2, {1: 0.9, 2: 1.0}, prefill_ms=1e3 / 77e3 / 2)
#: the runs at real widths
RATES = FOLDER / "pipeline-gpu-rates.json"
#: Users who press the key together. All but the first arrive during the first prompt's step, so that the draw is moot.
ARRIVALS_MS = (0.0, 20.0)
#: The GPUs' default, which is another one on the CPU that this runs on.
MEASURING = ((KEY, {"min_decode_batch": MEASURED}),)
#: tokens of an answer, of which the first hundred or so go by while a measuring scheduler tries what it may choose
LONG_ANSWER = 512
#: Uncached tokens of each prompt: the published rates were taken with "no prefill in flight".
TAIL = 16


def decode_cases(calibration: Calibration) -> Iterator[dict]:
    """Every published rate under three arrangements: all users in one micro-batch, spread, and as stock has it."""
    for machine in MACHINES:
        for users, (low, high) in machine.rates.items():
            stages = machine.serving.stages
            known = {
                "case": "decode",
                "machine": machine.name,
                "own_bytes": calibration.own_bytes,
                "users": users,
                "published": [low, high],
            }
            for arrangement, groups in (("merged", 1), ("spread", min(users, stages))):
                yield known | {"arrangement": arrangement} | _decode(calibration, machine, users, groups)
            yield known | {"arrangement": "stock"} | _stock(calibration, machine, users)


def _decode(calibration: Calibration, machine: Machine, users: int, groups: int, host: Overheads = HOST) -> dict:
    serving = replace(machine.serving, scheduler=in_groups(groups))
    found = results.summary(workloads.decoding(serving, calibration.cost(machine), host, users, tail=TAIL))
    return _short(found)


def _short(found: dict) -> dict:
    return {
        "per_user": round(found["per_user"], 2),
        "sum": round(found["sum"], 1),
        "micro_batches": round(found["micro_batches"], 2),
        "idle": [round(share, 3) for share in found["idle"]],
    }


def _stock(calibration: Calibration, machine: Machine, users: int) -> dict:
    trace = workloads.decoding(
        machine.serving, calibration.cost(machine), HOST, users, tail=TAIL, arrivals_ms=ARRIVALS_MS
    )
    return _short(results.summary(trace))


def prefill_cases(calibration: Calibration) -> Iterator[dict]:
    """Published waits in seconds."""
    fair = replace(SIX.serving, long_prefill_token_threshold=1024)
    long, short = 230_000, 3_000

    def waits(machine: Machine, serving: Serving, lengths: list[int], gap_ms: float = 1000.0) -> list[float]:
        arrivals = [gap_ms * at for at in range(len(lengths))]
        trace = workloads.prompts(serving, calibration.cost(machine), HOST, lengths, arrivals)
        return [results.first_token_s(trace.served[f"user-{user}"]) for user in range(len(lengths))]

    def case(machine: Machine, what: str, seconds: float, published: float) -> dict:
        known = {"case": "prefill", "machine": machine.name, "own_bytes": calibration.own_bytes, "what": what}
        return known | {"seconds": round(seconds, 2), "published": published}

    stock = waits(SIX, SIX.serving, [long, short])
    yield case(SIX, "3k behind 230k, no threshold", stock[1], 40.0)
    shared = waits(SIX, fair, [long, short])
    yield case(SIX, "3k behind 230k, threshold 1024", shared[1], 2.3)
    yield case(SIX, "the 230k itself, threshold 1024", shared[0], 40.0)
    both = waits(SIX, SIX.serving, [long, long], 0.0)
    yield case(SIX, "second of two 230k, no threshold", both[1], 80.0)
    both = waits(SIX, fair, [long, long], 0.0)
    yield case(SIX, "first of two 230k, threshold 1024", both[0], 67.0)
    yield case(SIX, "second of two 230k, threshold 1024", both[1], 70.0)
    yield case(SIX, "last of seven 230k, no threshold", waits(SIX, SIX.serving, [long] * 7, 0.0)[-1], 225.0)
    yield case(THREE, "last of four 248k", waits(THREE, THREE.serving, [247_823] * 4, 0.0)[-1], 368.0)


def h200_cases() -> Iterator[dict]:
    """Stock on two H200s with 8k prompts that arrive together; the measured rates are tok/s for each user."""
    for users, measured in TWO_H200.items():
        serving = Serving(stages=2, max_num_seqs=8)
        engine, make = workloads.engine_for(serving, TWO_H200_STAGES, HOST), workloads.Requests()
        trace = engine.serve(
            make.make(f"user-{user}", user, 8192, 128, engine.clock.seconds()) for user in range(users)
        )
        found = results.summary(trace)
        yield {"case": "two H200", "users": users, "measured": measured} | _short(found)


def wide_cases() -> Iterator[dict]:
    """Two H200s at real widths (`python -m benchmarks.pipeline_rates`), all rates of which were measured.

    The runs with one micro-batch set the stage times: half of a token's time, the hosts' part in it included, so that none
    is added.  Beside them a host needs about 2.6 ms for a micro-batch, which two stages of 4 ms hide.  What several
    micro-batches make of these stages is predicted.
    """
    samples = read(RATES)["samples"]
    for context in sorted({sample["context"] for sample in samples}):
        measured = {(s["rule"], s["users"]): s["per_user"] for s in samples if s["context"] == context}
        alone = {users: rate for (rule, users), rate in measured.items() if rule == "one micro-batch"}
        cost = Measured(2, {users: 500.0 / rate for users, rate in alone.items()})
        for users in sorted(set(alone) - {1}):
            for rule, scheduler in (("spread", in_groups(2)), ("measured", SCHEDULER)):
                serving = Serving(stages=2, max_num_seqs=8, scheduler=scheduler)
                if scheduler == SCHEDULER:
                    serving = replace(serving, additional=MEASURING)
                trace = workloads.decoding(serving, cost, Overheads(), users, tail=TAIL, output=LONG_ANSWER)
                known = {"case": "two H200 at real widths", "context": context, "users": users, "rule": rule}
                yield known | {"measured": measured[rule, users]} | _short(results.summary(trace))


def host_cases(calibration: Calibration) -> Iterator[dict]:
    """Seven users on six cards and four on three: the rate by number of micro-batches and host time of each."""
    for machine, users in ((SIX, 7), (THREE, 4)):
        for host_ms in (0.0, 2.0, 3.7, 6.0, 10.0):
            host = replace(HOST, host_ms=host_ms, empty_ms=min(HOST.empty_ms, host_ms))
            known = {"case": "host", "machine": machine.name, "users": users, "host_ms": host_ms}
            for groups in range(1, machine.serving.stages + 1):
                yield known | {"groups": groups} | _decode(calibration, machine, users, groups, host)
            trace = workloads.decoding(
                replace(machine.serving, scheduler=SCHEDULER, additional=MEASURING),
                calibration.cost(machine),
                host,
                users,
                tail=TAIL,
                output=LONG_ANSWER,
            )
            yield known | {"groups": "measured"} | _short(results.summary(trace))


def partition_cases(calibration: Calibration) -> Iterator[dict]:
    """Seven users spread over six cards, by how many layers the stages hold: the last also has the output layer."""
    serving = replace(SIX.serving, scheduler=in_groups(6))
    for last in range(8, 2, -1):
        more, left = divmod(48 - last, 5)
        layers = tuple(more + (stage < left) for stage in range(5)) + (last,)
        cost = replace(calibration.cost(SIX), layers=layers)
        found = results.summary(workloads.decoding(serving, cost, HOST, 7, tail=TAIL))
        yield {"case": "partition", "machine": SIX.name, "users": 7, "layers": list(layers)} | _short(found)
