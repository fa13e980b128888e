"""The pipeline scheduler against upstream's through `vllm serve` and the `openai` client, on three stages without a GPU.

watched.py   both schedulers, writing down each micro-batch
clients.py   users who ask at the same time, and a short prompt behind a long one
record.py    claims and the page's table
"""
