"""Prefill, decode, merged and unified passes as tensors whose shapes follow from the bucket."""
