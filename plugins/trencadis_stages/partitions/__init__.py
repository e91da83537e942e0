"""Sequences spread over ranks, each with rows and KV blocks of its own."""
