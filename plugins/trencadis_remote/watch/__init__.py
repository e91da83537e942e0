"""Watch over an engine's process from outside: stalls, stacks and flight records. This package imports nothing."""
