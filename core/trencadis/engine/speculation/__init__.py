"""Drafts: which sequences get them, how many, and how many were accepted."""
