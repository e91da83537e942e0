"""Blocks in host memory."""
