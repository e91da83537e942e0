"""Buckets that the warm-up put off."""
