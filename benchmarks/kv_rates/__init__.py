"""Prefill and decode rates by K/V format and kernels, at real widths, in one command on one GPU.

variants    formats and whose kernels, and the engine's arguments
rates       one engine: users ask together, prompts are timed, then decoding
record      raw results as a record with claims, and its table
"""
