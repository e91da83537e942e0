"""Libraries of the extra ``lab``, imported on demand."""

from __future__ import annotations

import importlib
from typing import Any

from trencadis.errors import ConfigError

__all__ = ["library", "scipy_stats"]


def scipy_stats() -> Any:
    """Return ``scipy.stats``.

    Raises:
        ConfigError: scipy is not installed.
    """
    return library("scipy.stats", purpose="statistics of a comparison")


def library(module: str, *, purpose: str, install: str = '"trencadis[lab]"') -> Any:
    """Return an optional module.

    Args:
        module: Dotted name of the module.
        purpose: Feature that needs the module, for the message.
        install: Requirement to install with pip, for the message.

    Raises:
        ConfigError: The module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ConfigError(
            f"{purpose}: needs {package}, which is not installed.", hint=f"Run pip install {install}."
        ) from None
