"""Decoding rates over stages, upstream's scheduler beside ours, switched inside one engine.

geometry    the real widths without weights, and an n-gram table of the real size in a sparse file
switch      a scheduler that follows what a file says: upstream's, or ours with a rule
rates       users ask together, decode, and every rule has its turn with the same users
record      what was measured as a record with claims, beside what the pipeline model says
"""
