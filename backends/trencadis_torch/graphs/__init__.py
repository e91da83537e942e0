"""Graphs of buckets: compiled by torch.compile, or captured as CUDA graphs."""
