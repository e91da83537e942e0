"""Fixtures: a configuration and plugins that run the whole engine without a model."""

from __future__ import annotations

from support.core.fake_engine import fake_house, tokenizer

__all__ = ["fake_house", "tokenizer"]
