"""Ranks that end with their test."""

from __future__ import annotations

import threading

import pytest
import transformers  # noqa: F401 - its lazy imports are not made for several threads at once

from support.backends.rank_threads import RankedBackend, Ranks
from trencadis_torch.parallel import loading


@pytest.fixture(autouse=True)
def whole_models_one_by_one(monkeypatch):
    """Ranks are threads here: ``from_pretrained`` exchanges functions of classes meanwhile, and two at once put back the wrong ones."""
    lock, load_whole = threading.Lock(), loading.load_whole

    def load(files):
        with lock:
            return load_whole(files)

    monkeypatch.setattr(loading, "load_whole", load)


@pytest.fixture
def ranks():
    """``ranks(make, size)`` calls something on each of several ranks."""
    made = []

    def start(make, size):
        made.append(Ranks(make, size))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture
def ranked():
    """``ranked(make, size)`` is a backend of several ranks."""
    made = []

    def start(make, size):
        made.append(RankedBackend(make, size))
        return made[-1]

    yield start
    for one in made:
        one.ranks.close()
