"""A Ray cluster on one machine for tests, and what its faults do to a server over it.

    python -m benchmarks.ray_stages --checkpoint DIR --rows /tmp/rows.jsonl    measure; rows are appended
    python -m benchmarks.ray_stages --record /tmp/rows.jsonl                   write the committed record

Each Ray node stands for a machine: stages on two of them exchange over TCP, as they would between machines.
"""
