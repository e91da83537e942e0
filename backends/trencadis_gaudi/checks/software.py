"""Facts about the installed software; this module imports torch within a check alone."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from typing import Any

from trencadis_gaudi.checks.records import Found
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.environment import DISTRIBUTION, release_of, with_mode

__all__ = ["autoload", "default_mode", "release"]

_NONE = Found(None, "not tested: the emulated device needs no Gaudi software")


def release(config: GaudiConfig) -> Found:
    """Is the release one that the backend was written for."""
    if config.device == "emulated":
        return _NONE
    version = metadata.version(DISTRIBUTION)
    found, torch_version = release_of(version), metadata.version("torch")
    from trencadis_gaudi.habana import VERSIONS

    oldest, newest = VERSIONS
    return Found(found is not None and oldest <= found <= newest, f"{DISTRIBUTION} {version}, torch {torch_version}")


def autoload(config: GaudiConfig) -> Found:
    """Does ``import torch`` import the Gaudi software."""
    if config.device == "emulated":
        return _NONE
    importlib.import_module("torch")
    is_there = "habana_frameworks.torch" in sys.modules
    return Found(is_there, f"import torch {'imports' if is_there else 'does not import'} habana_frameworks.torch")


def default_mode(config: GaudiConfig) -> Found:
    """Is the mode that the software chooses the one that the backend takes for its default."""
    if config.device == "emulated":
        return _NONE
    importlib.import_module("torch")
    internal: Any = importlib.import_module("habana_frameworks.torch.utils.internal")
    found = "lazy" if internal.is_lazy() else "compile"
    version = metadata.version(DISTRIBUTION)
    expected = with_mode(GaudiConfig(), release=release_of(version)).mode
    return Found(found == expected, f"PT_HPU_LAZY_MODE unset is {found} mode in {version}; expected {expected}")
