"""Puts the helpers of the suite on the path, and keeps PyTorch to one thread."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def environment():
    """Take back what loading the Gaudi software sets in the environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


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
    from support.backends import tiny_models

    root, saved = tmp_path_factory.mktemp("models"), {}

    def save(kind):
        if kind not in saved:
            saved[kind] = tiny_models.save_model(kind, root)
        return saved[kind]

    return save


@pytest.fixture(autouse=True)
def _environment_as_before():
    """What the interface to the vendor's software sets in the environment is taken back."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
