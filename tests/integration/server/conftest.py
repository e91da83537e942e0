"""Servers on loopback ports; helpers are in tests/support."""

from __future__ import annotations
