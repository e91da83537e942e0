"""Makes ``tests/support`` importable."""

from __future__ import annotations
