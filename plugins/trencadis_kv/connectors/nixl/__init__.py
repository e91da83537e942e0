"""Blocks from engine to engine through NIXL."""
