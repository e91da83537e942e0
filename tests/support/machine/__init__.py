"""The state machine over generated configurations: what it builds, what it disturbs, and what must come of it."""
