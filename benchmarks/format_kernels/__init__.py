"""Kernels for quantized weights at the model's real widths: how exact, and how far from the memory's speed.

    python -m benchmarks.format_kernels --out docs/ampere-multigpu/benches/formats-kernels-NAME.json

Needs one GPU, the installed fork and nothing else; about a minute.  Every layer is built by vLLM's own classes from
tensors in the on-disk layout, so what is measured is what an engine runs.  `cases` says which layers, `packed` makes
their tensors, `layers` builds and runs them, `measure` compares and times.  `--device cpu --narrow 20` runs the same
code on a twentieth of the widths with the kernels of the CPU; its times mean nothing.
"""
