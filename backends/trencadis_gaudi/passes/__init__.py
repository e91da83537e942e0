"""Prefill, decode, merged and unified passes as tensors with shapes determined by the bucket."""
