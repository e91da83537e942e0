"""Samplers and acceptance rules: guarded where they run, and asked about requests in the engine's own process."""
