"""A tiny draft model on disk; helpers of ``tests/support`` can be imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers and 97 tokens."""
    from support.strategies.draft_models import save_llama

    return save_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def _nobody_gives_up(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """An engine goes on without a speculator that failed, and its text would still be right: no test may pass like that."""
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.levelname == "ERROR"] == []
