"""``graphs = "buckets"`` and ``"checked"``: who captures decodes, what that takes, and what is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from trencadis.errors import BackendError
from trencadis.records import Bucket, MemoryReport, WarmUpReport
from trencadis_torch.cache.kv_cache import PagedKVCache
from trencadis_torch.config import TorchConfig
from trencadis_torch.graphs.cuda_graph_counts import CaptureWatch
from trencadis_torch.graphs.cuda_graph_runner import GraphRunner, make_recorder
from trencadis_torch.graphs.mode import BucketMode, LogitsCheck
from trencadis_torch.rows import Rows

__all__ = ["CaptureMode"]

_GRAPH_BYTES = 2 * 2**20
"""What a driver takes for the description of a graph of some hundred kernels, roughly: for the estimate before there is one."""

_DEVICES = {"buckets": "cuda", "checked": "cpu"}


class CaptureMode(BucketMode):
    """Captured graphs of one backend.

    Args:
        config: Of the backend.
        device: Its.

    Raises:
        BackendError: The device does not capture in this way.

    Attributes:
        watch: Counts.
    """

    packs = False  # a recorder does not see into ctypes
    layerwise_kv = False  # a graph does not wait between its layers

    def __init__(self, config: TorchConfig, *, device: torch.device) -> None:
        super().__init__(config)
        needed = _DEVICES[config.graphs]
        if device.type != needed:
            raise BackendError(
                f'[backend.torch] graphs = "{config.graphs}": for {needed} devices, and this one is {device}.',
                hint='Set [backend.torch] graphs = "off".',
            )
        self.watch = CaptureWatch()
        self._runner: GraphRunner | None = None

    def reserve(
        self, report: MemoryReport, *, max_num_batched_tokens: int, max_num_seqs: int, logits_bytes: int
    ) -> MemoryReport:
        """Add an estimate of what graphs take.

        They have a pool of their own: the temporaries of the largest decode, and its logits twice, once as they come and once where they
        stay. Each graph has a description of its kernels; four for each doubling of the batch size are assumed.
        """
        temporaries = report.activation_bytes * min(max_num_seqs, max_num_batched_tokens) // max_num_batched_tokens
        reserve = temporaries + 2 * logits_bytes + 4 * max_num_seqs.bit_length() * _GRAPH_BYTES
        return attrs.evolve(report, activation_bytes=report.activation_bytes + reserve)

    def make_runner(self, model: Any, *, rows: Rows, cache: PagedKVCache, check: LogitsCheck | None) -> GraphRunner:
        """Return a runner that replays; its graphs are compared with what was captured, whatever ``check`` is."""
        recorder = make_recorder(cache.device, model, rows, cache)
        self._runner = GraphRunner(model, rows=rows, cache=cache, recorder=recorder, watch=self.watch)
        return self._runner

    def warm_up(
        self,
        buckets: Sequence[Bucket],
        *,
        run: Callable[[Bucket], None],
        progress: Callable[[int, int], None] | None = None,
    ) -> WarmUpReport:
        """Run every bucket and capture decodes; see :class:`~trencadis_torch.graphs.bucket_graphs.BucketGraphs`."""
        if self._runner is None:
            raise BackendError("backend torch: graphs come after allocate.")
        return self._runner.graphs.warm_up(buckets, run=run, progress=progress)

    def metrics(self) -> str:
        """Return what is counted."""
        return self.watch.metrics()

    def close(self) -> None:
        """Wait for what is still replayed, and let go of the graphs."""
        if self._runner is not None:
            self._runner.graphs.close()
        self._runner = None
