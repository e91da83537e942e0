"""Fixtures: a configuration and plugins that run the whole engine without a model, and views that scheduling policies are shown."""

from __future__ import annotations

from support.core.fake_engine import fake_house, tokenizer
from support.strategies.scheduler_views import request_of, view_of

__all__ = ["fake_house", "request_of", "tokenizer", "view_of"]
