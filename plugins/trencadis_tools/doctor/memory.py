"""Check that weights and KV cache fit into free memory, by the sizes in files and configuration."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from trencadis.api import Config
from trencadis.records import ModelFacts
from trencadis_tools.doctor.findings import Findings

__all__ = ["check_memory", "free_host_bytes"]

_MIB = 2**20
_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}


def check_memory(found: Findings, config: Config, model: ModelFacts) -> None:
    """Compare the weights, the configured KV cache and the longest sequence with the free memory.

    Args:
        found: Findings to add to.
        config: Configuration; tables ``model``, ``cache`` and ``engine`` are read.
        model: Facts from the model's files.
    """
    free, where, on_cpu = _free_bytes()
    growth, assumed = _held_per_stored(config, model, on_cpu=on_cpu)
    weights = int(model.weights_bytes * growth)
    if weights > free:
        note = found.fail if not assumed or model.weights_bytes > free else found.warn
        note(
            f"the weights take about {_mib(weights)}{assumed}, {where} has {_mib(free)} free",
            "Take a smaller model, model.dtype = bfloat16, or a machine with more memory.",
        )
        return
    left = free - weights
    cache, block_size = config.cache, config.cache.block_size or 16
    kept = _WIDTHS["float32"] / _WIDTHS.get(model.dtype, 2) if on_cpu and config.model.dtype == "bfloat16" else growth
    block_bytes = int(
        block_size * model.kv_bytes_per_token * kept
    )  # on a CPU the KV cache of a bfloat16 model is float32
    length = config.model.max_model_len or model.max_model_len
    one_sequence = -(-length // block_size) * block_bytes
    if cache.num_blocks:
        asked = cache.num_blocks * block_bytes
        if asked > left:
            found.fail(
                f"[cache] num_blocks = {cache.num_blocks} takes about {_mib(asked)}{assumed}, "
                f"beside the weights {_mib(left)} are free",
                "Lower cache.num_blocks, or set it to 0: then it is sized by cache.memory_fraction.",
            )
            return
        room = asked
    else:
        room = int(left * cache.memory_fraction)
        room = min(room, cache.max_bytes) if cache.max_bytes else room
        if not cache.prefix_caching:  # at most the blocks of all sequences at full length
            room = min(room, config.engine.max_num_seqs * -(-length // block_size) * block_bytes)
    if one_sequence > room:
        found.warn(
            f"one sequence of {length} tokens takes about {_mib(one_sequence)} of KV cache{assumed}, "
            f"there is room for {_mib(room)}",
            "Lower model.max_model_len, or raise cache.memory_fraction or cache.num_blocks.",
        )
        return
    num_sequences = room // one_sequence if one_sequence else 0
    found.ok(
        f"about {_mib(weights)} of weights and {_mib(room)} of KV cache in {_mib(free)} free of {where}{assumed}: "
        f"{num_sequences} sequences of {length} tokens"
    )


def free_host_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process may still allocate, bytes; reads /proc and the control group (v2).

    Args:
        root: Directory with ``proc`` and ``sys``.

    Raises:
        OSError: This system has no /proc.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    available = next(line for line in lines if line.startswith("MemAvailable:"))
    free = int(available.split()[1]) * 1024
    group = root / "sys/fs/cgroup"
    try:
        limit, used = int((group / "memory.max").read_text()), int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return min(free, max(0, limit - used))


def _free_bytes() -> tuple[int, str, bool]:
    """Return the free bytes of the device that a model is loaded to, the device's name, and whether it is the CPU."""
    torch: Any = importlib.import_module("torch")
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info(0)[0]), "the first CUDA device", False
    return free_host_bytes(), "this machine", True


def _held_per_stored(config: Config, model: ModelFacts, *, on_cpu: bool) -> tuple[float, str]:
    """Return the factor by which weights grow when loaded, and the assumption behind it, in words. Pure.

    With ``model.dtype`` left open it is the backend that decides; on a CPU, what takes the most memory is assumed: float32.

    Args:
        config: Configuration; table ``model`` is read.
        model: Facts from the model's files.
        on_cpu: Whether the model is loaded to the CPU.
    """
    stored = _WIDTHS.get(model.dtype, 2)
    asked = config.model.dtype
    if asked == "auto" and on_cpu and stored < _WIDTHS["float32"]:
        return _WIDTHS["float32"] / stored, f" if {model.dtype} is held as float32, as on most CPUs"
    return _WIDTHS.get(asked, stored) / stored, ""


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.0f} MiB"
