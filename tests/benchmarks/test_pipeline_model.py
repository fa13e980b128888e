"""The pipeline model gives the answers that can be worked out by hand."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from benchmarks.pipeline_model import model, results, workloads
from benchmarks.pipeline_model.arranged import in_groups
from benchmarks.pipeline_model.configs import UPSTREAM_ASYNC, UPSTREAM_SYNC, Requests, Serving
from benchmarks.pipeline_model.cost import Measured, Roofline, Row, experts_read
from benchmarks.pipeline_model.engine import Stuck
from benchmarks.pipeline_model.pipeline import Overheads, Pipeline
from benchmarks.pipeline_model.timeline import Panel, draw

NOTHING = Overheads()
#: milliseconds of a stage for any number of rows, so that a stage's turns can be counted
FLAT = 5.0


def serving(stages, **changes):
    return Serving(stages=stages, **changes)


def decode(stages, users, overheads=NOTHING, cost=None, output=64, **changes):
    """`users` with 4,000 cached tokens of which 16 are left: all prompts fit in one step."""
    return workloads.decoding(
        serving(stages, **changes),
        cost or Measured(stages, {1: FLAT}),
        overheads,
        users,
        context=4_000,
        tail=16,
        output=output,
    )


@pytest.mark.parametrize("scheduler", [UPSTREAM_ASYNC, UPSTREAM_SYNC])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_one_user_visits_the_stages_one_after_the_other(stages, scheduler):
    trace = decode(stages, 1, scheduler=scheduler, asynchronous=scheduler == UPSTREAM_ASYNC)
    found = results.summary(trace)
    assert found["per_user"] == pytest.approx(1e3 / (stages * FLAT))
    assert found["idle"] == pytest.approx([1 - 1 / stages] * stages, abs=0.02)


def test_as_many_users_as_stages_each_go_at_full_rate_when_spread():
    found = results.summary(decode(3, 3, scheduler=in_groups(3)))
    assert found["micro_batches"] == pytest.approx(3, abs=0.1)
    # The last of three starts two steps late, which its rate counts.
    assert [found["per_user"], found["slowest"]] == pytest.approx([1e3 / (3 * FLAT)] * 2, rel=0.02)
    assert max(found["idle"]) < 0.03


def test_a_merged_batch_leaves_the_other_stages_idle_and_costs_rate():
    by_row = Measured(3, {1: 5.0, 3: 9.0})
    merged = results.summary(decode(3, 3, cost=by_row, scheduler=in_groups(1)))
    spread = results.summary(decode(3, 3, cost=by_row, scheduler=in_groups(3)))
    assert merged["per_user"] == pytest.approx(1e3 / 27.0, rel=0.01)
    assert spread["per_user"] == pytest.approx(1e3 / 15.0, rel=0.01)
    assert min(merged["idle"]) > 0.6


def test_stock_keeps_users_merged_whose_prompts_end_together():
    found = results.summary(decode(3, 3, scheduler=UPSTREAM_ASYNC))
    assert found["micro_batches"] == pytest.approx(1, abs=0.1)


def test_stock_merges_all_who_arrive_while_the_first_is_under_way():
    """Empty steps fill the queue, and the engine core waits for the first result before it looks at anybody else."""
    trace = workloads.decoding(
        serving(3), Measured(3, {1: FLAT}), NOTHING, 4, context=4_000, tail=16, arrivals_ms=(0.1, 10.0), output=64
    )
    begin, end = results.window(trace)
    together = {span.requests for span in trace.gpu if begin <= span.begin < end}
    assert sorted(map(len, together)) == [1, 3]


def test_host_time_makes_merging_better():
    slow = Overheads(host_ms=12.0)
    merged = results.summary(decode(2, 2, slow, scheduler=in_groups(1)))
    spread = results.summary(decode(2, 2, slow, scheduler=in_groups(2)))
    # A host thread is the limit: two micro-batches for each token against one.
    assert spread["per_user"] == pytest.approx(1e3 / 24.0, rel=0.03)
    assert merged["per_user"] > 1.5 * spread["per_user"]


def test_busy_and_idle_time_add_up():
    trace = decode(3, 2, scheduler=in_groups(2))
    begin, end = results.window(trace)
    for stage, idle in enumerate(results.idle_share(trace, begin, end)):
        assert results.busy_ms(trace.gpu, stage, begin, end) + idle * (end - begin) == pytest.approx(end - begin)
    for stage in range(3):
        mine = [span for span in trace.gpu if span.stage == stage]
        assert all(one.end <= two.begin for one, two in zip(mine, mine[1:])), "a stage did two things at once"


def test_runs_repeat():
    first, second = (decode(3, 4, Overheads(host_ms=1.0, empty_ms=0.3)) for _ in range(2))
    assert first.gpu == second.gpu
    assert [one.tokens for one in first.served.values()] == [two.tokens for two in second.served.values()]


def test_every_user_gets_every_token_in_order():
    trace = decode(3, 4, output=20, max_num_seqs=2)
    for served in trace.served.values():
        assert len(served.tokens) == 20 and served.tokens == sorted(served.tokens)


def test_a_short_prompt_waits_for_a_long_one_unless_chunks_are_capped():
    cost = Measured(2, {1: 1.0}, prefill_ms=0.01)
    waits = {}
    for threshold in (0, 1024):
        trace = workloads.prompts(
            serving(2, long_prefill_token_threshold=threshold), cost, NOTHING, [100_000, 1_000], [0.0, 50.0]
        )
        waits[threshold] = results.first_token_s(trace.served["user-1"])
    # 100,000 tokens at 0.01 ms a token and stage, one chunk behind the other.
    assert waits[0] == pytest.approx(1.0, rel=0.05)
    assert waits[1024] < 0.15


def test_preempted_users_finish_too():
    """Two prompts of a block each in a pool of three: one has to give way when both need a second."""
    trace = workloads.prompts(
        serving(2, pool_tokens=3 * 1568), Measured(2, {1: 1.0}), NOTHING, [1_560, 1_560], [0.0, 0.0], outputs=[20, 20]
    )
    assert [len(served.tokens) for served in trace.served.values()] == [20, 20]


def test_a_scheduler_that_schedules_nothing_is_named_stuck(monkeypatch):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    monkeypatch.setattr("benchmarks.pipeline_model.engine.PATIENCE", 50)
    # Nothing is admitted.
    asleep = type("Asleep", (AsyncScheduler,), {"__init__": _asleep})
    engine = workloads.engine_for(serving(2, scheduler=asleep), Measured(2, {1: 1.0}), NOTHING)
    with pytest.raises(Stuck, match="scheduled nothing"):
        engine.serve([Requests().make("a", 0, 10, 1, engine.clock.seconds())])


def _asleep(self, *args, **kwargs):
    super(type(self), self).__init__(*args, **kwargs)
    self.max_num_active_reqs = 0


def test_schedulers_read_simulated_time():
    import time

    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    class Watch(AsyncScheduler):
        seen: list[float] = []

        def update_from_output(self, *args):
            self.seen.append(time.monotonic())
            return super().update_from_output(*args)

    outside = time.monotonic()
    decode(2, 1, scheduler=Watch, output=4)
    steps = [b - a for a, b in zip(Watch.seen, Watch.seen[1:]) if b > a]
    assert steps[-1] == pytest.approx(2 * FLAT / 1e3)
    assert outside <= time.monotonic() < outside + 60


def test_transfers_and_hops_lengthen_a_token():
    slow_link = Overheads(hop_ms=1.0, link_gbs=model.ACTIVATION_BYTES / 1e6)
    # From one stage to the other 1 ms and a token at 1 ms; back to the first 1 ms.
    assert results.summary(decode(2, 1, slow_link))["per_user"] == pytest.approx(1e3 / (2 * FLAT + 3.0), rel=0.01)


def test_roofline_counts_the_published_bytes():
    cost = Roofline((16, 16, 16), model.INT4_INT8, 936.0, 1.0, float("inf"), 0.0)
    row = [Row(1, 1)]
    weights = sum(cost.read_bytes(stage, row) for stage in range(3)) - model.RECURRENT_BYTES
    assert weights == pytest.approx(5.84e9, rel=1e-3)
    assert cost.gpu_ms(2, row) > cost.gpu_ms(1, row) == cost.gpu_ms(0, row)
    assert experts_read([Row(1, 1)]) == pytest.approx(10)
    assert 69 > experts_read([Row(1, 1)] * 7) > 60
    assert experts_read([Row(2048, 2048)]) == pytest.approx(512)


def test_rows_from_host_memory_cost_their_transfer():
    card = Roofline((48,), model.INT4_INT8, 936.0, 1.0, float("inf"), 0.0)
    host = replace(card, host_rows_gbs=25.0)
    selected = 2048 * 2048 * 12
    expected = selected / 25e6 - selected / 936e6
    assert host.gpu_ms(0, [Row(1, 50_000)]) - card.gpu_ms(0, [Row(1, 50_000)]) == pytest.approx(expected)


def test_measured_times_are_joined_by_lines():
    cost = Measured(2, {1: 2.0, 3: 3.0}, prefill_ms=0.5)
    ms = [cost.gpu_ms(0, [Row(1, 9)] * rows) for rows in (1, 2, 3, 5)]
    assert ms == [2.0, 2.5, 3.0, 4.0]
    assert cost.gpu_ms(0, [Row(10, 10), Row(1, 9)]) == 7.0
    with pytest.raises(ValueError, match="starts with one row"):
        Measured(2, {2: 1.0})


def test_groups_and_stages_are_checked():
    with pytest.raises(ValueError, match="at most one a stage"):
        decode(2, 1, scheduler=in_groups(3))
    with pytest.raises(ValueError, match="2 stages, the scheduler is set up for 3"):
        workloads.engine_for(serving(3), Measured(2, {1: 1.0}), NOTHING)
    with pytest.raises(ValueError, match="no field 'nonsense'"):
        workloads.engine_for(serving(2, options=(("nonsense", 1),)), Measured(2, {1: 1.0}), NOTHING)


def test_percentiles():
    assert results.percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0
    assert results.percentile([3.0, 1.0, 2.0, 4.0], 0.9) == 4.0
    assert results.percentile([7.0], 0.5) == 7.0


def test_the_picture_is_well_formed_and_has_a_box_for_each_turn():
    trace = decode(2, 1)
    begin, _ = results.window(trace)
    root = ElementTree.fromstring(draw([Panel("a < b", trace, begin, begin + 8 * FLAT)]))
    boxes = [box for box in root.iter() if box.tag.endswith("rect") and len(box)]
    assert 8 <= len(boxes) <= 9
    assert "a < b" in [text.text for text in root.iter() if text.tag.endswith("text")]


def test_a_pipeline_of_one_micro_batch_by_hand():
    pipeline = Pipeline(Measured(2, {1: 3.0}), Overheads(host_ms=1.0, return_ms=0.5), asynchronous=True)
    # Launches end at 1 and 2; the GPUs work from 1 to 4 and from 4 to 7.
    assert pipeline.dispatch(0.0, {"a": Row(1, 9)}, ["a"]) == 7.5
    assert [(span.begin, span.end) for span in pipeline.gpu] == [(1.0, 4.0), (4.0, 7.0)]
    # Its next token is launched at once, and the first stage waits for the sampled one.
    pipeline.dispatch(0.0, {"a": Row(1, 10)}, ["a"])
    assert pipeline.gpu[2].begin == 7.0


def test_the_command_compares_any_class(monkeypatch, capsys, tmp_path):
    """One situation, upstream's class on both sides."""
    from benchmarks import record
    from benchmarks.pipeline_model import __main__ as command
    from benchmarks.pipeline_model import compare

    some = {"2 at 250k, together": compare.situations(compare.machine_of(3))["2 at 250k, together"]}
    monkeypatch.setattr(compare, "situations", lambda machine: some)
    out = tmp_path / "pipeline-compare.json"
    arguments = f"compare --stages 3 --layers 17,17,14 --host-ms 1 --scheduler {UPSTREAM_ASYNC} --out {out}"
    monkeypatch.setattr("sys.argv", ["pipeline_model", *arguments.split()])
    command.main()
    assert capsys.readouterr().out.count("tok/s each") == 2
    first, second = record.read(out)["samples"]
    assert first["per_user"] == second["per_user"] > 40

    monkeypatch.setattr("sys.argv", ["pipeline_model", "compare", "--stages", "3", "--layers", "17,17"])
    with pytest.raises(SystemExit, match="3 numbers that add up to 48"):
        command.main()
    with pytest.raises(SystemExit, match="no published machine has 4 stages"):
        compare.machine_of(4)
