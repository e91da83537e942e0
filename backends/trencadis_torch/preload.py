"""Imports of the process that ranks are forked from: torch, and the modules of transformers that every model needs."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Final

from trencadis.errors import BackendError
from trencadis_torch.environment import set_environment

__all__ = ["preload"]

_MODULES: Final = "trencadis_torch.backend", "transformers.modeling_utils", "transformers.models.auto.modeling_auto"
_NVML_CHECK: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Has torch ask NVML whether there are devices, which does not begin CUDA. Source: documentation of ``torch.cuda.is_available``."""


def preload() -> None:
    """Import it.

    Raises:
        BackendError: Something that was imported has begun CUDA, which processes that are forked could not use.
    """
    set_environment(os.environ, sys.modules)
    is_set = _NVML_CHECK in os.environ
    os.environ.setdefault(_NVML_CHECK, "1")
    for name in _MODULES:
        importlib.import_module(name)
    if not is_set:
        del os.environ[_NVML_CHECK]
    torch = importlib.import_module("torch")
    if torch.backends.cuda.is_built() and _has_begun_cuda(torch):
        raise BackendError("An import has begun CUDA, which a process cannot take along when it is forked.")


def _has_begun_cuda(torch: Any) -> bool:
    """Return whether a process that is forked now cannot use CUDA, as only such a process knows."""
    child = os.fork()
    if not child:
        os._exit(int(torch.cuda._is_in_bad_fork()))  # noqa: SLF001 - nothing public says so
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
