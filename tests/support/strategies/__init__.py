"""Strategies that misbehave, and scenes for tests of strategies."""
