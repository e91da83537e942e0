"""Health check of the backend ``gaudi``: software release, mode, and the devices that ``hl-smi`` finds."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

from trencadis.errors import BackendError
from trencadis.interfaces import Finding
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.environment import (
    DISTRIBUTION,
    LOCAL_RANK,
    demands_of,
    holds_collectives,
    module_of,
    release_of,
    with_mode,
)
from trencadis_gaudi.kernels import KERNELS

__all__ = ["check_gaudi"]

_COMMANDS = ("hl-smi", "hpu-smi")
_QUERY = ("-Q", "index,name,driver_version,memory.used,memory.total", "-f", "csv,noheader")
"""Source: documentation of the Gaudi software, "System Management Interface Tool (hl-smi)"."""
_PATIENCE_S = 10.0


def run_smi() -> str | None:
    """Return the output of ``hl-smi``, one line per device; None if the command does not exist.

    Raises:
        OSError: The command cannot be run.
        subprocess.SubprocessError: The command fails or does not end.
    """
    command = next(filter(None, map(shutil.which, _COMMANDS)), None)
    if command is None:
        return None
    return subprocess.run([command, *_QUERY], check=True, capture_output=True, text=True, timeout=_PATIENCE_S).stdout


def check_gaudi(
    config: Any,
    *,
    environ: Mapping[str, str] = os.environ,
    version_of: Callable[[str], str] = metadata.version,
    smi: Callable[[], str | None] = run_smi,
) -> Iterator[Finding]:
    """Check release, mode, environment and devices, without torch; no findings if another backend is configured.

    Args:
        config: Configuration to check.
        environ: Environment of this process, which the engine's process inherits.
        version_of: Returns the version of a distribution.
        smi: Returns the output of ``hl-smi``, like :func:`run_smi`.
    """
    if config.backend.name != "gaudi":
        return
    options = config.backend.components.get("gaudi") or GaudiConfig()
    num_ranks = config.parallel.tensor * config.parallel.data
    if options.device == "emulated":
        yield Finding.ok(
            '[backend.gaudi] device = "emulated": a CPU stands for a Gaudi; its times say nothing about one'
        )
        if num_ranks > 1:
            yield Finding.ok(f"{num_ranks} ranks: each has an emulated device in a process of its own")
        return
    try:
        version = version_of(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        yield Finding.fail(
            f"{DISTRIBUTION} is not installed", 'Install it from the Gaudi software suite, or set device = "emulated".'
        )
        return
    yield Finding.ok(f"{DISTRIBUTION} {version}, torch {version_of('torch')}")
    yield from _mode(options, version, environ)
    yield _kernels(options)
    yield from _devices(smi, environ, num_ranks)
    yield from _modules(environ)
    if config.parallel.tensor > 1:
        yield from _ranks(_chosen_mode(options, version), num_ranks, environ)


def _chosen_mode(options: GaudiConfig, version: str) -> str:
    """Return the mode that an engine would choose; the configured one if that is an error, which another check reports. Pure."""
    try:
        return with_mode(options, release=release_of(version)).mode
    except BackendError:
        return options.mode


def _ranks(mode: str, num_ranks: int, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check the module of each rank on this machine, and whether graphs may contain collectives."""
    taken = []
    for rank in range(num_ranks):
        try:
            taken.append(module_of({**environ, LOCAL_RANK: str(rank)})["HLS_MODULE_ID"])
        except BackendError as error:
            yield Finding.fail(f"rank {rank}: {error}", error.hint)
            return
    told = ", ".join(f"rank {rank} takes module {module}" for rank, module in enumerate(taken))
    yield Finding.ok(f"each rank is a process of its own and exchanges tensors over HCCL: {told}")
    given = environ.get("PT_HPU_ENABLE_LAZY_COLLECTIVES")
    if mode == "lazy" and given is not None and not holds_collectives(environ):
        yield Finding.fail(
            f"PT_HPU_ENABLE_LAZY_COLLECTIVES={given}: HPU graphs would hold nothing that ranks exchange",
            "Leave it unset: it is set to true.",
        )


def _mode(options: GaudiConfig, version: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    try:
        chosen = with_mode(options, release=release_of(version))
    except BackendError as error:
        yield Finding.fail(str(error), error.hint)
        return
    needed = demands_of(chosen)["PT_HPU_LAZY_MODE"]
    given = environ.get("PT_HPU_LAZY_MODE")
    told = "is not set and will be set" if given is None else f"is {given!r}"
    message = f"[backend.gaudi] mode = {chosen.mode} needs PT_HPU_LAZY_MODE={needed}, which {told}"
    if given in {None, needed}:
        yield Finding.ok(message)
    else:
        yield Finding.warn(message, f"Set PT_HPU_LAZY_MODE={needed} where the server is started, or leave it unset.")


def _kernels(options: GaudiConfig) -> Finding:
    """Return the enabled fused kernels as a finding; the log of a start tells which ones a model uses."""
    used = [kernel.name for kernel in KERNELS if getattr(options, kernel.option)]
    off = [f"{kernel.name} is off by {kernel.option}" for kernel in KERNELS if not getattr(options, kernel.option)]
    return Finding.ok(f"kernels used where they serve: {'; '.join([', '.join(used) or 'none', *off])}")


def _devices(smi: Callable[[], str | None], environ: Mapping[str, str], num_ranks: int) -> Iterator[Finding]:
    try:
        answer = smi()
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding.fail(f"hl-smi fails: {error}", "The driver of the Gaudi may not be loaded: see dmesg and lsmod.")
        return
    if answer is None:
        yield Finding.warn("there is no hl-smi", "Install the tools of the Gaudi software suite.")
        return
    devices: Sequence[str] = [line.strip() for line in answer.splitlines() if line.strip()]
    if not devices:
        yield Finding.fail(
            "hl-smi finds no device", "The driver may not be loaded, or a container may not see the device."
        )
    for device in devices:
        yield Finding.ok(f"device {device}")
    if 0 < len(devices) < num_ranks:
        yield Finding.fail(
            f"[parallel] tensor and data ask for {num_ranks} ranks, and there are {len(devices)} devices",
            f"Set them to {len(devices)} ranks in all, or fewer; each has a device of its own.",
        )
    visible = environ.get("HABANA_VISIBLE_DEVICES", "all")
    if visible != "all":
        yield Finding.ok(f"HABANA_VISIBLE_DEVICES={visible}: this process sees no other device")


def _modules(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check which of the machine's modules this process may use.

    Source: documentation of the Gaudi software, "Gaudi-to-process Assignment".
    """
    listed, chosen = environ.get("HABANA_VISIBLE_MODULES"), environ.get("HLS_MODULE_ID")
    modules = [] if listed is None else [part.strip() for part in listed.split(",")]
    if not all(map(str.isdigit, modules)) or len(set(modules)) < len(modules):
        yield Finding.fail(
            f"HABANA_VISIBLE_MODULES={listed} is no list of different module numbers",
            "Name them as 0,1; see hl-smi -Q index,module_id -f csv.",
        )
    elif chosen is not None and not chosen.isdigit():
        yield Finding.fail(f"HLS_MODULE_ID={chosen} is no module number", "Name one module, or leave it unset.")
    elif chosen is not None and modules and chosen not in modules:
        yield Finding.fail(
            f"HLS_MODULE_ID={chosen} is not one of HABANA_VISIBLE_MODULES={listed}",
            "Leave one of them unset, or name the module in both.",
        )
    elif chosen is not None:
        yield Finding.ok(f"HLS_MODULE_ID={chosen}: this process takes that module")
    elif modules:
        yield Finding.ok(f"HABANA_VISIBLE_MODULES={listed}: this process takes one of these modules")
