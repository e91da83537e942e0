"""Chunks of prompts in any order: approximate."""
