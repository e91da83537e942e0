"""Parallel layouts of a model over devices: legal ones, their memory and traffic, and a proposal; from ``config.json`` alone."""
