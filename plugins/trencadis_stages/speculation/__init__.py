"""Speculation: drafts of several tokens, which one step verifies."""
