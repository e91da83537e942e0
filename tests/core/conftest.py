"""Fixtures: a configuration and plugins that run the whole engine without a model."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from fake_house import fake_house, tokenizer

__all__ = ["fake_house", "tokenizer"]
