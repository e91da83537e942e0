"""Engines without a model, for tests of the core."""
