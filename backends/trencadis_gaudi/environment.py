"""The environment variables of the Gaudi software, set once from the config before it is imported: it reads them then.

Source: vllm-gaudi, vllm_gaudi/platform.py and utils.py; names and defaults, bridge 1.19.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping

from trencadis.errors import BackendError
from trencadis_gaudi.config import GaudiConfig

__all__ = ["defaults_of", "demands_of", "set_environment"]

logger = logging.getLogger("trencadis.gaudi")


def demands_of(config: GaudiConfig) -> dict[str, str]:
    """Return the variables that the config decides. Pure."""
    demands = {"PT_HPU_LAZY_MODE": "1" if config.mode == "lazy" else "0"}
    if config.recipe_cache:
        demands["PT_HPU_RECIPE_CACHE_CONFIG"] = config.recipe_cache
    return demands


def defaults_of(config: GaudiConfig) -> dict[str, str]:
    """Return the variables that are set if they were not. Pure."""
    defaults = {"PT_HPU_WEIGHT_SHARING": "0", "EXPERIMENTAL_WEIGHT_SHARING": "0"}
    if config.watch_compilations:
        defaults["PT_HPU_METRICS_GC_DETAILS"] = "1"
    if config.mode == "lazy":
        defaults["PT_HPU_ENABLE_LAZY_COLLECTIVES"] = "true"
    else:
        defaults["RUNTIME_SCALE_PATCHING"] = "1"
        defaults["FUSER_ENABLE_MULTI_THREADED_INVOCATIONS"] = "1"
    return defaults


def set_environment(config: GaudiConfig, environ: MutableMapping[str, str], modules: Mapping[str, object]) -> None:
    """Set the variables.

    Args:
        config: Decides.
        environ: Changed.
        modules: Those imported so far: once the Gaudi software is, nothing can be changed any more.

    Raises:
        BackendError: It was imported with another mode.
    """
    late = "habana_frameworks.torch" in modules
    for name, value in demands_of(config).items():
        before = environ.get(name)
        if before == value:
            continue
        if late:
            raise BackendError(
                f"{name} is {before!r}, [backend.gaudi] needs {value!r}, and habana_frameworks is imported already.",
                hint=f"Start the process with {name}={value}, or import nothing of habana_frameworks before the engine.",
            )
        if before is not None:
            logger.warning("%s=%s is overridden with %s by [backend.gaudi].", name, before, value)
        environ[name] = value
    if not late:
        for name, value in defaults_of(config).items():
            environ.setdefault(name, value)
