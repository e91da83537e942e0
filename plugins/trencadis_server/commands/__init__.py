"""Commands: serve and run-batch."""
