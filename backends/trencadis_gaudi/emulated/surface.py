"""Emulated ``habana_frameworks``, the parts that the backend uses.

Names, signatures and results are the vendor's (bridge 1.19); names that it lacks in a mode are missing here too.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Iterator
from typing import Any

from trencadis_gaudi.emulated.device import EmulatedDevice, EmulatedDeviceError
from trencadis_gaudi.emulated.graphs import GraphStore
from trencadis_gaudi.emulated.hpex import emulated_hpex
from trencadis_gaudi.emulated.recorder import Recorder

__all__ = ["emulated_habana"]


def emulated_habana(device: EmulatedDevice) -> tuple[types.SimpleNamespace, Recorder]:
    """Return the parts of ``habana_frameworks.torch`` that the backend uses, and the recorder that runs its operations.

    Like the package, the namespace has ``core``, ``hpex``, ``hpu``, ``internal`` and ``utils``.
    """
    recorder = Recorder(device)
    core = _Core(device, recorder)
    config = _BridgeConfig(device)
    return (
        types.SimpleNamespace(
            core=core,
            hpex=emulated_hpex(),
            hpu=_Hpu(device, recorder),
            internal=types.SimpleNamespace(bridge_config=config),
            utils=types.SimpleNamespace(
                internal=types.SimpleNamespace(is_lazy=lambda: device.lazy),
                experimental=types.SimpleNamespace(
                    _get_device_type=lambda: _SynDeviceType.synDeviceGaudi2, synDeviceType=_SynDeviceType
                ),
            ),
        ),
        recorder,
    )


class _SynDeviceType:
    synDeviceGaudi2 = 4  # noqa: N815 - the vendor's name
    synDeviceGaudi3 = 5  # noqa: N815


class _Core:
    """Emulated ``habana_frameworks.torch.core``."""

    def __init__(self, device: EmulatedDevice, recorder: Recorder) -> None:
        self._device = device
        self._recorder = recorder
        self._warned = False
        self._closures: list[tuple[Any, tuple[Any, ...]]] = []

    def mark_step(self, device_str: str = "", sync: bool = False) -> None:
        """Run the gathered operations; outside lazy mode do nothing, with one warning."""
        if not self._device.lazy:
            if not self._warned:
                self._warned = True
                warnings.warn("mark_step does nothing outside lazy mode.", stacklevel=2)
            return
        self._recorder.mark()
        closures, self._closures = self._closures, []
        for closure, args in closures:
            closure(*args)

    def add_step_closure(self, closure: Any, args: tuple[Any, ...] = ()) -> None:
        """Call ``closure`` at the next ``mark_step``; lazy mode only."""
        if not self._device.lazy:
            raise EmulatedDeviceError("add_step_closure needs lazy mode (PT_HPU_LAZY_MODE=1).")
        self._closures.append((closure, args))

    def hpu_set_inference_env(self, model: Any = None) -> None:
        """Prepare the device for inference."""


class _BridgeConfig:
    """Emulated ``habana_frameworks.torch.internal.bridge_config``."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._flags: dict[str, Any] = {"PT_COMPILE_ONLY_MODE": False, "PT_HPU_GPU_MIGRATION": False}

    @contextlib.contextmanager
    def env_setting(self, name: str, value: Any) -> Iterator[None]:
        """Set a flag within a ``with`` block.

        Raises:
            KeyError: The bridge does not have the flag.
        """
        before = self._flags[name]
        self._set(name, value)
        try:
            yield
        finally:
            self._set(name, before)

    def _set(self, name: str, value: Any) -> None:
        self._flags[name] = value
        self._device.compile_only = self.get_pt_compile_only_mode()

    def get_pt_compile_only_mode(self) -> bool:
        """Return whether graphs are compiled and not run."""
        return bool(self._flags["PT_COMPILE_ONLY_MODE"])


class _Stream:
    """Stream of operations; the emulated device has only one."""

    def __init__(self, device: EmulatedDevice, recorder: Recorder) -> None:
        self._device = device
        self._recorder = recorder

    def wait_event(self, event: Any) -> None:
        """Wait for an event."""

    def wait_stream(self, stream: Any) -> None:
        """Wait for another stream."""

    def record_event(self, event: Any = None) -> Any:
        """Record an event in the stream, a new one if none is given."""
        event = event or _Event(self._device, self._recorder)
        event.record()
        return event

    def query(self) -> bool:
        """Return True, after running everything."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Wait for everything submitted."""
        self._recorder.synchronize()


class _Event:
    """Event in the only stream, with its time and its position among the copies to the host."""

    def __init__(self, device: EmulatedDevice, recorder: Recorder, enable_timing: bool = False) -> None:
        self._device = device
        self._recorder = recorder
        self._position = 0
        self._at_s = 0.0

    def record(self, stream: Any = None) -> None:
        """Record the event in a stream."""
        self._position = self._recorder.host_copies.num_started
        self._at_s = self._device.clock.now_s()

    def wait(self, stream: Any = None) -> None:
        """Make a stream wait for the event."""

    def query(self) -> bool:
        """Return True, after running everything submitted before the event."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Wait for the event, which completes the copies to the host started before it."""
        self._recorder.host_copies.finish(self._position)

    def elapsed_time(self, end_event: _Event) -> float:
        """Return the milliseconds between two events."""
        return 1e3 * (end_event._at_s - self._at_s)


class _Hpu:
    """Emulated ``habana_frameworks.torch.hpu``; ``wrap_in_hpu_graph`` exists in lazy mode only."""

    def __init__(self, device: EmulatedDevice, recorder: Recorder) -> None:
        self._device = device
        self._recorder = recorder
        self._stream = _Stream(device, recorder)
        self.metrics = types.SimpleNamespace(metric_localcontext=lambda name: _metric(device, name))
        if device.lazy:
            self.wrap_in_hpu_graph = GraphStore(device, recorder).wrap_in_hpu_graph

    def current_device(self) -> int:
        """Return the index of the device."""
        return 0

    def Event(self, enable_timing: bool = False) -> _Event:  # noqa: N802 - the vendor's name
        """Return an event."""
        return _Event(self._device, self._recorder, enable_timing)

    def Stream(self, device: Any = None, priority: int = 0) -> _Stream:  # noqa: N802
        """Return a stream object for the only stream."""
        return _Stream(self._device, self._recorder)

    def current_stream(self, device: Any = None) -> _Stream:
        """Return the only stream."""
        return self._stream

    def default_stream(self, device: Any = None) -> _Stream:
        """Return the only stream."""
        return self._stream

    def device_count(self) -> int:
        """Return 1."""
        return 1

    def get_device_name(self, device: Any = None) -> str:
        """Return ``EMULATED``, which is no name of a Gaudi."""
        return "EMULATED"

    def is_available(self) -> bool:
        """Return True."""
        return True

    def max_memory_allocated(self, device: Any = None) -> int:
        """Return the peak of used memory, bytes."""
        return self._device.peak_bytes

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return free and total memory, bytes, in this order."""
        return self._device.total_bytes - self._device.used_bytes, self._device.total_bytes

    def memory_allocated(self, device: Any = None) -> int:
        """Return the memory in use, bytes."""
        return self._device.used_bytes

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Return the counters."""
        return self._device.stats()

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Reset the peak to the memory in use."""
        self._device.reset_peak()

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which another stream is used."""
        return contextlib.nullcontext(stream)

    def synchronize(self) -> None:
        """Run the gathered operations and wait for everything."""
        self._recorder.synchronize()


class _CompilationMetric:
    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._start = (device.num_compilations, device.compile_s)

    def stats(self) -> list[tuple[str, int]]:
        number = self._device.num_compilations - self._start[0]
        time_us = int(1e6 * (self._device.compile_s - self._start[1]))
        return [("TotalNumber", number), ("TotalTime", time_us), ("AvgTime", time_us // max(1, number))]


class _FallbackMetric:
    """Metric ``cpu_fallback``, with the vendor's names and order of statistics."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._start = device.fallbacks.copy()

    def stats(self) -> list[tuple[str, Any]]:
        new = self._device.fallbacks - self._start
        return [("TotalNumber", new.total()), ("FallbackOps", dict(new))]


_METRICS: dict[str, Any] = {"graph_compilation": _CompilationMetric, "cpu_fallback": _FallbackMetric}


@contextlib.contextmanager
def _metric(device: EmulatedDevice, name: str) -> Iterator[Any]:
    if name not in _METRICS:
        raise EmulatedDeviceError(f"the emulated device has no metric {name!r}; it has {', '.join(_METRICS)}.")
    yield _METRICS[name](device)
