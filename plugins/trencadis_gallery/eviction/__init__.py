"""Eviction policies of the gallery."""
