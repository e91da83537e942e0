"""Ranks: what one consists of, and how an executor reaches one in another process."""
