"""Acceptance rules of the gallery."""
