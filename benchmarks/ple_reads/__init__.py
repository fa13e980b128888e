"""What rows of the n-gram table cost from a disk and from the page cache, without an engine and without a GPU.

files.py    tables of random bytes, and one of the published size that is all holes
step.py     tokens -> activations, as a layer does it before a forward
measure.py  steps by case: milliseconds, bytes the kernel says it read, locked and resident memory
record.py   claims, and the tables of docs/ampere-multigpu/ngram-table.md
"""
