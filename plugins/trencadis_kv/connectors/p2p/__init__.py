"""Blocks from engine to engine over TCP."""
