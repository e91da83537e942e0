"""Preemption by swap."""
