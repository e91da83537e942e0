"""``graphs = "buckets"`` and ``"checked"``: one CUDA graph for every decode bucket, captured during the warm-up only.

    facts [3, B], which logits [B × Q] ─ one copy ─▶ static input │ tokens, slots, blocks ▶ model ▶ logits │ static output ─▶ sampler
                                                                   └────────────── the graph ──────────────┘

Rows, block tables and KV cache stay at fixed addresses, so a graph reads them itself; it takes three numbers per sequence from the host.
Where a kernel reads the block tables, a graph does not depend on the number of blocks, and serves all buckets of its batch size and query
length. Prefills run without graphs: their kernels are long enough to hide the cost of launching them.

Shapes: B sequences, Q queries of each, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from trencadis.errors import BackendError
from trencadis.records import Bucket, MemoryReport, Pass, Phase, WarmUpReport
from trencadis_torch.attention.padded import static_decode
from trencadis_torch.attention.ragged import Workspace
from trencadis_torch.attention.trees import DraftTrees
from trencadis_torch.cache.kv_cache import PagedKVCache, StaticKernel
from trencadis_torch.config import TorchConfig
from trencadis_torch.device import fill
from trencadis_torch.graphs.capture import CudaRecorder, Graph, Recorder
from trencadis_torch.graphs.checked_capture import CheckedRecorder
from trencadis_torch.graphs.counts import CaptureWatch
from trencadis_torch.graphs.mode import BucketMode, LogitsCheck
from trencadis_torch.inputs import ModelInputs, padded_facts, padded_firsts, padded_tokens
from trencadis_torch.rows import Rows
from trencadis_torch.runner import PassRunner

__all__ = [
    "CudaGraphMode",
    "BucketGraph",
    "BucketGraphs",
    "GraphInputs",
    "GraphRunner",
    "lasting_tensors",
    "make_recorder",
]

logger = logging.getLogger("trencadis.torch")

Forward = Callable[[ModelInputs, torch.Tensor], torch.Tensor]
"""Inputs of a pass, and which tokens' logits, int64 ``[L]``, to logits ``[L, V]``."""

MARGIN_BYTES = 256 * 2**20
"""What a capture must leave free: eager passes, too, have temporaries."""

_FACTS = 3


@attrs.frozen(kw_only=True)
class GraphInputs(ModelInputs):
    """A pass that is replayed.

    Attributes:
        graph: Graph of the bucket.
        facts: Facts of the sequences, int64 ``[3, B]`` on the host.
    """

    graph: BucketGraph
    facts: npt.NDArray[np.int64]


class BucketGraph:
    """The captured graph of one shape.

    Args:
        graph: The kernels.
        shape: The pass that was captured.
        inputs: Where it reads, int64 ``[3 B + B Q]``.
        logits: Where it writes, ``[B Q, V]``.
    """

    def __init__(self, graph: Graph, shape: ModelInputs, inputs: torch.Tensor, logits: torch.Tensor) -> None:
        self.shape = shape
        self._graph = graph
        self._inputs = inputs
        self._logits = logits

    def of(self, one: Pass) -> GraphInputs:
        """Return the inputs of a pass in this bucket."""
        return GraphInputs(
            token_ids=self.shape.token_ids,
            positions=self.shape.positions,
            attention=self.shape.attention,
            firsts=self.shape.firsts,
            graph=self,
            facts=padded_facts(one),
        )

    def replay(self, facts: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return the logits ``[B × Q, V]`` at some tokens; valid until the next graph is replayed.

        Args:
            facts: Facts of the sequences, ``[3, B]``.
            tokens: Indices into the pass, ``[B × Q]``.
        """
        fill(self._inputs, np.concatenate([facts.ravel(), tokens]))
        self._graph.replay()
        return self._logits


class BucketGraphs:
    """All graphs of one backend.

    Args:
        recorder: Captures.
        rows: Tokens and block tables, which keep their places.
        cache: The same.
        forward: The model.
        watch: Counts.
    """

    def __init__(
        self, recorder: Recorder, *, rows: Rows, cache: PagedKVCache, forward: Forward, watch: CaptureWatch
    ) -> None:
        self._recorder = recorder
        self._rows = rows
        self._cache = cache
        self._forward = forward
        self._watch = watch
        self._graphs: dict[tuple[int, ...], BucketGraph] = {}
        self._inputs: torch.Tensor | None = None
        self._logits: torch.Tensor | None = None

    def find(self, bucket: Bucket) -> BucketGraph | None:
        """Return the graph that serves a bucket, and count whether there is one; None: it runs as it is."""
        if bucket.phase is not Phase.DECODE:
            return None
        found = self._graphs.get(self._key(bucket))
        self._watch.note(bucket, replayed=found is not None)
        return found

    def warm_up(
        self,
        buckets: Sequence[Bucket],
        *,
        run: Callable[[Bucket], None],
        progress: Callable[[int, int], None] | None = None,
    ) -> WarmUpReport:
        """Run every bucket on padding once, and capture decodes: the largest first, whose temporaries serve the smaller ones.

        Args:
            buckets: All that will be used.
            run: Runs one as it is.
            progress: Progress callback; see ``Backend.warm_up``.

        Raises:
            BackendError: The model does something that no graph can hold.
        """
        free = self._recorder.free_bytes()
        for done, bucket in enumerate(sorted(buckets, key=_size, reverse=True), start=1):
            run(bucket)
            if bucket.phase is Phase.DECODE and self._key(bucket) not in self._graphs:
                self._prepare(bucket)
            if progress is not None:
                progress(done, len(buckets))
        used = max(0, free - self._recorder.free_bytes())
        self._watch.graphs(len(self._graphs), used)
        logger.info("%d graphs for %d buckets take %.0f MiB.", len(self._graphs), len(buckets), used / 2**20)
        return WarmUpReport(prepared=tuple(buckets), num_graphs=len(self._graphs), graph_bytes=used)

    def close(self) -> None:
        """Let go of all graphs, the last of which may still run when this is called."""
        self._recorder.close()
        self._graphs.clear()

    def _key(self, bucket: Bucket) -> tuple[int, ...]:
        shape = (bucket.batch_size, bucket.query_len)
        return shape if isinstance(self._cache.kernel, StaticKernel) else (*shape, bucket.num_blocks)

    def _prepare(self, bucket: Bucket) -> None:
        """Capture a bucket, if its temporaries have room."""
        what = f"a decode of {bucket.batch_size} × {bucket.query_len} tokens"
        inputs, logits = self._buffers(bucket)
        inputs.zero_()
        seen: list[ModelInputs] = []

        def run() -> None:
            shape, found = self._pass(bucket, inputs)
            seen[:] = [shape]
            logits.copy_(found)

        needed = self._recorder.rehearse(run, what=what)
        expected = logits.clone()
        room = self._recorder.free_bytes() - MARGIN_BYTES
        if needed > room:
            logger.warning(
                "%s runs without a graph: it takes up to %.0f MiB, and %.0f MiB are left.",
                what,
                needed / 2**20,
                max(0, room) / 2**20,
            )
            return
        graph = self._recorder.capture(run, what=what)
        _check(graph, logits, expected, what)
        self._graphs[self._key(bucket)] = BucketGraph(graph, seen[0], inputs, logits)

    def _pass(self, bucket: Bucket, inputs: torch.Tensor) -> tuple[ModelInputs, torch.Tensor]:
        """Run a decode pass from its static input alone."""
        count = _FACTS * bucket.batch_size
        facts = inputs[:count].view(_FACTS, bucket.batch_size)
        token_ids, positions, slots = padded_tokens(facts, bucket, self._rows, self._cache)
        attention = static_decode(facts, bucket, slots=slots, tables=self._rows.tables, cache=self._cache)
        shape = ModelInputs(token_ids=token_ids, positions=positions, attention=attention, firsts=padded_firsts(bucket))
        return shape, self._forward(shape, inputs[count:])

    def _buffers(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a bucket's part of the static input and output, which all graphs share: only one runs at a time."""
        size = bucket.batch_size * (_FACTS + bucket.query_len)
        if self._inputs is None or len(self._inputs) < size:
            self._inputs = torch.zeros(size, dtype=torch.int64, device=self._cache.device)
        if self._logits is None or len(self._logits) < bucket.num_tokens:
            _, found = self._pass(bucket, torch.zeros_like(self._inputs[:size]))
            self._logits = torch.zeros_like(found)
        self._recorder.lasts(self._inputs, self._logits)
        return self._inputs[:size], self._logits[: bucket.num_tokens]


def _size(bucket: Bucket) -> tuple[int, Bucket]:
    return bucket.num_tokens, bucket


def _check(graph: Graph, logits: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Replay a graph once on padding.

    Raises:
        BackendError: It computes something else than what was captured.
    """
    logits.fill_(float("nan"))
    graph.replay()
    largest = float((logits.float() - expected.float()).abs().max())
    if not largest <= 1e-2 * max(1.0, float(expected.float().abs().max())):
        raise BackendError(
            f"[backend.torch] graphs: the graph of {what} computes other logits than it was captured with (by {largest:.2g}).",
            hint='Set [backend.torch] graphs = "off".',
        )


class GraphRunner(PassRunner):
    """A model with rows, a cache and graphs, in the padded layout.

    Args:
        model: Model of transformers, with the paged attention switched on.
        rows: Tokens and block tables.
        cache: Keys and values.
        recorder: Captures.
        watch: Counts.

    Attributes:
        graphs: Graphs captured so far.
    """

    def __init__(self, model: Any, *, rows: Rows, cache: PagedKVCache, recorder: Recorder, watch: CaptureWatch) -> None:
        super().__init__(model, rows=rows, cache=cache, layout="padded", workspace=Workspace())
        self.graphs = BucketGraphs(recorder, rows=rows, cache=cache, forward=self.logits_at, watch=watch)

    def inputs(self, one: Pass, trees: DraftTrees | None = None) -> ModelInputs:
        """Return the inputs of a pass; those of one that is replayed are three numbers for each sequence."""
        graph = None if trees is not None else self.graphs.find(one.bucket)
        return super().inputs(one, trees) if graph is None else graph.of(one)

    def forward(self, inputs: ModelInputs, tokens: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return logits; see ``PassRunner``."""
        if isinstance(inputs, GraphInputs):
            return inputs.graph.replay(inputs.facts, tokens)
        return super().forward(inputs, tokens)


def make_recorder(device: torch.device, model: Any, rows: Rows, cache: PagedKVCache) -> Recorder:
    """Return the recorder of a device: CUDA's, or on a CPU the tape that checks CUDA's requirements."""
    if device.type == "cuda":
        return CudaRecorder(device)
    return CheckedRecorder(lasting_tensors(model, rows, cache))


def lasting_tensors(model: Any, rows: Rows, cache: PagedKVCache) -> list[torch.Tensor]:
    """Return the tensors that graphs may read and write besides their own memory: they keep their addresses as long as the backend lives."""
    held = [one for part in model.modules() for one in vars(part).values() if isinstance(one, torch.Tensor)]
    return [rows.tokens, rows.tables, *cache.parts, *model.parameters(), *model.buffers(), *held]


_GRAPH_BYTES = 2 * 2**20
"""What a driver takes for the description of a graph of some hundred kernels, roughly: for the estimate before there is one."""

_DEVICES = {"buckets": "cuda", "checked": "cpu"}


class CudaGraphMode(BucketMode):
    """Captured graphs of one backend.

    Args:
        config: Configuration of the backend.
        device: Device of the backend.

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
        """Add an estimate of the graphs' memory.

        They have a pool of their own: the temporaries of the largest decode, and its logits twice, once as they come and once where they
        stay. Each graph has a description of its kernels; four for each doubling of the batch size are assumed.
        """
        temporaries = report.activation_bytes * min(max_num_seqs, max_num_batched_tokens) // max_num_batched_tokens
        reserve = temporaries + 2 * logits_bytes + 4 * max_num_seqs.bit_length() * _GRAPH_BYTES
        return attrs.evolve(report, activation_bytes=report.activation_bytes + reserve)

    def make_runner(self, model: Any, *, rows: Rows, cache: PagedKVCache, check: LogitsCheck | None) -> GraphRunner:
        """Return a runner that replays; it compares graphs with their own capture, so ``check`` is not used."""
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
        """Run every bucket and capture decodes; see :class:`~trencadis_torch.graphs.cuda_graphs.BucketGraphs`."""
        if self._runner is None:
            raise BackendError("backend torch: graphs come after allocate.")
        return self._runner.graphs.warm_up(buckets, run=run, progress=progress)

    def metrics(self) -> str:
        """Return the counters."""
        return self.watch.metrics()

    def close(self) -> None:
        """Wait for running replays, and free the graphs."""
        if self._runner is not None:
            self._runner.graphs.close()
        self._runner = None
