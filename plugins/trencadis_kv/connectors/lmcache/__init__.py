"""Blocks in the stores of LMCache."""
