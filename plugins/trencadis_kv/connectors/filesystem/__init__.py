"""Blocks as files in a directory."""
