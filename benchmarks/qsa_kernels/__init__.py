"""Sparse attention's kernels at real widths: what they compile to, what limits them, how fast they are.

geometry.py   sizes of the published model, and the bytes and operations that they make
compiled.py   shared memory, registers, spills and instructions, without a GPU
roofline.py   bytes and operations against a 3090's limits: docs/ampere-multigpu/roofline.md
inputs.py     caches, selections and queries of a run
__main__.py   time, on a GPU, beside upstream's kernels and the memory's own speed
"""
