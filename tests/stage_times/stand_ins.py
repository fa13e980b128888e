"""What upstream gives the hooks, and what tests read from them."""

from types import SimpleNamespace


def output(tokens=1, new=(), resumed=(), outputs=(3,)):
    cached = SimpleNamespace(resumed_req_ids=set(resumed), num_output_tokens=list(outputs))
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens, scheduled_new_reqs=list(new), scheduled_cached_reqs=cached
    )


def totals(figures, kind):
    """Seconds by phase."""
    return {phase: series["total_ms"] / 1e3 for phase, series in figures["steps"][kind]["phases"].items()}
