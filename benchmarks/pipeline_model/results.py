"""What users see and what stages do, out of a trace."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from .engine import Served, Trace
from .pipeline import Span


def user_rate(served: Served) -> float:
    """Tokens a second after the first one."""
    return (len(served.tokens) - 1) / (served.tokens[-1] - served.tokens[0]) * 1e3


def first_token_s(served: Served) -> float:
    return (served.tokens[0] - served.arrived) / 1e3


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


def window(trace: Trace) -> tuple[float, float]:
    """While all requests were decoding: from the last first token to the first last one, in milliseconds."""
    return (
        max(served.tokens[0] for served in trace.served.values()),
        min(served.tokens[-1] for served in trace.served.values()),
    )


def busy_ms(spans: Sequence[Span], stage: int, begin: float, end: float) -> float:
    """Time within [begin, end) that `stage` worked."""
    return sum(max(0.0, min(span.end, end) - max(span.begin, begin)) for span in spans if span.stage == stage)


def idle_share(trace: Trace, begin: float, end: float) -> list[float]:
    """For each stage the part of [begin, end) in which its GPU had nothing to do."""
    return [1 - busy_ms(trace.gpu, stage, begin, end) / (end - begin) for stage in range(trace.stages)]


def micro_batches(trace: Trace, begin: float, end: float) -> float:
    """Micro-batches that the first stage starts for each token of a user, over [begin, end)."""
    started = sum(span.stage == 0 and begin <= span.begin < end for span in trace.gpu)
    tokens = sum(begin <= at < end for served in trace.served.values() for at in served.tokens)
    return started / (tokens / len(trace.served))


def summary(trace: Trace) -> dict:
    """Rates in tokens/s, times in s, idle share by stage while all decode."""
    rates = [user_rate(served) for served in trace.served.values() if len(served.tokens) > 1]
    waits = [first_token_s(served) for served in trace.served.values()]
    found = {
        "users": len(trace.served),
        "first_token_s": {"median": percentile(waits, 0.5), "p90": percentile(waits, 0.9), "worst": max(waits)},
    }
    if rates:
        begin, end = window(trace)
        found |= {"per_user": statistics.mean(rates), "slowest": min(rates), "sum": sum(rates)}
        if end > begin:
            found |= {
                "micro_batches": micro_batches(trace, begin, end),
                "idle": idle_share(trace, begin, end),
            }
    return found
