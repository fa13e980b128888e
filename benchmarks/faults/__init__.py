"""Faults injected into one stage of a running `vllm serve`, and what everyone else then sees.

    python -m benchmarks.faults --label after --rows /tmp/after.jsonl          measure; rows are appended
    python -m benchmarks.faults --record /tmp/before.jsonl /tmp/after.jsonl    write the committed record

Real processes and real signals; only "out of memory" is simulated, by a worker extension that raises MemoryError.
The kernel's OOM killer is a SIGKILL, which is a fault of its own here.
"""
