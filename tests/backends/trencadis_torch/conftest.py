"""Tiny models on disk, one set for the whole run, and backends on them."""

from __future__ import annotations

import pytest
import torch

from support.backends import tiny_models


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
    root, saved = tmp_path_factory.mktemp("models"), {}

    def save(kind):
        if kind not in saved:
            saved[kind] = tiny_models.save_model(kind, root)
        return saved[kind]

    return save
