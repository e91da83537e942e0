"""How a backend runs its buckets without graphs, and what modes with graphs override."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs
import torch

from trencadis.records import Bucket, MemoryReport, WarmUpReport
from trencadis_torch.attention.ragged import Workspace
from trencadis_torch.cache.kv_cache import PagedKVCache
from trencadis_torch.config import TorchConfig
from trencadis_torch.linear import native as native_linear
from trencadis_torch.linear.native import Native
from trencadis_torch.rows import Rows
from trencadis_torch.runner import PassRunner

__all__ = ["BucketMode", "LogitsCheck", "StepCounts"]

LogitsCheck = Callable[[torch.Tensor, torch.Tensor], None]
"""Raises if logits of a graph, second, are not those of the plain forward, first."""


@attrs.define
class StepCounts:
    """Compilations and passes without a graph in one step."""

    num_compilations: int = 0


class BucketMode:
    """No graphs: every pass runs eagerly. Modes with graphs override its methods.

    Args:
        config: Configuration of the backend.
        compiles_kernels: The device compiles kernels for shapes when they first run, as CUDA does.

    Attributes:
        packs: Linear layers may be packed.
        compiles: Graphs are of torch.compile, which may call the CPU's kernels.
        layerwise_kv: A pass can wait between its layers.
    """

    packs: ClassVar[bool] = True
    compiles: ClassVar[bool] = False
    layerwise_kv: ClassVar[bool] = True

    def __init__(self, config: TorchConfig, *, compiles_kernels: bool = False) -> None:
        self._config = config
        self._compiles_kernels = compiles_kernels

    def native(self) -> Native | None:
        """Return the library of linear layers; None: it cannot be had."""
        return native_linear.native()

    def reserve(
        self, report: MemoryReport, *, max_num_batched_tokens: int, max_num_seqs: int, logits_bytes: int
    ) -> MemoryReport:
        """Return the memory report of steps with the memory that graphs may take added. Pure.

        Args:
            report: Without graphs.
            max_num_batched_tokens: Tokens of the largest step.
            max_num_seqs: Sequences of the largest decode.
            logits_bytes: Size of the logits of such a decode.
        """
        return report

    def make_runner(self, model: Any, *, rows: Rows, cache: PagedKVCache, check: LogitsCheck | None) -> PassRunner:
        """Return the runner of passes; called once, before any other of the methods below.

        Args:
            model: With the paged attention switched on.
            rows: Tokens and block tables.
            cache: Keys and values; its numerics are named here.
            check: For new graphs; None: they are not compared.
        """
        return PassRunner(model, rows=rows, cache=cache, layout=self._config.layout, workspace=Workspace())

    def warm_up(
        self,
        buckets: Sequence[Bucket],
        *,
        run: Callable[[Bucket], None],
        progress: Callable[[int, int], None] | None = None,
    ) -> WarmUpReport:
        """Prepare buckets, the largest first: then the memory of the smaller ones is there.

        Where nothing is kept for a shape, the smallest bucket of each phase is run once, for what is made at a first use.

        Args:
            buckets: All that will be used.
            run: Runs one on padding.
            progress: Progress callback; see ``Backend.warm_up``.

        Raises:
            BackendError: The model cannot become graphs, or one of them computes something else.
        """
        ordered = sorted(buckets, reverse=True)
        smallest = {bucket.phase: bucket for bucket in ordered}
        for done, bucket in enumerate(ordered, start=1):
            if self._compiles_kernels or bucket == smallest[bucket.phase]:
                run(bucket)
            if progress is not None:
                progress(done, len(buckets))
        return WarmUpReport(prepared=tuple(buckets))

    def step(self) -> contextlib.AbstractContextManager[StepCounts]:
        """Return the context that a step runs in, with the counters of that step."""
        return contextlib.nullcontext(StepCounts())

    def metrics(self) -> str:
        """Return counters of graphs, in Prometheus' text format. May be called on any thread."""
        return ""

    def close(self) -> None:
        """Free the graphs; counters stay. May be called twice."""
