"""The flight recorder: a stage that keeps the last steps of an engine."""
