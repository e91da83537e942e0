"""Attention with static shapes: flat paged decodes, prefills, unified batches, and the vendor's fused kernel."""
