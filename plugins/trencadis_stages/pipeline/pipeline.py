"""The stage of engines whose ranks are the stages of a pipeline: a batch in flight for each, and the tokens that the others have not sampled."""

from __future__ import annotations

import functools

import attrs

from trencadis.engine.stage import EngineKinds, EngineParts, Makings, Stage
from trencadis.engine.step import SubmittedStep
from trencadis.records import Batch
from trencadis_stages.pipeline.pipelined_scheduling import PipelinedScheduling

__all__ = ["Pipeline"]


class Pipeline(Stage):
    """Keeps a batch in flight for each stage, and sends with each batch the tokens that its sequences start with.

    Args:
        makings: Configuration and layout.
    """

    def __init__(self, makings: Makings) -> None:
        self._num_batches = makings.layout.pipeline
        self._is_async = makings.config.engine.async_scheduling

    def compose(self, kinds: EngineKinds) -> EngineKinds:
        """Share out over batches what the policy answers, unless one step follows the other."""
        if not self._is_async:
            return kinds
        policy = functools.partial(PipelinedScheduling, num_batches=self._num_batches)
        return attrs.evolve(kinds, depth=self._num_batches, policy=policy)

    def bind(self, engine: EngineParts) -> None:
        """Take the rows."""
        self._rows = engine.state.rows

    def after_build(self, step: SubmittedStep, batch: Batch) -> Batch:
        """Add the token that each sequence starts with, for ranks that have not sampled it."""
        return attrs.evolve(batch, start_token_ids=self._rows.tokens[step.plan.rows, step.plan.starts])
