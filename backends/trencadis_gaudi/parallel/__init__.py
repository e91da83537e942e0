"""Ranks that divide a model: how they exchange tensors, and what they check."""
