"""Applies the output of a step: checks, stop conditions and recovery from failures."""
