from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def environment():
    """Take back what loading the Gaudi software sets in the environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
