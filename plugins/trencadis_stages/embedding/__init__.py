"""Texts that are embedded: beside requests that generate, or by a model that does nothing else."""
