"""What is made of the steps that a scheduler noted."""

from benchmarks import arrivals


def test_sizes_of_steps():
    steps = ["1+1", "0", "0", "3+2"] + ["1", "2", "0"] * 20 + ["3"]
    described = arrivals.describe(steps, users=3)
    assert described["started_together"] == [1, 2]
    # The one step of three at the end is no arrangement.
    assert described["decoded_together"] == {"1": 20, "2": 20}


def test_the_scheduler_is_found_by_name():
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.core.sched.scheduler import Scheduler

    assert issubclass(resolve_obj_by_qualname("benchmarks.arrivals.Noting"), Scheduler)
