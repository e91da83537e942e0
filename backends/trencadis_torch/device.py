"""Which device and dtype, how arrays get there, and how much memory there is."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from trencadis.errors import BackendError, ModelLoadError

__all__ = [
    "DTYPES",
    "OwnThreads",
    "choose_device",
    "choose_dtype",
    "fill",
    "host_memory",
    "numbered_device",
    "to_device",
]

logger = logging.getLogger("trencadis.torch")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Data types that a model may have, by the names of configurations."""

SMALL_MODEL = 200_000_000
"""Parameters below which float32 is faster than bfloat16 on a CPU: conversions cost more than the memory traffic saved."""


class OwnThreads(contextlib.AbstractContextManager[None]):
    """PyTorch's threads of one operation while a model runs; afterwards as many as before.

    Two models of a process, a draft model and its target, want different numbers, and other code its own.

    Args:
        number: Threads; 0 leaves them as they are.
    """

    __slots__ = ("_before", "_number")

    def __init__(self, number: int) -> None:
        self._number = number

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        if self._number and self._number != self._before:
            torch.set_num_threads(self._number)

    def __exit__(self, *_: object) -> None:
        if torch.get_num_threads() != self._before:
            torch.set_num_threads(self._before)


def choose_device(name: str) -> torch.device:
    """Return the device of a config value; reads the machine, changes nothing.

    Raises:
        BackendError: A CUDA device was asked for that is not there.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise BackendError(
            f'[backend.torch] device = "{name}": PyTorch {torch.__version__} sees {count} CUDA devices.',
            hint='Choose "cpu" or "auto", or install a CUDA build of PyTorch.',
        )
    return torch.device("cuda", device.index or 0)


def numbered_device(name: str, device: torch.device, number: int, *, num_devices: int) -> torch.device:
    """Return the CUDA device of one rank among all ranks of all replicas, unless a device is named. Pure.

    Args:
        name: The config value that ``device`` was chosen by.
        device: Device that ``name`` chose.
        number: Number of the rank: replicas follow each other.
        num_devices: CUDA devices there are; ranks beyond them share.
    """
    if device.type != "cuda" or name not in ("auto", "cuda"):
        return device
    return torch.device("cuda", number % num_devices)


def choose_dtype(
    asked: str, *, stored: torch.dtype, device: torch.device, num_parameters: int, native_bfloat16: bool | None = None
) -> torch.dtype:
    """Return the dtype of weights and activations. Pure, but for reading the CPU's features.

    ``auto`` is the dtype the model is stored in, except on a CPU: there float16 becomes float32 (no CPU kernels worth the
    name), and bfloat16 becomes float32 unless the CPU computes in it and the model has at least ``SMALL_MODEL``
    parameters. Measured with ``benchmarks/micro/dtype.py``; see docs/plugins/backend.md.

    Args:
        asked: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
        stored: Data type of the checkpoint.
        device: Where the model runs.
        num_parameters: Number of parameters of the model.
        native_bfloat16: Whether the CPU computes in bfloat16; None asks the CPU.

    Raises:
        ModelLoadError: ``asked`` is none of these.
    """
    if asked != "auto":
        if asked not in DTYPES:
            raise ModelLoadError(f'dtype = "{asked}": choose one of: auto, {", ".join(DTYPES)}.')
        return DTYPES[asked]
    if stored not in DTYPES.values():
        return torch.float32
    if device.type != "cpu" or stored is torch.float32:
        return stored
    native = _computes_bfloat16() if native_bfloat16 is None else native_bfloat16
    if stored is torch.bfloat16 and native and num_parameters >= SMALL_MODEL:
        return stored
    logger.info("Stored as %s, held as float32: faster for this model on this CPU.", stored)
    return torch.float32


def _computes_bfloat16() -> bool:
    check = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(check and check())


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return the array on the device without waiting for it; on the CPU it shares memory with ``array``."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    # Pinned memory is CUDA's; another device copies from where the array is.
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def fill(target: torch.Tensor, array: npt.NDArray[Any]) -> None:
    """Copy an array into a tensor that keeps its address, in stream order, without waiting.

    Args:
        target: Contiguous, of as many elements and the same dtype.
        array: Contiguous; may be changed as soon as this returns.
    """
    source = torch.from_numpy(array)
    if target.device.type == "cuda":
        # Pinned for each copy: PyTorch hands pinned memory out again only when the copies from it are done.
        target.copy_(source.pin_memory(), non_blocking=True)
    else:
        target.copy_(source)


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return the host memory that this process may use and the free part of it, bytes; reads /proc and control groups.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    info = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        info[name] = int(rest.split()[0]) * 1024
    total, free = info["MemTotal"], info["MemAvailable"]
    for limit, used in _group_limits(root):
        total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def _group_limits(root: Path) -> list[tuple[int, int]]:
    """Limit and use of every memory control group that holds this process, version 2 and 1."""
    groups = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory"]
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            home = "sys/fs/cgroup" if not controllers else f"sys/fs/cgroup/{controllers}"
            groups.append(root / home / path.lstrip("/"))
    found = []
    for group in groups:
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            with contextlib.suppress(OSError, ValueError):
                found.append((int((group / limit_name).read_text()), int((group / used_name).read_text())))
    return found
