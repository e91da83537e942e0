"""Commands: kv and cluster."""
