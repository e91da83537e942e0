"""Ranks that divide a model: exchange of tensors, and checks."""
