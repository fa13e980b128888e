"""The demonstration on a machine without a GPU: a small random checkpoint, `vllm serve` on three stages, one answer."""
