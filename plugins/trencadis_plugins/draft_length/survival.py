"""How likely each draft stands, by sequence and position, from the verdicts so far."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trencadis.records import Int32Array, Int64Array

__all__ = ["Survival"]

_FLAT_PRIOR = 0.5
"""Acceptance of a first draft before anything is known."""

_FLAT_WEIGHT = 4.0
"""Verdicts that this counts for; and so much counts a position's acceptance for that of the next."""

_ALL_KEPT = 0.99
"""Factor by which each verification decays earlier ones, in the acceptance of all sequences."""


class Survival:
    """Moving acceptance of each sequence and position, pulled towards that of all sequences while there are few verdicts.

    ``a = (accepted + w * prior) / (tried + w)``, the mean of a Beta distribution whose counts fade: each verdict takes ``smoothing`` of the older
    ones away. A position's prior is the acceptance of all sequences there, pulled towards that of the position before. The survival
    of draft i is the product of the acceptances up to it.

    Args:
        smoothing: Weight of the newest verdict, above 0 and below 1.
        prior_weight: The number ``w``, above 0.
    """

    def __init__(self, *, smoothing: float = 0.1, prior_weight: float = 2.0) -> None:
        self._kept = 1 - smoothing
        self._weight = prior_weight
        self._accepted = np.zeros((0, 0))
        self._tried = np.zeros((0, 0))
        self._epochs = np.zeros(0, np.int64)
        self._all_accepted = np.zeros(0)
        self._all_tried = np.zeros(0)
        self._prior = np.zeros(0)

    def of(self, slots: Int32Array, epochs: Int64Array, num_positions: int) -> npt.NDArray[np.float64]:
        """Return the survivals, falling along each row, ``[num_sequences, num_positions]``, above 0 and below 1."""
        self._make_room(int(slots.max()) + 1, num_positions)
        self._own(slots, epochs)
        accepted, tried = self._accepted[slots, :num_positions], self._tried[slots, :num_positions]
        accepted += self._weight * self._prior[:num_positions]
        tried += self._weight
        accepted /= tried
        survival: npt.NDArray[np.float64] = np.multiply.accumulate(accepted, axis=1)
        return survival

    def add(
        self,
        slots: Int32Array,
        epochs: Int64Array,
        *,
        num_drafts: Int32Array,
        num_accepted: Int32Array,
        num_steps: int = 1,
    ) -> None:
        """Count verdicts: each draft up to and with the first that fell was tried; nothing is known of those after it.

        Args:
            slots: The sequences.
            epochs: Epochs of the slots.
            num_drafts: Number of drafts of each.
            num_accepted: Number of these drafts that were accepted.
            num_steps: Steps that this one stands for.
        """
        drafted = num_drafts > 0
        if not drafted.any():
            return
        slots, epochs = slots[drafted], epochs[drafted]
        num_drafts, num_accepted = num_drafts[drafted], num_accepted[drafted]
        most = int(num_drafts.max())
        self._make_room(int(slots.max()) + 1, most)
        self._own(slots, epochs)
        positions = np.arange(most)
        tried = positions < np.minimum(num_drafts, num_accepted + 1)[:, None]
        stood = tried & (positions < num_accepted[:, None])
        kept = np.where(tried, self._kept**num_steps, 1.0)
        self._accepted[slots, :most] = self._accepted[slots, :most] * kept + num_steps * stood
        self._tried[slots, :most] = self._tried[slots, :most] * kept + num_steps * tried
        self._add_to_all(num_steps * tried.sum(0), num_steps * stood.sum(0))

    def fade(self, slots: Int32Array, share: float) -> None:
        """Leave ``share`` of the weight of what is known of these sequences: it is old."""
        self._accepted[slots] *= share
        self._tried[slots] *= share

    def forget(self, slot: int) -> None:
        """Drop what is known of a sequence; of a slot that is not known, too."""
        if slot < len(self._epochs):
            self._accepted[slot] = self._tried[slot] = 0.0

    def _add_to_all(self, tried: Int64Array, stood: Int64Array) -> None:
        most = len(tried)
        kept = _ALL_KEPT**tried
        self._all_tried[:most] = self._all_tried[:most] * kept + tried
        self._all_accepted[:most] = self._all_accepted[:most] * kept + stood
        self._set_prior()

    def _set_prior(self) -> None:
        before = _FLAT_PRIOR
        for i, (accepted, tried) in enumerate(zip(self._all_accepted.tolist(), self._all_tried.tolist(), strict=True)):
            self._prior[i] = before = (accepted + _FLAT_WEIGHT * before) / (tried + _FLAT_WEIGHT)

    def _own(self, slots: Int32Array, epochs: Int64Array) -> None:
        """Forget whoever held a slot before."""
        others = self._epochs[slots] != epochs
        if others.any():
            fresh = slots[others]
            self._accepted[fresh] = self._tried[fresh] = 0.0
            self._epochs[fresh] = epochs[others]

    def _make_room(self, num_slots: int, num_positions: int) -> None:
        has_slots, has_positions = self._tried.shape
        if num_slots <= has_slots and num_positions <= has_positions:
            return
        more_slots, more = max(2 * num_slots - has_slots, 0), max(num_positions - has_positions, 0)
        if num_slots <= has_slots:
            more_slots = 0
        self._accepted = np.pad(self._accepted, ((0, more_slots), (0, more)))
        self._tried = np.pad(self._tried, ((0, more_slots), (0, more)))
        self._epochs = np.pad(self._epochs, (0, more_slots), constant_values=-1)
        self._all_accepted = np.pad(self._all_accepted, (0, more))
        self._all_tried = np.pad(self._all_tried, (0, more))
        self._prior = np.pad(self._prior, (0, more))
        self._set_prior()
