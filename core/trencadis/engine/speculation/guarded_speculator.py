"""A speculator, guarded: what it returns is checked, and who takes its place keeps within what was made room for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np

from trencadis.engine.guards import Guarded
from trencadis.errors import ContractError
from trencadis.faults import CallMeter, reraise_interrupt
from trencadis.interfaces import DraftView, Speculator
from trencadis.records import BucketLimits, Drafts
from trencadis.wording import shown

__all__ = ["GuardedSpeculator", "check_numbers"]


def check_numbers(label: str, speculator: Speculator) -> None:
    """Refuse a speculator whose numbers are none to reckon with: room is made by them.

    Args:
        label: Names it in messages.
        speculator: Any.

    Raises:
        ContractError: ``max_draft_tokens`` or ``kv_bytes_per_token`` is no whole number, or too small.
    """
    for name, least in (("max_draft_tokens", 1), ("kv_bytes_per_token", 0)):
        number = getattr(speculator, name)
        if type(number) is not int or number < least:
            raise ContractError(
                f"{label} has {name} = {shown(number)}, which must be a whole number from {least} on.",
                hint="Mend the speculator, or choose another in speculation.name.",
            )


class GuardedSpeculator(Guarded[Speculator]):
    """A speculator whose drafts are legal.

    Args:
        label: As of :class:`Guarded`.
        strategy: The chosen one.
        make_fallback: As of :class:`Guarded`.
        vocab_size: Of the model that is drafted for: the device reads the embedding of every draft.
        meter: As of :class:`Guarded`.

    Attributes:
        drafts_trees: The chosen one may draft trees: no other may if it does not.

    Raises:
        ContractError: A number of the chosen one is none.
    """

    def __init__(
        self,
        label: str,
        strategy: Speculator,
        make_fallback: Callable[[], Speculator] | None = None,
        *,
        vocab_size: int = 1 << 31,
        meter: CallMeter | None = None,
    ) -> None:
        super().__init__(label, strategy, make_fallback, meter=meter, ends_if_slow=True)
        check_numbers(label, strategy)
        self._vocab_size = vocab_size
        self.drafts_trees = strategy.drafts_trees
        self._most = self._most_now = strategy.max_draft_tokens
        self._kv_bytes = strategy.kv_bytes_per_token
        self._limits: BucketLimits | None = None

    @property
    def max_draft_tokens(self) -> int:
        """The most drafts of a sequence in a step; no more than those of the chosen speculator, which room was made for."""
        return self._most_now

    def allocate(self, limits: BucketLimits) -> None:
        """Tell the chosen speculator the engine's sizes; what it raises ends the start."""
        self._limits = limits
        self.strategy.allocate(limits)

    def propose(self, view: DraftView) -> Drafts:
        """Return legal drafts."""
        return self.guarded(
            "propose", lambda speculator: speculator.propose(view), lambda drafts: self._fault(drafts, view)
        )

    def tell(self, method: str, tell: Callable[[Speculator], None]) -> None:
        """Tell the speculator something."""
        self.guarded(method, tell)

    def quarantine(self, cause: BaseException) -> None:
        """Put the fallback in place: it gets the sizes, and frees the device of its predecessor's."""
        broken = self.strategy
        super().quarantine(cause)
        with contextlib.suppress(Exception, SystemExit):  # it is broken already; the cause is logged
            broken.close()
        try:
            self._introduce(self.strategy)
        except BaseException as error:
            reraise_interrupt(error)
            self.quarantine(error)

    def _introduce(self, fallback: Speculator) -> None:
        check_numbers(self.label, fallback)
        if fallback.kv_bytes_per_token > self._kv_bytes:
            raise ContractError(
                f"it keeps {fallback.kv_bytes_per_token} bytes for each token, and room was made for {self._kv_bytes}"
            )
        self._most_now = min(self._most, fallback.max_draft_tokens)
        if self._limits is not None:
            fallback.allocate(self._limits)

    def _fault(self, drafts: Drafts, view: DraftView) -> str:
        """Return what is wrong with drafts: more than allowed, or others than were announced."""
        counts, most = drafts.num_drafts, view.max_draft_tokens
        columns = [counts, drafts.token_ids, *([] if drafts.parents is None else [drafts.parents])]
        columns += [] if drafts.laws is None else [drafts.laws.rows]
        if any(column.ndim != 1 or column.dtype.kind != "i" for column in columns):
            return f"its drafts are no arrays of whole numbers: {', '.join(map(shown, columns))}"
        if any(len(column) != len(drafts.token_ids) for column in columns[1:]):
            return f"its drafts have columns of {', '.join(str(len(column)) for column in columns[1:])} rows"
        if (
            len(counts) != len(most)
            or ((counts < 0) | (counts > most)).any()
            or len(drafts.token_ids) != int(counts.sum())
        ):
            return f"it drafted {shown(counts)}, allowed are {shown(most)}"
        tokens = drafts.token_ids
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab_size:
            return f"it drafted tokens {shown(tokens)}, the model knows 0 to {self._vocab_size - 1}"
        if drafts.laws is not None and len(tokens):
            rows, shape = drafts.laws.rows, tuple(drafts.laws.probabilities.shape)
            if len(shape) != 2 or int(rows.min()) < -1 or int(rows.max()) >= shape[0]:
                return f"it drew drafts by the rows {shown(rows)} of probabilities of the shape {shown(shape)}"
        if drafts.parents is None:
            return ""
        ends = np.cumsum(counts)
        within = np.arange(len(drafts.parents)) - np.repeat(ends - counts, counts)
        branches = drafts.parents != within - 1
        may_not = np.repeat(view.linear_only, counts) if self.drafts_trees else True
        if (branches & may_not).any():
            return "it drafted a tree where drafts must be linear"
        if (drafts.parents < -1).any() or (drafts.parents >= within).any():
            return "it drafted a tree in which a draft comes before its parent"
        return ""
