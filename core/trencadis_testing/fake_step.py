"""A step of a fake backend."""

from __future__ import annotations

from collections.abc import Callable

from trencadis.errors import StepFailedError
from trencadis.interfaces import LayerGate
from trencadis.records import Batch, StepOutput

__all__ = ["FakeStep"]


class FakeStep:
    """A batch that runs when it is waited for.

    Args:
        batch: The batch.
        gate: Gate of its layers, if they wait for KV loads.
        run: Runs it, and those before it.

    Attributes:
        output: Output of the step.
        error: Or what it raised.
    """

    def __init__(self, batch: Batch, gate: LayerGate | None, run: Callable[[FakeStep], None]) -> None:
        self.batch = batch
        self.gate = gate
        self.output: StepOutput | None = None
        self.error: Exception | None = None
        self._run = run

    def wait(self) -> StepOutput:
        """Run it if it has not run."""
        if self.output is None and self.error is None:
            self._run(self)
        if self.error is not None:
            raise self.error
        if self.output is None:
            raise StepFailedError("the step was lost")
        return self.output
