"""Layouts of a model over devices: which are legal, what each needs, and which to take; from ``config.json`` alone."""
