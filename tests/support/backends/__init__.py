"""Tiny models, scenes and references for tests of the backends."""
