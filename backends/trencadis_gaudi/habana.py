"""Interface to the parts of ``habana_frameworks`` that the backend uses, of a Gaudi or of the emulated device.

Only this file imports the vendor's package, so it is also the list of the names in use. Names and signatures:
bridge 1.19, checked in the tests.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import attrs
import torch

from trencadis.clock import Clock
from trencadis.errors import BackendError
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.emulated import EmulatedDevice
from trencadis_gaudi.environment import DISTRIBUTION, release_of, set_environment, with_mode
from trencadis_gaudi.fp8.operations import NAMES
from trencadis_gaudi.fp8.scales import Fp8Device, device_of
from trencadis_gaudi.graphs.dynamo import DynamoCounts
from trencadis_gaudi.kernels import Kernels

__all__ = ["NEEDED", "VERSIONS", "Habana", "load_habana"]

VERSIONS = ((1, 19), (1, 24))
"""Oldest and newest version of the Gaudi software that this backend was written for."""

NEEDED = (
    "core.mark_step",
    "hpu.Event",
    "hpu.max_memory_allocated",
    "hpu.mem_get_info",
    "hpu.memory_allocated",
    "hpu.metrics.metric_localcontext",
    "hpu.reset_peak_memory_stats",
    "hpu.synchronize",
    "internal.bridge_config.env_setting",
    "utils.internal.is_lazy",
)
"""Names below ``habana_frameworks.torch`` that every mode requires; lazy mode also requires ``hpu.wrap_in_hpu_graph``."""


@attrs.frozen(kw_only=True)
class Habana:
    """Device and its software.

    Attributes:
        config: Table ``[backend.gaudi]``, with the chosen mode.
        core: Module ``habana_frameworks.torch.core``.
        hpu: Module ``habana_frameworks.torch.hpu``.
        internal: Module ``habana_frameworks.torch.internal``.
        device: Device of tensors.
        is_lazy: Whether operations are gathered until ``mark_step``.
        kernels: Fused kernels of the software.
        compiler: Backend of torch.compile: the vendor's name, or a function.
        fp8: Fp8 range of the device; None if the config uses no fp8.
        emulated: Emulated device; None on a Gaudi.
        active: Returns the context in which operations for the device run.
        dynamo: Counts of graph breaks of torch.compile.
    """

    config: GaudiConfig
    core: Any
    hpu: Any
    internal: Any
    device: torch.device
    is_lazy: bool
    kernels: Kernels
    compiler: Any
    fp8: Fp8Device | None = None
    emulated: EmulatedDevice | None = None
    active: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    dynamo: DynamoCounts = attrs.field(factory=DynamoCounts)

    def mark_step(self) -> None:
        """End a run of operations in lazy mode; else do nothing."""
        if self.is_lazy:
            self.core.mark_step()

    def declare(self, name: str, num_bytes: int) -> None:
        """Account for the memory of ``name`` on the emulated device; do nothing on a Gaudi."""
        if self.emulated is not None:
            self.emulated.book(name, num_bytes)

    def freeze(self) -> None:
        """Make compiling an error from now on, on the emulated device only."""
        if self.emulated is not None:
            self.emulated.frozen = True

    @contextlib.contextmanager
    def thawed(self) -> Iterator[None]:
        """Allow a frozen emulated device to compile within a ``with`` block."""
        frozen = self.emulated is not None and self.emulated.frozen
        if self.emulated is not None:
            self.emulated.frozen = False
        try:
            yield
        finally:
            if self.emulated is not None:
                self.emulated.frozen = frozen

    def free_bytes(self) -> int:
        """Return the free memory of the device, bytes."""
        return int(self.hpu.mem_get_info()[0])


def load_habana(
    config: GaudiConfig,
    *,
    clock: Clock,
    import_module: Callable[[str], Any] = importlib.import_module,
    version_of: Callable[[str], str] = metadata.version,
) -> Habana:
    """Return the configured device; for a Gaudi, set the environment and import the Gaudi software.

    Args:
        config: Table ``[backend.gaudi]``.
        clock: Clock of the emulated device.
        import_module: Imports a module by name.
        version_of: Returns the version of a distribution.

    Raises:
        ConfigValueError: The file ``quant_config`` is required, and cannot be used.
        BackendError: The Gaudi software is missing, broken, of an unknown version, or finds no Gaudi.
    """
    config = config.with_quant_config()
    if config.device == "emulated":
        return _emulated(with_mode(config, release=None), clock)
    config = set_environment(config, os.environ, sys.modules)
    modules = _import(config, import_module, version_of)
    _check_device(modules)
    return Habana(
        config=config,
        core=modules.core,
        hpu=modules.hpu,
        internal=modules.internal,
        device=torch.device("hpu"),
        is_lazy=bool(modules.utils.internal.is_lazy()),
        kernels=Kernels(config, import_module),
        compiler="hpu_backend",
        fp8=_fp8(import_module) if config.computes_fp8 else None,
    )


def _emulated(config: GaudiConfig, clock: Clock) -> Habana:
    try:
        from trencadis_gaudi.emulated.compiler import counting_backend
        from trencadis_gaudi.emulated.float8 import register_operations
        from trencadis_gaudi.emulated.surface import emulated_habana
        from trencadis_gaudi.emulated.tensor import hpu
    except ImportError as error:
        raise BackendError(
            f'[backend.gaudi] device = "emulated" needs a newer PyTorch than {torch.__version__}: {error}.',
            hint="Install PyTorch 2.13; a Gaudi itself needs the PyTorch of its software.",
        ) from error
    device = EmulatedDevice(
        total_bytes=config.emulated_memory_bytes,
        lazy=config.mode == "lazy",
        clock=clock,
        compile_s=config.emulated_compile_s,
    )
    modules, recorder = emulated_habana(device)
    if config.computes_fp8:
        register_operations()
    return Habana(
        config=config,
        core=modules.core,
        hpu=modules.hpu,
        internal=modules.internal,
        device=hpu(),
        is_lazy=modules.utils.internal.is_lazy(),
        kernels=Kernels(config, lambda name: _emulated_module(modules, name)),
        compiler=counting_backend(device, recorder),
        fp8=device_of(modules.utils.experimental) if config.computes_fp8 else None,
        emulated=device,
        active=recorder.active,
    )


def _emulated_module(modules: SimpleNamespace, name: str) -> Any:
    return torch if name == "torch" else attrgetter(name.removeprefix("habana_frameworks.torch."))(modules)


def _import(
    config: GaudiConfig, import_module: Callable[[str], Any], version_of: Callable[[str], str]
) -> SimpleNamespace:
    """Return the modules, after checking that all required names exist.

    Raises:
        BackendError: A module or name is missing.
    """
    try:
        import_module("habana_frameworks.torch")
        modules = SimpleNamespace(
            core=import_module("habana_frameworks.torch.core"),
            hpu=import_module("habana_frameworks.torch.hpu"),
            internal=SimpleNamespace(bridge_config=import_module("habana_frameworks.torch.internal.bridge_config")),
            utils=SimpleNamespace(internal=import_module("habana_frameworks.torch.utils.internal")),
        )
    except ModuleNotFoundError as error:
        raise BackendError(
            f'[backend.gaudi] device = "hpu" needs the Gaudi software; Python finds no module {error.name}.',
            hint=f'Install {DISTRIBUTION} from the Gaudi software suite, or set device = "emulated".',
        ) from error
    except Exception as error:
        raise BackendError(
            f"The Gaudi software cannot be imported beside PyTorch {torch.__version__}: {type(error).__name__}: {error}",
            hint="Each version of it works with one version of PyTorch, and with that of the driver: install all from one suite.",
        ) from error
    _check_version(config, version_of)
    needed = (*NEEDED, "hpu.wrap_in_hpu_graph") if config.captures else NEEDED
    missing = [name for name in needed if not _has(modules, name)]
    if missing:
        raise BackendError(
            f"The Gaudi software has no {', '.join(missing)} in {config.mode} mode.",
            hint="Use a version from 1.19 to 1.24; HPU graphs are there in lazy mode only (PT_HPU_LAZY_MODE=1).",
        )
    return modules


def _check_version(config: GaudiConfig, version_of: Callable[[str], str]) -> None:
    try:
        version = version_of(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        version = "unknown"
    oldest, newest = VERSIONS
    release = release_of(version)
    if (release is not None and oldest <= release <= newest) or config.any_version:
        return
    raise BackendError(
        f"The version of {DISTRIBUTION} is {version}; this backend was written for "
        f"{'.'.join(map(str, oldest))} to {'.'.join(map(str, newest))}.",
        hint="Install one of these, or set backend.gaudi.any_version = true to try.",
    )


def _fp8(import_module: Callable[[str], Any]) -> Fp8Device:
    """Return the range of the device's fp8.

    Raises:
        BackendError: The device, or its software, has none.
    """
    missing = [name for name in NAMES if not hasattr(torch.ops.hpu, name)]
    if missing:
        raise BackendError(
            f"The Gaudi software has no {', '.join(f'torch.ops.hpu.{name}' for name in missing)}, which fp8 takes.",
            hint='Set [backend.gaudi] fp8 = "off" and kv_cache_dtype = "auto", or install a release from 1.19 on.',
        )
    return device_of(import_module("habana_frameworks.torch.utils.experimental"))


def _check_device(modules: SimpleNamespace) -> None:
    if not modules.hpu.is_available():
        raise BackendError(
            "The Gaudi software is installed, but finds no Gaudi.",
            hint='See hl-smi; HABANA_VISIBLE_DEVICES may hide it. Without one, set backend.gaudi.device = "emulated".',
        )


def _has(modules: SimpleNamespace, path: str) -> bool:
    found: Any = modules
    for part in path.split("."):
        found = getattr(found, part, None)
    return found is not None
