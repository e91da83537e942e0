"""Stages: parts of the engine that exist only if the configuration asks for them, and the moments of a step at which they act."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trencadis.engine.inspect.accounting import SubmittedStep
    from trencadis.records import Batch, FinishedSequence

__all__ = ["Stage", "Stages"]


class Stage:
    """A part of the engine that the configuration can leave out; its state lives in it.

    A stage defines the moments that it needs; the others cost nothing. All are called on the engine's thread.
    """

    def after_plan(self, step: SubmittedStep) -> None:
        """Called when a plan is made, before its batch is built."""

    def after_build(self, step: SubmittedStep, batch: Batch) -> None:
        """Called when the batch is built, before it is submitted. An exception fails the step without submitting it."""

    def on_finish(self, finished: FinishedSequence) -> None:
        """Called once for each sequence that left the engine."""


class Stages:
    """The moments of an engine's stages, each in the order of the stages.

    Args:
        stages: Those that the configuration asks for.

    Attributes:
        after_plan: The methods of the stages that define this moment.
        after_build: The same.
        on_finish: The same.
    """

    def __init__(self, stages: Iterable[Stage] = ()) -> None:
        stages = tuple(stages)

        def defined(moment: str) -> tuple[Callable[..., Any], ...]:
            empty = getattr(Stage, moment)
            return tuple(getattr(stage, moment) for stage in stages if getattr(type(stage), moment) is not empty)

        self.after_plan = defined("after_plan")
        self.after_build = defined("after_build")
        self.on_finish = defined("on_finish")
