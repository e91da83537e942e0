"""PyTorch in one thread, tiny models on disk, one set for the whole run, and ranks that end with their test."""

from __future__ import annotations

import contextlib

import pytest
import torch

from support.backends import tiny_models
from support.backends.rank_threads import RankedBackend, Ranks


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny matrices gain nothing from threads, and sums must not depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """``model_path(kind)`` saves a tiny model once and returns its directory."""
    root = tmp_path_factory.mktemp("models")
    return lambda kind: path if (path := root / kind).is_dir() else tiny_models.save_model(kind, root)


@pytest.fixture
def ranks():
    """``ranks(make, size)`` calls something on each of several ranks."""
    with contextlib.ExitStack() as started:
        yield lambda make, size=2, **layout: started.enter_context(contextlib.closing(Ranks(make, size, **layout)))


@pytest.fixture
def ranked():
    """``ranked(make, size)`` is a backend of several ranks."""
    with contextlib.ExitStack() as started:

        def start(make, size=2, **layout):
            backend = RankedBackend(make, size, **layout)
            started.callback(backend.ranks.close)
            return backend

        yield start
