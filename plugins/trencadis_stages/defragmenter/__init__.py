"""Blocks at low ids."""
