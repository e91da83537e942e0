from __future__ import annotations

import os
import threading
import types

import pytest

from trencadis_torch import preload


@pytest.mark.parametrize("begun", [False, True])
def test_cuda_that_an_import_has_begun_is_found_by_a_process_that_is_forked(begun):
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(_is_in_bad_fork=lambda: begun))
    assert preload._has_begun_cuda(torch) is begun


def test_preloading_leaves_no_thread_and_no_variable(monkeypatch):
    monkeypatch.delenv(preload._NVML_CHECK, raising=False)
    before = threading.active_count()
    preload.preload()
    assert threading.active_count() == before
    assert preload._NVML_CHECK not in os.environ
