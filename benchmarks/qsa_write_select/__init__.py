"""K/V writer and selection of the sparse layers at the published model's widths, beside upstream's, in one run.

    timing.py     seconds of a call: cold, and inside a CUDA graph
    writers.py    from the packed projection to the cache
    selection.py  scores and the best groups: times, and whether they are exact and repeat
    tried.py      settings of the selection that are not in use
    guard.py      whether a step's logits are numbers
    __main__.py   runs everything, writes the record

On a GPU: python -m benchmarks.qsa_write_select --out docs/ampere-multigpu/benches/qsa-write-select-CARD.json
The selection alone, its other settings beside: add --parts select --try
"""
