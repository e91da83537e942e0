"""The stage that answers why a request ran, or did not, in each of the last steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trencadis.engine.stage import EngineParts, Makings, Stage
from trencadis.errors import InvalidRequestError
from trencadis_stages.explain.explain import explain_request
from trencadis_stages.explain.record import Decisions

__all__ = ["make_explaining"]


class Explaining(Decisions):
    """Keeps the step record, and answers ``explain`` from it."""

    def bind(self, engine: EngineParts) -> None:
        """Answer from now on."""
        super().bind(engine)
        self.answers = {"explain": lambda arguments: explain_request(str(arguments["request_id"]), self, engine.state)}


class Unrecorded(Stage):
    """Stands in an engine that records no step."""

    def __init__(self) -> None:
        self.answers = {"explain": self._refuse}

    def _refuse(self, _: Mapping[str, Any]) -> dict[str, Any]:
        raise InvalidRequestError("no step is recorded: engine.explain_steps is 0.", hint="Set it, and start again.")


def make_explaining(makings: Makings) -> Stage:
    """Return the stage, or the one that stands in its place where no step is recorded."""
    num_steps = makings.config.engine.explain_steps
    return Explaining(num_steps) if num_steps else Unrecorded()
