"""The device of the backend ``torch`` in tests: the CPU, or what ``pytest --device`` names."""

from __future__ import annotations

import os

import pytest

__all__ = ["DEVICE", "ON_CUDA", "cpu_only", "cuda_only"]

DEVICE = os.environ.get("PYTEST_TORCH_DEVICE", "cpu")
"""``cpu``, ``cuda`` or ``cuda:N``: for ``[backend.torch] device`` and for tensors that a test makes itself."""

ON_CUDA = DEVICE != "cpu"

cpu_only = pytest.mark.skipif(ON_CUDA, reason=f"of the CPU alone, and pytest was given --device {DEVICE}")
cuda_only = pytest.mark.skipif(not ON_CUDA, reason="needs a CUDA device: pytest --device cuda")
