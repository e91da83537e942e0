"""Reads the engine's state for operators: metrics, step record and explanations."""
