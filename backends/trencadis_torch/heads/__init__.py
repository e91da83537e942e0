"""Heads that draft from a model's hidden states."""
