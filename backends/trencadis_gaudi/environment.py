"""Mode of the Gaudi software and its environment variables, which it reads at import.

Since release 1.18 ``import torch`` imports ``habana_frameworks``, so the variables are set before torch is imported: in the engine's
process before any of its components is made. Where torch was imported before that, the mode that it was imported in is used, or is an
error if another one is configured.

Source: vllm-gaudi, vllm_gaudi/platform.py and utils.py; names and defaults, bridge 1.19; documentation of the Gaudi software, "Runtime
Environment Variables" (PT_HPU_LAZY_MODE unset was 1, and is 0 in later releases); entry points of torch, "Autoload Mechanism".
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from importlib import metadata

import attrs

from trencadis.errors import BackendError
from trencadis_gaudi.config import GaudiConfig

__all__ = [
    "DISTRIBUTION",
    "LOCAL_RANK",
    "defaults_of",
    "demands_of",
    "holds_collectives",
    "module_of",
    "prepare",
    "release_of",
    "set_environment",
    "with_mode",
]

logger = logging.getLogger("trencadis.gaudi")

DISTRIBUTION = "habana-torch-plugin"
_LAST_LAZY = (1, 19)
"""Newest release whose default was lazy mode."""
_MODULE = "habana_frameworks.torch"
_LAZY_COLLECTIVES = "PT_HPU_ENABLE_LAZY_COLLECTIVES"
LOCAL_RANK = "TRENCADIS_LOCAL_RANK"
"""Environment variable of a rank's process, set by ``trencadis_plugins.executor.ranks.process``."""


def prepare(config: GaudiConfig) -> None:
    """Set the environment of this process; called before torch is imported."""
    if config.device == "hpu":
        set_environment(config, os.environ, sys.modules)


def release_of(version: str) -> tuple[int, int] | None:
    """Return the major and minor number of a version; None if it has none. Pure."""
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    return int(parts[0]), int(parts[1])


def with_mode(config: GaudiConfig, *, release: tuple[int, int] | None, is_lazy: bool | None = None) -> GaudiConfig:
    """Return the config with a mode in place of ``auto``; log the mode and its reason.

    Args:
        config: Table ``[backend.gaudi]``.
        release: Release of the installed Gaudi software; None: unknown.
        is_lazy: Whether the software was imported in lazy mode; None: not imported.

    Raises:
        BackendError: The software was imported in another mode than configured.
    """
    if config.mode != "auto":
        if is_lazy is not None and is_lazy != (config.mode == "lazy"):
            found, needed = ("1", "0") if is_lazy else ("0", "1")
            raise BackendError(
                f'[backend.gaudi] mode = "{config.mode}" needs PT_HPU_LAZY_MODE={needed}, and habana_frameworks is imported already, '
                f"with PT_HPU_LAZY_MODE={found}. Importing torch imports it.",
                hint=f"Start the process with PT_HPU_LAZY_MODE={needed}, or import torch after the engine is made.",
            )
        return config
    if config.capture == "budgeted":
        mode, why = "lazy", 'capture = "budgeted" needs HPU graphs'
    elif is_lazy is not None:
        mode, why = "lazy" if is_lazy else "compile", "habana_frameworks is imported in this mode already"
    elif release is not None and release <= _LAST_LAZY:
        mode, why = "lazy", f"it is the default of release {release[0]}.{release[1]}"
    else:
        mode, why = "compile", "it is the default since release 1.20"
    logger.info("[backend.gaudi] mode = %s: %s.", mode, why)
    return with_mode(attrs.evolve(config, mode=mode), release=release, is_lazy=is_lazy)


def demands_of(config: GaudiConfig) -> dict[str, str]:
    """Return the variables that follow from the config, whose mode is not ``auto``. Pure."""
    demands = {"PT_HPU_LAZY_MODE": "1" if config.mode == "lazy" else "0"}
    if config.recipe_cache:
        demands["PT_HPU_RECIPE_CACHE_CONFIG"] = config.recipe_cache
    return demands


def defaults_of(config: GaudiConfig) -> dict[str, str]:
    """Return the default values of unset variables; the config's mode is not ``auto``. Pure."""
    defaults = {"PT_HPU_WEIGHT_SHARING": "0", "EXPERIMENTAL_WEIGHT_SHARING": "0"}
    if config.watch_compilations:
        defaults["PT_HPU_METRICS_GC_DETAILS"] = "1"
    if config.mode == "lazy":
        defaults[_LAZY_COLLECTIVES] = "true"
    else:
        defaults["RUNTIME_SCALE_PATCHING"] = "1"
        defaults["FUSER_ENABLE_MULTI_THREADED_INVOCATIONS"] = "1"
    return defaults


def set_environment(
    config: GaudiConfig, environ: MutableMapping[str, str], modules: Mapping[str, object]
) -> GaudiConfig:
    """Set the variables, and return the config with its mode.

    Args:
        config: Table ``[backend.gaudi]``.
        environ: Environment to change; unchanged if ``habana_frameworks`` is imported, which no longer reads it.
        modules: Modules imported so far, by name.

    Raises:
        BackendError: The software is imported in another mode than configured.
    """
    imported = modules.get(_MODULE)
    try:
        release = release_of(metadata.version(DISTRIBUTION))
    except metadata.PackageNotFoundError:
        release = None
    is_lazy = None if imported is None else bool(imported.utils.internal.is_lazy())  # type: ignore[attr-defined]
    config = with_mode(config, release=release, is_lazy=is_lazy)
    for name, value in demands_of(config).items():
        before = environ.get(name)
        if before == value:
            continue
        if imported is not None:
            if name != "PT_HPU_LAZY_MODE":
                logger.warning("%s=%s has no effect: habana_frameworks is imported already.", name, value)
            continue
        if before is not None:
            logger.warning("%s=%s is overridden with %s by [backend.gaudi].", name, before, value)
        environ[name] = value
    if imported is None:
        for name, value in (defaults_of(config) | module_of(environ)).items():
            environ.setdefault(name, value)
    return config


def holds_collectives(environ: Mapping[str, str]) -> bool:
    """Return whether HPU graphs of lazy mode may contain collectives. Pure."""
    return environ.get(_LAZY_COLLECTIVES, "").lower() in {"true", "1"}


def module_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that assigns a Gaudi module to a rank; empty in a process that is no rank. Pure.

    Args:
        environ: Environment of this process; ``TRENCADIS_LOCAL_RANK`` is the rank's number on this machine.

    Raises:
        BackendError: There are fewer modules than ranks, or the environment assigns one module to all ranks.

    Source: documentation of the Gaudi software, "Gaudi-to-process Assignment"; bridge 1.19, torch/distributed/hccl/__init__.py, which leaves
    a set ``HLS_MODULE_ID`` unchanged.
    """
    rank = environ.get(LOCAL_RANK)
    if rank is None:
        return {}
    listed = [part.strip() for part in environ.get("HABANA_VISIBLE_MODULES", "").split(",") if part.strip()]
    if listed and int(rank) >= len(listed):
        raise BackendError(
            f"HABANA_VISIBLE_MODULES={','.join(listed)} names {len(listed)} modules, and this is rank {rank} of this machine, counted from 0.",
            hint="Name as many as [parallel] tensor times data, or leave it unset for all.",
        )
    own, given = listed[int(rank)] if listed else rank, environ.get("HLS_MODULE_ID")
    if given not in {None, own} and int(rank):
        raise BackendError(
            f"HLS_MODULE_ID={given} gives every rank the same module; this is rank {rank} of this machine, counted from 0.",
            hint="Leave it unset, and name the modules of all ranks in HABANA_VISIBLE_MODULES.",
        )
    return {"HLS_MODULE_ID": own}
