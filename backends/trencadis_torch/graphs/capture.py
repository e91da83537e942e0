"""Interface to CUDA graphs: capture, replay and measurement, and CUDA's implementation.

    rehearse   run as it is, watched: may a graph hold this? how much memory does it take?
    capture    run once more, recorded instead of executed
    replay     the kernels again, with the addresses of then: what they read must be where it was, what they write is where it was

``checked_capture.py`` keeps the same discipline on a CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch

from trencadis_torch.graphs.sync_guard import SyncGuard, not_capturable

__all__ = ["CudaRecorder", "Graph", "Recorder"]

Run = Callable[[], None]
"""Reads and writes memory that outlives it, and nothing else on the device that it did not make itself."""

_REHEARSALS = 2
"""Kernels are compiled and chosen, and libraries allocate their workspaces, when they are first run: not while capturing."""


class Graph(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Run it again, in the order of the current stream; returns when it is launched."""
        ...


class Recorder(ABC):
    """Makes graphs, one after another, which share the memory of their temporaries: only one of them runs at a time."""

    @abstractmethod
    def rehearse(self, run: Run, *, what: str) -> int:
        """Run something that shall be captured, and return the memory that its temporaries take, bytes.

        Args:
            run: To be captured.
            what: Name of the captured part in errors.

        Raises:
            BackendError: No graph could hold it.
        """

    @abstractmethod
    def capture(self, run: Run, *, what: str) -> Graph:
        """Capture something that was rehearsed; it has not been run when this returns.

        Raises:
            BackendError: It cannot be captured.
        """

    @abstractmethod
    def free_bytes(self) -> int:
        """Return the free memory of the device, bytes."""

    @abstractmethod
    def lasts(self, *tensors: torch.Tensor) -> None:
        """Note that tensors keep their places as long as there are graphs."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory that graphs share; the graphs are not replayed any more."""


class CudaRecorder(Recorder):
    """Captures with CUDA, in a stream of its own.

    Args:
        device: Device of the model.

    Source: "CUDA Graphs", notes of PyTorch on CUDA semantics: warm-up and capture in one side stream, one pool for graphs that are
    replayed in turns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        make: Any = torch.cuda.Stream
        self._stream = make(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def rehearse(self, run: Run, *, what: str) -> int:
        """Run twice in the capturing stream, the first time watched."""
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            with SyncGuard(what):
                run()
            torch.cuda.synchronize(self._device)
            before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            for _ in range(_REHEARSALS - 1):
                run()
            torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
        outer.wait_stream(self._stream)
        return int(peak - before)

    def capture(self, run: Run, *, what: str) -> Graph:
        """Record the kernels that ``run`` launches.

        Errors of this thread alone end a capture: others, such as those of a KV connector, may go on copying.
        """
        graph: Any = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        except RuntimeError as error:
            raise not_capturable(what, str(error)) from error
        found: Graph = graph
        return found

    def lasts(self, *tensors: torch.Tensor) -> None:
        """Keep nothing: CUDA needs no check."""

    def free_bytes(self) -> int:
        """Return the driver's number, after PyTorch's cached memory was released."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def close(self) -> None:
        """Wait for running replays."""
        torch.cuda.synchronize(self._device)
        self._pool = None
