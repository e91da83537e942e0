"""``compile = "buckets"``: which graphs the warm-up makes, what that took, and what happens afterwards that should not."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from trencadis.clock import Clock
from trencadis.errors import BackendError
from trencadis.records import Bucket, WarmUpReport
from trencadis_torch.attention.ragged import Workspace
from trencadis_torch.cache.kv_cache import PagedKVCache
from trencadis_torch.config import TorchConfig
from trencadis_torch.graphs import operators as graph_ops
from trencadis_torch.graphs.compile_cache import CompileCounts, set_up
from trencadis_torch.graphs.compiled_counts import GraphWatch
from trencadis_torch.graphs.compiled_forward import Graphs
from trencadis_torch.graphs.mode import BucketMode, LogitsCheck, StepCounts
from trencadis_torch.linear import native as native_linear
from trencadis_torch.linear.native import Native
from trencadis_torch.rows import Rows
from trencadis_torch.runner import Forward, PassRunner

__all__ = ["GraphMode"]

logger = logging.getLogger("trencadis.torch")


class GraphMode(BucketMode):
    """Compiled graphs of one backend.

    Args:
        config: Of the backend.
        device: Its.
        clock: For the duration of the warm-up.

    Attributes:
        directory: Where graphs are kept between starts.
        watch: Counts.

    Raises:
        BackendError: Nothing can be compiled here.
    """

    compiles = True
    layerwise_kv = False  # a graph does not stop between its layers

    def __init__(self, config: TorchConfig, *, device: torch.device, clock: Clock) -> None:
        super().__init__(config)
        if device.type != "cpu":
            raise BackendError(
                f'[backend.torch] compile = "buckets": only on the CPU, and the device is {device}.',
                hint='Set compile = "off", or device = "cpu".',
            )
        self.directory = set_up(config.compile_cache, os.environ)
        self._clock = clock
        self._graphs: Graphs | None = None
        self._counts_blocks = True
        self.watch = GraphWatch()

    def native(self) -> Native | None:
        """Return the library of linear layers that graphs can call."""
        return None if native_linear.native() is None else graph_ops.graph_native()

    def make_runner(self, model: Any, *, rows: Rows, cache: PagedKVCache, check: LogitsCheck | None) -> PassRunner:
        """Return a runner that makes and uses graphs; see :class:`Graphs`."""
        if native_linear.native() is not None:
            graph_ops.define()
        # Gathered blocks are a shape; where a kernel reads them, buckets that differ in their number alone are one graph.
        self._counts_blocks = cache.kernel is None
        cache.kernels += "+inductor"
        return PassRunner(
            model,
            rows=rows,
            cache=cache,
            layout="padded",
            workspace=Workspace(),
            wrap=functools.partial(self._wrap, check=check),
        )

    def _wrap(self, plain: Forward, *, check: LogitsCheck | None) -> Graphs:
        self._graphs = Graphs(plain, check=check)
        return self._graphs

    def warm_up(
        self,
        buckets: Sequence[Bucket],
        *,
        run: Callable[[Bucket], None],
        progress: Callable[[int, int], None] | None = None,
    ) -> WarmUpReport:
        """Make the graphs of some buckets, the largest first; see :class:`~trencadis_torch.graphs.mode.BucketMode`.

        Raises:
            BackendError: The model cannot be compiled, or a graph computes something else.
        """
        graphs, before, start_s = self._made(), CompileCounts.now(), self._clock.now_s()
        num_before = len(graphs)
        with graphs.preparing():
            seen: set[Bucket] = set()
            for done, bucket in enumerate(sorted(buckets, reverse=True), start=1):
                shape = bucket if self._counts_blocks else attrs.evolve(bucket, num_blocks=0)
                if shape not in seen:
                    run(bucket)
                seen.add(shape)
                if progress is not None:
                    progress(done, len(buckets))
        num_graphs, took_s = len(graphs) - num_before, self._clock.now_s() - start_s
        num_cached = min(num_graphs, CompileCounts.now().since(before).num_from_disk)
        logger.info(
            "%d buckets are %d graphs, made in %.1f s; the code of %d came from %s.",
            len(buckets),
            num_graphs,
            took_s,
            num_cached,
            self.directory,
        )
        self.watch.warmed_up(num_graphs=num_graphs, num_cached=num_cached, took_s=took_s)
        return WarmUpReport(
            prepared=tuple(buckets),
            num_graphs=num_graphs,
            num_compilations=num_graphs - num_cached,
            num_cached=num_cached,
        )

    @contextlib.contextmanager
    def step(self) -> Iterator[StepCounts]:
        """Count what is compiled within a ``with`` block, which should be nothing, and which passes have no graph."""
        found, graphs = StepCounts(), self._made()
        before, num_eager = CompileCounts.now(), graphs.num_eager
        yield found
        found.num_compilations = CompileCounts.now().since(before).num_graphs
        self.watch.stepped(num_compilations=found.num_compilations, num_eager=graphs.num_eager - num_eager)

    def metrics(self) -> str:
        """Return what is counted."""
        return self.watch.metrics()

    def close(self) -> None:
        """Let go of the graphs; what was counted stays."""
        self._graphs = None

    def _made(self) -> Graphs:
        if self._graphs is None:
            raise BackendError("backend torch: graphs come after allocate.")
        return self._graphs
