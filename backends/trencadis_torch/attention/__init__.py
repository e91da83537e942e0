"""Attention over the paged KV cache: passes, kernels, and the adapter to transformers."""
