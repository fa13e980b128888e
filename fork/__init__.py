"""Turns an upstream vLLM release plus `vllm/` and `patches/` of this repository into a distribution.

`python -m fork --help` lists the commands; CONTRIBUTING.md walks through them.
"""
