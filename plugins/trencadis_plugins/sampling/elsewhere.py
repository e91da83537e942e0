"""Logits processors of other packages, by import path or entry point, with a guard that confines their errors to their rows."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points, packages_distributions, version
from typing import Any, TypeVar

import attrs
import numpy as np
import torch

from trencadis.errors import ConfigValueError, ContractError, PluginLoadError, StepFailedError
from trencadis.faults import shown
from trencadis.hookspecs import PROCESSOR_GROUP
from trencadis.interfaces import LogitsProcessor, SamplingContext
from trencadis.interfaces.component import import_attribute
from trencadis.records import RowStart, SamplingParams
from trencadis_plugins.sampling.guard import RowsFailedError, no_finite_maximum
from trencadis_plugins.sampling.row_processor import whose

__all__ = ["IsolatedProcessor", "installed_processors", "processor_from"]

logger = logging.getLogger("trencadis.sampling")

T = TypeVar("T")


def installed_processors() -> list[str]:
    """Return the names of installed logits processors of other packages, sorted."""
    return sorted({point.name for point in entry_points(group=PROCESSOR_GROUP)})


def processor_from(name: str) -> LogitsProcessor | None:
    """Return a fresh processor; None if nothing installed has the name.

    Args:
        name: An import path, ``package.module:Class``, or the name of an entry point.

    Raises:
        ConfigValueError: Two packages have an entry point of this name.
        PluginLoadError: It cannot be imported or made.
        ContractError: It is no class of a logits processor.
    """
    point = None if ":" in name else _entry_point(name)
    if point is None and ":" not in name:
        return None
    where = f"[sampling.standard] processor {name!r}"
    try:
        made: Any = import_attribute(name) if point is None else point.load()
    except (Exception, SystemExit) as error:
        raise PluginLoadError(
            f"{where} cannot be imported: {type(error).__name__}: {error}.",
            hint="Name a class that is importable where trencadis runs, or take the name out of the config.",
        ) from error
    if not (isinstance(made, type) and issubclass(made, LogitsProcessor)):
        raise ContractError(
            f"{where} is {shown(made)}, no subclass of LogitsProcessor, and was not called.",
            hint="Derive it from trencadis.interfaces.LogitsProcessor.",
        )
    try:
        return made()
    except (Exception, SystemExit) as error:
        raise PluginLoadError(
            f"{where} cannot be made: {type(error).__name__}: {error}.",
            hint="Name a class that takes no arguments, or take the name out of the config.",
        ) from error


def _entry_point(name: str) -> EntryPoint | None:
    found = tuple(entry_points(group=PROCESSOR_GROUP, name=name))
    if len(found) > 1:
        owners = " and ".join(sorted(point.dist.name if point.dist else "?" for point in found))
        raise ConfigValueError(
            f"[sampling.standard] processor {name!r} is a name in {owners}.",
            hint="Give the import path, package.module:Class, of the one you mean.",
        )
    return found[0] if found else None


class IsolatedProcessor(LogitsProcessor):
    """A processor of another package; it gets copies of the rows that use it, and changes no others.

    What it returns is checked. What it raises ends the sequences that asked for it, with an error that names it.

    Args:
        inner: The processor.
        name: By which the configuration names it.
    """

    def __init__(self, inner: LogitsProcessor, name: str) -> None:
        self.inner = inner
        self._configured = name
        self._tokens: torch.Tensor | None = None
        self._num_faults = 0
        for promise in ("argmax_invariant", "needs_history", "supports_branches", "speculation_safe", "has_state"):
            setattr(self, promise, bool(getattr(inner, promise)))
        self.rebuilds_state = bool(inner.rebuilds_state)
        self.honours = frozenset(inner.honours)
        self.name = inner.name

    @functools.cached_property
    def label(self) -> str:
        """The processor with its distribution and version, for messages; the first call looks through all distributions."""
        module = type(self.inner).__module__.partition(".")[0]
        owner = next(iter(packages_distributions().get(module, [])), "")
        where = f"{owner} {version(owner)}" if owner else f"module {type(self.inner).__module__}"
        return f'logits processor "{self._configured}" of {where}'

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Call the processor's check."""
        self.inner.check(arguments)

    def check_params(self, params: SamplingParams) -> None:
        """Call the processor's check."""
        self.inner.check_params(params)

    def can_start_with(self, start: RowStart, token_id: int) -> bool:
        """Return what the processor returns."""
        return self.inner.can_start_with(start, token_id)

    def applies_to(self, start: RowStart) -> bool:
        """Return whether the sequence's rows are changed."""
        return bool(self._named(lambda: self.inner.applies_to(start)))

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        self._asked = np.zeros(num_rows, np.bool_)
        self._named(lambda: self.inner.allocate(num_rows=num_rows, vocab_size=vocab_size, device=device))

    def start_row(self, start: RowStart) -> None:
        """Pass a sequence to the processor."""
        self._asked[start.row] = False
        tokens = start.token_ids.copy()  # the engine's own
        self._named(lambda: self.inner.start_row(attrs.evolve(start, token_ids=tokens)))
        self._asked[start.row] = self.applies_to(start)

    def apply(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        """Change the rows that use the processor, in place.

        Raises:
            RowsFailedError: Some of them were left without a token.
            StepFailedError: The processor raised, or returned something else than logits.
        """
        index = np.flatnonzero(self._asked[np.asarray(context.rows, dtype=np.intp)])
        if not len(index):
            return logits
        where = torch.as_tensor(index, device=logits.device)
        part_context = self._context(context, index)
        changed = self._named(lambda: self._checked(self.inner.apply(logits[where], part_context), logits[where]))
        wrong = dict(no_finite_maximum(changed.amax(-1)))
        before = dict(no_finite_maximum(logits[where].amax(-1))) if wrong else {}
        logits[where] = changed
        messages = {}
        for i, value in wrong.items():
            logits[int(index[i])] = 0.0
            if i not in before:
                messages[int(index[i])] = f"{self.label} left no token to choose (largest logit: {value})"
        if wrong:
            self._note(ContractError("; ".join(messages.values())))
            raise RowsFailedError(logits, messages)
        return logits

    def commit(self, token_ids: torch.Tensor, context: SamplingContext) -> None:
        """Pass the chosen tokens of its rows to the processor."""
        index = np.flatnonzero(self._asked[np.asarray(context.rows, dtype=np.intp)])
        if len(index):
            part = token_ids[torch.as_tensor(index, device=token_ids.device)]
            self._named(lambda: self.inner.commit(part, self._context(context, index)))

    def snapshot(self, row: int) -> Any:
        """Return a copy of a row's state; None if the processor raises."""
        try:
            return self.inner.snapshot(row)
        except Exception as error:  # it concerns the sequence that had the row, not the one that gets it
            self._note(error)
            return None

    def restore(self, row: int, state: Any) -> None:
        """Restore a row's state from ``snapshot``."""
        if state is not None:
            self._named(lambda: self.inner.restore(row, state))

    def _context(self, context: SamplingContext, index: np.ndarray) -> SamplingContext:
        """Return the rows' sequences, with copies of their histories at the same places."""
        if self._tokens is None or self._tokens.shape != context.tokens.shape:
            self._tokens = torch.zeros_like(context.tokens)
        part = whose(context, index)
        rows = torch.as_tensor(part.histories, device=context.tokens.device)
        width = max(part.positions) + 1
        self._tokens[rows, :width] = context.tokens[rows, :width]
        return attrs.evolve(part, tokens=self._tokens)

    def _checked(self, changed: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        if not isinstance(changed, torch.Tensor):
            raise ContractError(f"apply() returned {type(changed).__name__}, not a tensor")
        if changed.shape != before.shape or changed.dtype != before.dtype or changed.device != before.device:
            got, wanted = (f"{one.dtype} {tuple(one.shape)} on {one.device}" for one in (changed, before))
            raise ContractError(f"apply() returned {got}, not {wanted}")
        return changed

    def _named(self, call: Callable[[], T]) -> T:
        """Call the processor; exceptions name it."""
        try:
            return call()
        except (Exception, SystemExit) as error:
            self._note(error)
            raise StepFailedError(f"{self.label}: {type(error).__name__}: {str(error)[:_MAX_TEXT]}") from error

    def _note(self, error: BaseException) -> None:
        """Log a fault: the first with its traceback, then counts."""
        self._num_faults += 1
        if self._num_faults == 1:
            logger.error(
                "%s failed; the requests that asked for it end with an error, the others go on.",
                self.label,
                exc_info=error,
            )
        elif self._num_faults in (10, 100, 1000, 10_000):
            logger.error("%s failed %d times so far; the last error: %s", self.label, self._num_faults, error)


_MAX_TEXT = 500
"""Characters of an error's text that are repeated."""
