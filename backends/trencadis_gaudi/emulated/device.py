"""State of an emulated device: compiled recipes, and an account of its memory."""

from __future__ import annotations

import logging
from collections import Counter

from trencadis.clock import Clock
from trencadis.errors import BackendError, OutOfMemoryError

__all__ = ["EmulatedDevice", "EmulatedDeviceError", "EmulatedMemoryError"]

logger = logging.getLogger("trencadis.gaudi")

RECIPE_BYTES = 64 * 1024
"""Memory of a compiled graph without its workspace, bytes."""


class EmulatedDeviceError(BackendError):
    """A call of the emulated device that a Gaudi does not support; the message names it."""


class EmulatedMemoryError(EmulatedDeviceError, OutOfMemoryError):
    """The emulated device is out of memory."""


class EmulatedDevice:
    """Counts compilations and memory. One thread.

    Args:
        total_bytes: Memory of the device, bytes.
        lazy: Whether operations are gathered until ``mark_step``; else each is compiled separately.
        clock: Clock of the device.
        compile_s: Simulated time of a compilation, seconds; added to the attribute ``compile_s`` without waiting.

    Attributes:
        total_bytes: Memory of the device, bytes.
        lazy: Whether operations are gathered until ``mark_step``.
        num_compilations: Number of recipes compiled, graphs included.
        compile_s: Total simulated time of compilations, seconds.
        num_recipe_hits: Number of runs whose recipe was already compiled.
        num_mark_steps: Number of calls of ``mark_step`` with gathered operations.
        num_host_syncs: Number of results that the host waited for outside of graphs.
        fallbacks: Number of runs on the host by operation without a kernel.
        frozen: Whether compiling is an error: the state after a complete warm-up.
        compile_only: Whether recipes are compiled but not run; results have the right shapes and arbitrary values.
    """

    def __init__(self, *, total_bytes: int, lazy: bool, clock: Clock, compile_s: float = 0.0) -> None:
        self.total_bytes = total_bytes
        self.lazy = lazy
        self.clock = clock
        self.frozen = self.compile_only = False
        self.num_compilations = 0
        self.compile_s = 0.0
        self.num_recipe_hits = 0
        self.num_mark_steps = 0
        self.num_host_syncs = 0
        self.fallbacks: Counter[str] = Counter()
        self._charge_s = compile_s
        self._recipes: set[bytes] = set()
        self._accounts: dict[str, int] = {}
        self._peak_bytes = 0
        self._num_allocations = self._num_frees = 0

    # ---------------------------------------------------------------------------------------------- compilation

    def need_recipe(self, key: bytes, *, what: str) -> bool:
        """Compile a recipe if it is new; return whether it was.

        Args:
            key: Identifies operations and shapes.
            what: Description for the error message.

        Raises:
            EmulatedDeviceError: The device is frozen.
        """
        if key in self._recipes:
            self.num_recipe_hits += 1
            return False
        if self.frozen:
            raise EmulatedDeviceError(
                f"{what} would be compiled after the warm-up.", hint="Some shape was not warmed up; see the buckets."
            )
        self._recipes.add(key)
        self.num_compilations += 1
        self.compile_s += self._charge_s
        return True

    def fall_back(self, name: str) -> None:
        """Count an operation that runs on the host; warn at the first one of each name."""
        self.fallbacks[name] += 1
        if self.fallbacks[name] == 1:
            logger.warning("%s has no kernel on the device: it runs on the host, with a copy each way.", name)

    # --------------------------------------------------------------------------------------------------- memory

    @property
    def used_bytes(self) -> int:
        """Memory of all accounts, bytes."""
        return sum(self._accounts.values())

    @property
    def peak_bytes(self) -> int:
        """Peak of used memory since the last reset, bytes."""
        return self._peak_bytes

    def book(self, name: str, num_bytes: int) -> None:
        """Set the memory of ``name``, bytes; 0 frees it.

        Raises:
            EmulatedMemoryError: The device has no room.
        """
        before = self._accounts.pop(name, 0)
        if self.used_bytes + num_bytes > self.total_bytes:
            self._accounts[name] = before
            raise EmulatedMemoryError(
                f"[backend.gaudi] emulated_memory_bytes = {self.total_bytes}: {name} needs {num_bytes} bytes, and "
                f"{self.total_bytes - self.used_bytes + before} are free.",
                hint="Raise it, or take a smaller model or less memory for the cache.",
            )
        if num_bytes:
            self._accounts[name] = num_bytes
        self._num_allocations += num_bytes > before
        self._num_frees += num_bytes < before
        self._peak_bytes = max(self._peak_bytes, self.used_bytes)

    def touch(self, num_bytes: int) -> None:
        """Count temporary memory, which affects only the peak."""
        self._peak_bytes = max(self._peak_bytes, self.used_bytes + num_bytes)

    def booked(self, name: str) -> int:
        """Return the memory of ``name``, bytes."""
        return self._accounts.get(name, 0)

    def reset_peak(self) -> None:
        """Reset the peak to the memory in use."""
        self._peak_bytes = self.used_bytes

    def stats(self) -> dict[str, int]:
        """Return the counters under the vendor's names. Source: habana_frameworks.torch.hpu.memory.memory_stats."""
        return {
            "Limit": self.total_bytes,
            "InUse": self.used_bytes,
            "MaxInUse": self._peak_bytes,
            "NumAllocs": self._num_allocations,
            "NumFrees": self._num_frees,
            "ActiveAllocs": len(self._accounts),
            "MaxAllocSize": max(self._accounts.values(), default=0),
            "TotalSystemAllocs": self._num_allocations,
            "TotalSystemFrees": self._num_frees,
            "TotalActiveAllocs": len(self._accounts),
        }
