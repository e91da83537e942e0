"""The OpenAI-compatible server: HTTP in, one engine behind it."""
