"""Rates with K/V in host memory beside K/V on the GPU: what PCIe costs."""
