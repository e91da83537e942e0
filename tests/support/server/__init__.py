"""Servers and clients for tests of the HTTP interface."""
