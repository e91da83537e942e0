"""Samplers, acceptance rules and logits processors that misbehave, importable by path.

Each class has one attribute ``mode``, one of its ``MODES``; "" is none of them, and then it is right. Samplers and processors misbehave in
calls with a sequence whose prompt begins with ``VICTIM``; rules in every call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch

from trencadis.interfaces import (
    AcceptanceRule,
    LogitsProcessor,
    Sampled,
    SampledLogprobs,
    Sampler,
    SamplingContext,
    Verification,
)
from trencadis.records import RowError, RowStart

VICTIM = 66
"""First token of prompts for whose sequences parts misbehave."""


def bug() -> Any:
    """Raise as a bug does."""
    raise KeyError("a bug in a plugin")


def _entry(**changes: Any) -> tuple[SampledLogprobs, ...]:
    fields = {"index": 0, "token_id": 1, "logprob": -1.0, "rank": 1, "top_token_ids": (), "top_logprobs": ()}
    return (SampledLogprobs(**{**fields, **changes}),)


def _at(ids: torch.Tensor, due: list[int], token: int) -> Sampled:
    ids = ids.clone()
    ids[due] = token
    return Sampled(token_ids=ids)


Spoil = Callable[[torch.Tensor, list[int]], Any]


class HostileSampler(Sampler):
    """Greedy; in a call with a victim it does what ``mode`` says."""

    honours = frozenset({"greedy", "logprobs"})
    mode: ClassVar[str] = ""
    MODES: ClassVar[dict[str, Spoil]] = {
        "raises": lambda ids, due: bug(),
        "exits": lambda ids, due: sys.exit(3),
        "returns none": lambda ids, due: None,
        "returns a tensor": lambda ids, due: ids,
        "tokens none": lambda ids, due: Sampled(token_ids=None),  # type: ignore[arg-type]
        "tokens a list": lambda ids, due: Sampled(token_ids=ids.tolist()),  # type: ignore[arg-type]
        "tokens float": lambda ids, due: Sampled(token_ids=ids.float()),
        "tokens int32": lambda ids, due: Sampled(token_ids=ids.int()),
        "too few": lambda ids, due: Sampled(token_ids=ids[:-1]),
        "too many": lambda ids, due: Sampled(token_ids=torch.cat([ids, ids])),
        "two dimensions": lambda ids, due: Sampled(token_ids=ids[:, None]),
        "negative": lambda ids, due: _at(ids, due, -1),
        "beyond the vocabulary": lambda ids, due: _at(ids, due, 1 << 20),
        "2^40": lambda ids, due: _at(ids, due, 1 << 40),
        "logprobs of nobody": lambda ids, due: Sampled(token_ids=ids, logprobs=_entry(index=99)),
        "logprobs not numbers": lambda ids, due: Sampled(token_ids=ids, logprobs=_entry(logprob=float("nan"))),
        "logprobs a text": lambda ids, due: Sampled(token_ids=ids, logprobs=("x",)),  # type: ignore[arg-type]
        "errors of nobody": lambda ids, due: Sampled(token_ids=ids, row_errors=(RowError(index=99, message="x"),)),
        "late errors of nobody": lambda ids, due: Sampled(
            token_ids=ids, late_errors=lambda: (RowError(index=99, message="x"),)
        ),
        "late errors raise": lambda ids, due: Sampled(token_ids=ids, late_errors=bug),
        "start raises": lambda ids, due: Sampled(token_ids=ids),
        "writes and raises": lambda ids, due: bug(),
        "writes histories": lambda ids, due: Sampled(token_ids=ids),
    }
    HARMLESS = "writes histories"
    """The mode that does no harm, for what it writes to are copies."""

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.victims = np.zeros(num_rows, np.bool_)

    def start_row(self, start: RowStart) -> None:
        self.victims[start.row] = start.token_ids[0] == VICTIM
        if self.victims[start.row]:
            start.token_ids[:] = 0
            if self.mode == "start raises":
                bug()

    def sample(self, logits: torch.Tensor, context: SamplingContext) -> Sampled:
        ids = logits.argmax(-1)
        due = [index for index, row in enumerate(context.rows) if self.victims[row]]
        if not self.mode or not due:
            return Sampled(token_ids=ids)
        if self.mode.startswith("writes"):
            logits.fill_(0.0)
            context.tokens.fill_(5)
        found: Sampled = self.MODES[self.mode](ids, due)
        return found


class HostileRule(AcceptanceRule):
    """Says that it is lossless; accepts as ``match`` does, but for what ``mode`` says."""

    lossless = True
    mode: ClassVar[str] = ""
    MODES: ClassVar[dict[str, Callable[[torch.Tensor, Verification], Any]]] = {
        "raises": lambda right, seen: bug(),
        "exits": lambda right, seen: sys.exit(3),
        "returns none": lambda right, seen: None,
        "a list": lambda right, seen: right.tolist(),
        "int": lambda right, seen: right.int(),
        "too short": lambda right, seen: right[:, :0],
        "too long": lambda right, seen: torch.cat([right, right], 1),
        "accepts everything": lambda right, seen: torch.ones_like(right),
        "accepts more than all": lambda right, seen: right * 2,
        "negative": lambda right, seen: right - 2,
        "not a number": lambda right, seen: right * float("nan"),
        "writes drafts": lambda right, seen: (seen.tokens.fill_(5), seen.num_drafts.fill_(3), right)[2],
        "writes what was sampled": lambda right, seen: (_own(seen).fill_(5), right)[1],
    }

    def accept(self, verification: Verification) -> torch.Tensor:
        right = self.right(verification)
        return self.MODES[self.mode](right, verification) if self.mode else right

    def right(self, verification: Verification) -> torch.Tensor:
        assert verification.sampled is not None
        return (verification.sampled.gather(1, verification.parents) == verification.tokens).double()


def _own(seen: Verification) -> torch.Tensor:
    return seen.tokens if seen.sampled is None else seen.sampled


class HostileDistributions(HostileRule):
    """The same by distributions; ``last_mode`` spoils the distribution of the last token."""

    needs_distributions = True
    last_mode: ClassVar[str] = ""
    LAST_MODES: ClassVar[dict[str, Callable[[torch.Tensor], Any]]] = {
        "raises": lambda own: bug(),
        "returns none": lambda own: None,
        "too short": lambda own: own[:, :-1],
        "nothing": lambda own: own * 0,
        "negative": lambda own: own - 2,
        "not a number": lambda own: own * float("nan"),
        "another token": lambda own: own.roll(1, 1),
        "int": lambda own: own.int(),
    }

    def right(self, verification: Verification) -> torch.Tensor:
        target = verification.target
        assert target is not None
        places = verification.parents * target.shape[2] + verification.tokens.clamp(min=0)
        chance = target.flatten(1).gather(1, places).double()
        steps = torch.arange(chance.shape[1], device=chance.device)
        return torch.where(steps < verification.num_drafts[:, None], chance, 0.0)

    def last(self, verification: Verification, stops: torch.Tensor) -> torch.Tensor:
        target = verification.target
        assert target is not None
        own = target.gather(1, stops[:, None, None].expand(-1, 1, target.shape[2]))[:, 0]
        return self.LAST_MODES[self.last_mode](own) if self.last_mode else own


class HostileProcessor(LogitsProcessor):
    """Changes nothing; for requests that name it, it does what ``mode`` says."""

    name = "hostile"
    has_state = True
    mode: ClassVar[str] = ""
    MODES: ClassVar[dict[str, Callable[[torch.Tensor], Any]]] = {
        "raises": lambda logits: bug(),
        "exits": lambda logits: sys.exit(3),
        "returns none": lambda logits: None,
        "a list": lambda logits: logits.tolist(),
        "another dtype": lambda logits: logits.double(),
        "too few rows": lambda logits: logits[:0],
        "too many rows": lambda logits: torch.cat([logits, logits]),
        "too few tokens": lambda logits: logits[:, :-1],
        "not a number": lambda logits: logits * float("nan"),
        "no token": lambda logits: logits.fill_(-torch.inf),
        "start raises": lambda logits: logits,
        "applies_to raises": lambda logits: logits,
        "commit raises": lambda logits: logits,
        "writes what it sees": lambda logits: logits,
    }
    HARMLESS = "writes what it sees"
    """The mode that does no harm, for what it writes to are copies; but to the row that asked for it."""

    def check(self, arguments: Any) -> None:
        """Take any."""

    def applies_to(self, start: RowStart) -> bool:
        asks = super().applies_to(start)
        return bug() if asks and self.mode == "applies_to raises" else asks  # type: ignore[no-any-return]

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Keep nothing."""

    def start_row(self, start: RowStart) -> None:
        if "hostile" in start.params.logits_processors:
            start.token_ids[:] = 0
            if self.mode == "start raises":
                bug()

    def apply(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        if not self.mode:
            return logits
        if self.mode == "writes what it sees":
            context.tokens.fill_(5)
            logits.fill_(0.0)
        changed: torch.Tensor = self.MODES[self.mode](logits)
        return changed

    def commit(self, token_ids: torch.Tensor, context: SamplingContext) -> None:
        if self.mode == "commit raises":
            bug()
        if self.mode:
            token_ids.fill_(0)

    def snapshot(self, row: int) -> Any:
        return bug() if self.mode else None
