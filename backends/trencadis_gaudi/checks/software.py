"""Facts about the installed software; only checks import torch, not this module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import wraps
from importlib import metadata
from typing import Any

from trencadis_gaudi.checks.records import Found
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.environment import DISTRIBUTION, release_of, with_mode

__all__ = ["autoload", "default_mode", "release"]


def _installed(check: Callable[[str], Found]) -> Callable[[GaudiConfig], Found]:
    """Return a check that gets the version of the Gaudi software, or reports that it is missing or not needed."""

    @wraps(check)
    def run(config: GaudiConfig) -> Found:
        if config.device == "emulated":
            return Found(None, "not tested: the emulated device needs no Gaudi software")
        try:
            version = metadata.version(DISTRIBUTION)
        except metadata.PackageNotFoundError:
            # One finding for the missing software, not one for each fact about it.
            return Found(False if check.__name__ == "release" else None, f"{DISTRIBUTION} is not installed")
        return check(version)

    return run


@_installed
def release(version: str) -> Found:
    """Check that the backend supports the release."""
    from trencadis_gaudi.habana import VERSIONS  # imports torch

    (oldest, newest), found, torch_version = VERSIONS, release_of(version), metadata.version("torch")
    return Found(found is not None and oldest <= found <= newest, f"{DISTRIBUTION} {version}, torch {torch_version}")


@_installed
def autoload(version: str) -> Found:
    """Check that ``import torch`` imports the Gaudi software."""
    importlib.import_module("torch")
    is_there = "habana_frameworks.torch" in sys.modules
    done = "imports" if is_there else "does not import"
    return Found(is_there, f"import torch {done} habana_frameworks.torch of {version}")


@_installed
def default_mode(version: str) -> Found:
    """Check that the software's default mode is the one that the backend assumes."""
    importlib.import_module("torch")
    internal: Any = importlib.import_module("habana_frameworks.torch.utils.internal")
    found = "lazy" if internal.is_lazy() else "compile"
    expected = with_mode(GaudiConfig(), release=release_of(version)).mode
    return Found(found == expected, f"PT_HPU_LAZY_MODE unset is {found} mode in {version}; expected {expected}")
