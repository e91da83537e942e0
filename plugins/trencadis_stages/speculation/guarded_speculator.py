"""The speculator, guarded: its drafts are legal, and its fallback gets what it had."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np

from trencadis.engine.guard import Guarded
from trencadis.errors import ContractError
from trencadis.faults import CallMeter, Fallback, reraise_interrupt, shown
from trencadis.interfaces import DraftView, Speculator
from trencadis.interfaces.laws import legal
from trencadis.records import BucketLimits, Drafts

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
        label: See :class:`Guarded`.
        strategy: The chosen one.
        make_fallback: See :class:`Guarded`.
        vocab_size: Vocabulary size of the model that is drafted for: the device looks up every draft.
        meter: See :class:`Guarded`.

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
        super().__init__(Speculator, label, strategy, make_fallback, meter=meter, ends_if_slow=True)
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

    def _put_back(self, label: str, strategy: Speculator, fallback: Fallback[Speculator]) -> None:
        with contextlib.suppress(Exception, SystemExit):  # its successor needs the room, and nothing else of it
            self.strategy.close()
        super()._put_back(label, strategy, fallback)
        self._introduce(strategy)

    def _introduce(self, fallback: Speculator) -> None:
        check_numbers(self.label, fallback)
        if fallback.kv_bytes_per_token > self._kv_bytes:
            raise ContractError(
                f"it keeps {fallback.kv_bytes_per_token} bytes for each token, and room was made for {self._kv_bytes}"
            )
        self._most_now = min(self._most, fallback.max_draft_tokens)
        if self._limits is not None:
            fallback.allocate(self._limits)

    def _check_propose(self, drafts: Drafts, args: tuple[DraftView], _: Mapping[str, Any]) -> Drafts:
        """Return drafts of tokens that the model knows, linear ones where no trees were announced."""
        tokens = drafts.token_ids
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab_size:
            raise ContractError(f"it drafted tokens {shown(tokens)}, the model knows 0 to {self._vocab_size - 1}")
        if drafts.parents is not None and not self.drafts_trees:
            (view,) = args
            legal(Speculator.propose, drafts, attrs.evolve(view, linear_only=np.ones(len(view.slots), np.bool_)))
        return drafts
