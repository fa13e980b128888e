"""An engine with the n-gram table on the disk, in a flat file and pinned: decode, prefill, what waits and what idles.

model.py   real widths without weights, over a real table of random rows
job.py     one engine, one case, in a process of its own
record.py  ratios between cases, claims
"""
