"""Scheduling policies of the gallery."""
