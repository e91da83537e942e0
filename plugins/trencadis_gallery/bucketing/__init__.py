"""Bucketing strategies of the gallery."""
