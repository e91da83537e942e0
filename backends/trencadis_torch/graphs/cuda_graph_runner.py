"""Runs passes like ``PassRunner``, and replays those whose bucket has a graph: what is sampled, and how, stays as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trencadis.records import Pass
from trencadis_torch.attention.ragged import Workspace
from trencadis_torch.attention.trees import DraftTrees
from trencadis_torch.cache.kv_cache import PagedKVCache
from trencadis_torch.graphs.bucket_graphs import BucketGraphs, GraphInputs
from trencadis_torch.graphs.capture import CudaRecorder, Recorder
from trencadis_torch.graphs.checked_capture import CheckedRecorder
from trencadis_torch.graphs.cuda_graph_counts import CaptureWatch
from trencadis_torch.inputs import ModelInputs
from trencadis_torch.rows import Rows
from trencadis_torch.runner import PassRunner

__all__ = ["GraphRunner", "lasting_tensors", "make_recorder"]


class GraphRunner(PassRunner):
    """A model with rows, a cache and graphs, in the padded layout.

    Args:
        model: Of transformers, with the paged attention switched on.
        rows: Tokens and block tables.
        cache: Keys and values.
        recorder: Captures.
        watch: Counts.

    Attributes:
        graphs: What was captured.
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
    """Return what captures on a device: CUDA, or on a CPU the tape that checks what CUDA would ask for."""
    if device.type == "cuda":
        return CudaRecorder(device)
    return CheckedRecorder(lasting_tensors(model, rows, cache))


def lasting_tensors(model: Any, rows: Rows, cache: PagedKVCache) -> list[torch.Tensor]:
    """Return what graphs may read and write besides their own memory: it keeps its place as long as the backend lives."""
    held = [one for part in model.modules() for one in vars(part).values() if isinstance(one, torch.Tensor)]
    return [rows.tokens, rows.tables, *cache.parts, *model.parameters(), *model.buffers(), *held]
