"""Connectors, stores and pairs of engines for tests of KV transfer."""
