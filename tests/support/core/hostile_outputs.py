"""Outputs of steps that break the contract, each in its own way, and an executor whose steps are spoilt by them.

``SPOILS`` gives by name a function of the true output: it returns what comes back instead, or raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import attrs
import msgspec
import numpy as np

from trencadis.interfaces import PendingStep
from trencadis.records import Batch, ConnectorReport, RowError, StepOutput, TokenLogprobs
from trencadis_testing.fake_executor import FakeExecutor

Spoil = Callable[[StepOutput], Any]


def raises(output: StepOutput) -> StepOutput:
    """Raise as a bug does."""
    raise KeyError("a bug in a plugin")


def _with(**changes: Any) -> Spoil:
    def spoil(output: StepOutput) -> StepOutput:
        return attrs.evolve(output, **{name: make(output) for name, make in changes.items()})

    return spoil


def _entry(**changes: Any) -> Callable[[StepOutput], tuple[TokenLogprobs, ...]]:
    plain = TokenLogprobs(index=0, position=1, token_id=1, logprob=-1.0, rank=1)
    return lambda output: (msgspec.structs.replace(plain, **changes),)


def _first(value: int) -> Callable[[StepOutput], np.ndarray]:
    def make(output: StepOutput) -> np.ndarray:
        tokens = output.token_ids.copy()
        tokens[:1] = value
        return tokens

    return make


SPOILS: dict[str, Spoil] = {
    "raises": raises,
    "exits": lambda output: sys.exit(3),
    "none": lambda output: None,
    "another type": lambda output: (output.token_ids, output.num_emitted),
    "tokens none": _with(token_ids=lambda output: None),
    "tokens a list": _with(token_ids=lambda output: output.token_ids.tolist()),
    "tokens float": _with(token_ids=lambda output: output.token_ids.astype(np.float32)),
    "tokens int64": _with(token_ids=lambda output: output.token_ids.astype(np.int64) + (1 << 40)),
    "tokens in two dimensions": _with(token_ids=lambda output: output.token_ids[:, None]),
    "too few tokens": _with(token_ids=lambda output: output.token_ids[:-1]),
    "too many tokens": _with(token_ids=lambda output: np.append(output.token_ids, output.token_ids[:1])),
    "negative token": _with(token_ids=_first(-1)),
    "token beyond the vocabulary": _with(token_ids=_first(1 << 20)),
    "counts none": _with(num_emitted=lambda output: None),
    "counts short": _with(num_emitted=lambda output: output.num_emitted[:-1]),
    "counts long": _with(num_emitted=lambda output: np.append(output.num_emitted, output.num_emitted[:1])),
    "counts negative": _with(num_emitted=lambda output: output.num_emitted - 2),
    "counts too many": _with(
        num_emitted=lambda output: output.num_emitted * 2, token_ids=lambda output: np.repeat(output.token_ids, 2)
    ),
    "counts nothing": _with(
        num_emitted=lambda output: output.num_emitted * 0, token_ids=lambda output: output.token_ids[:0]
    ),
    "stale step": _with(step=lambda output: output.step - 1),
    "time not a number": _with(device_s=lambda output: float("nan")),
    "time a text": _with(device_s=lambda output: "soon"),
    "padding negative": _with(num_padded_tokens=lambda output: -1),
    "reports a list": _with(connector_reports=lambda output: [ConnectorReport()]),
    "report none": _with(connector_reports=lambda output: {0: None}),
    "logprobs of nobody": _with(logprobs=_entry(index=99)),
    "logprobs of a token that is none": _with(logprobs=_entry(token_id=1 << 30)),
    "logprobs not a number": _with(logprobs=_entry(logprob=float("nan"))),
    "logprobs above zero": _with(prompt_logprobs=_entry(logprob=3.0)),
    "logprobs of numpy": _with(logprobs=_entry(token_id=np.int64(1))),
    "logprobs of other lengths": _with(logprobs=_entry(top_token_ids=(1, 2), top_logprobs=(-1.0,))),
    "logprobs a text": _with(logprobs=lambda output: ("entry",)),
    "errors of nobody": _with(row_errors=lambda output: (RowError(index=99, message="x"),)),
    "errors a text": _with(row_errors=lambda output: ("x",)),
}


class SpoiltStep:
    """A step whose output is spoilt.

    Args:
        pending: The true step.
        spoil: Makes what comes back.
    """

    def __init__(self, pending: PendingStep, spoil: Spoil) -> None:
        self._pending = pending
        self._spoil = spoil

    def wait(self) -> StepOutput:
        """Return the spoilt output."""
        return self._spoil(self._pending.wait())


class SpoilingExecutor(FakeExecutor):
    """A fake executor that spoils the steps for which ``is_due`` says so.

    Attributes:
        spoil: Makes what comes back of such a step.
        is_due: Whether a batch is spoilt.
        num_spoilt: Steps that were.
    """

    def __init__(self, spoil: Spoil, is_due: Callable[[Batch], bool]) -> None:
        super().__init__()
        self.spoil = spoil
        self.is_due = is_due
        self.num_spoilt = 0

    def submit(self, batch: Batch) -> PendingStep:
        pending = super().submit(batch)
        if not self.is_due(batch):
            return pending
        self.num_spoilt += 1
        return SpoiltStep(pending, self.spoil)
