# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes, in the engine core and on every stage: `--additional-config '{"stage_times": true}'`.

Off unless asked for, and then nothing of it runs: the two hooks in upstream files look at the option once, at start.
Asked for, `watch_engine` and `watch_worker` replace methods of the objects of their own process by timed ones, so that
the files these come from need no edit.  Figures are read through `collective_rpc("stage_times")`, which answers for the
engine core first and then for each stage, and `collective_rpc("reset_stage_times")`; every VLLM_LOG_STATS_INTERVAL
seconds each process also logs them.

- recorder.py: exclusive times of nested phases, so that the parts of a step sum to the whole
- summary.py: counts, means and percentiles, and the log line
- engine.py, stage.py: what is timed, by name
- gpu_clock.py: a stage's GPU time beside it, without waiting for the GPU
"""

from vllm.v1.stage_times.engine import watch_engine
from vllm.v1.stage_times.stage import watch_worker

__all__ = ["watch_engine", "watch_worker"]
