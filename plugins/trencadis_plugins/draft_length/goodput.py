"""As many drafts as give the most tokens a second, and none where that is the most.

survival of each draft ─┐
time by step size ──────┼─▶ (sequences + drafts that survive) / (time to draft + time to verify) ─ largest ─▶ lengths
time to draft ──────────┘
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trencadis.interfaces import DraftLength, LengthView, VerifiedStep
from trencadis.records import Int32Array, Int64Array
from trencadis_plugins.draft_length.config import GoodputConfig
from trencadis_plugins.draft_length.survival import Survival
from trencadis_plugins.draft_length.time_curve import TimeCurve

__all__ = ["Goodput"]

_NUM_PLAIN_STEPS = 2
"""First steps without drafts: what a step costs without them is what all else is compared with."""

_STEP_BASE = 32.0
"""Until measured: a step of 32 tokens takes twice as long as reading the weights does."""

_NOTHING = np.zeros(0)

_PROBE_SHARE = 0.01
_RETRY_SHARE = 0.005
_MAX_RETRIES = 4
_SAVED_SHARE = 0.01
"""Shorter drafts are tried where making them takes so much less of a step."""
_OLD_SHARE = 0.25
"""Weight of a sequence's old verifications when it is tried again."""


class Goodput(DraftLength):
    """Maximises tokens per second over the number of drafts.

    With ``n`` drafts in a step the best ones are those with the largest survival. A ragged pass costs by its tokens: every ``n`` is
    tried. A padded one costs by its bucket, in which all sequences have the length of the longest: lengths are tried, and drafts
    fill what is paid for.

    Acceptance and times are learned as the engine runs. Where nothing is drafted, a single draft is tried now and then. In trees
    drafts of one depth share a fate; here they are counted as a chain, which is too careful: choose ``fixed`` for them.

    Source: the objective is that of SmartSpec (2406.14066); that only ends of buckets can be best follows from survivals
    falling along a draft and times being constant in a bucket.

    Args:
        config: How fast it learns.
    """

    def __init__(self, config: GoodputConfig | None = None) -> None:
        self._config = config or GoodputConfig()
        self._survival = Survival(smoothing=self._config.smoothing, prior_weight=self._config.prior_weight)
        self._step_s = TimeCurve(base=_STEP_BASE)
        self._draft_s = TimeCurve(base=0.0)
        self._drafting = _NOTHING
        self._buckets: dict[tuple[int, int], Int64Array] = {}
        self._num_steps = 0
        self._last_probe = 0
        self._drafts = False
        self._probes = False
        self._retries = False
        self._num_retries = 0
        self._asked = 0

    def choose(self, view: LengthView) -> Int32Array:
        """Return the lengths with the most tokens per second."""
        self._num_steps += 1
        most, longest = view.max_draft_tokens, int(view.max_draft_tokens.max())
        survival = self._survival.of(view.slots, view.epochs, longest)
        if self._num_steps <= _NUM_PLAIN_STEPS:
            return self._asking(np.zeros(len(most), np.int32))
        by_length = view.pads or len(most) == 1  # one sequence that is longer is one draft more
        times = self._times(view, longest, by_length=by_length)
        if by_length:
            chosen, rate = _best_length(view, survival, times)
        else:
            chosen, rate = _best_drafts(view, survival, times, self._drafting_s(longest))
        plain = view.num_running / float(times[0])
        self._drafts = rate > plain * (1.0 if self._drafts else 1.0 + self._config.margin_ratio)
        if not self._drafts:
            chosen = np.zeros(len(most), np.int32)
        return self._asking(self._with_probes(chosen, view, times))

    def on_verified(self, step: VerifiedStep) -> None:
        """Learn from a step."""
        self._survival.add(step.slots, step.epochs, num_drafts=step.num_drafts, num_accepted=step.num_accepted)
        if not step.num_prefill_tokens:
            self._step_s.add(step.num_tokens, step.step_s)
        if self._asked:
            self._drafting = _NOTHING
            self._draft_s.add(self._asked, step.draft_s)
        if self._probes:
            num_drafts = int(step.num_drafts.sum())
            # A trial that succeeds is repeated at once; so is one for which there was no draft, if asking costs next to nothing.
            cheap = step.draft_s <= _RETRY_SHARE * step.step_s
            succeeded = 2 * int(step.num_accepted.sum()) >= num_drafts and self._num_retries < _MAX_RETRIES
            self._retries = succeeded if num_drafts else cheap
            self._num_retries += num_drafts > 0
        self._asked, self._probes = 0, False

    def on_finished(self, *, slot: int) -> None:
        """Forget the sequence."""
        self._survival.forget(slot)

    # ------------------------------------------------------------------------------------------------- innards

    def _times(self, view: LengthView, longest: int, *, by_length: bool) -> npt.NDArray[np.float64]:
        """Return what a step takes, from 0 on: by the length of all drafts, making them counted in; else by their number."""
        if not by_length:
            total = int(view.max_draft_tokens.sum())
            return self._step_s.at(np.arange(view.num_running, view.num_running + total + 1))
        return self._step_s.at(self._positions(view, longest)) + self._drafting_s(longest)

    def _positions(self, view: LengthView, longest: int) -> Int64Array:
        """Return the token positions of a pass by the length of its drafts, from 0 on."""
        if not view.pads:
            return np.arange(view.num_running, view.num_running + longest + 1)
        key = view.num_running, longest
        found = self._buckets.get(key)
        if found is None:
            positions = [view.padded_tokens(view.num_running, 1 + length) for length in range(longest + 1)]
            found = self._buckets[key] = np.array(positions, np.int64)
        return found

    def _drafting_s(self, longest: int) -> npt.NDArray[np.float64]:
        """Return what it takes to make drafts of each length, from 0 on; 0 until it is known."""
        if not (self._draft_s.is_known and self._step_s.is_known):
            return np.zeros(longest + 1)
        if len(self._drafting) != longest + 1:
            self._drafting = self._draft_s.at(np.arange(longest + 1))
        return self._drafting

    def _with_probes(self, chosen: Int32Array, view: LengthView, times: npt.NDArray[np.float64]) -> Int32Array:
        """Return the lengths with one draft for those that have none, if it is time to try."""
        idle = chosen == 0
        if not idle.any():
            self._last_probe = self._num_steps
            return chosen
        waited = self._num_steps - self._last_probe
        if not self._retries and (waited < self._config.probe_steps or waited < self._pause(view, times, idle)):
            return chosen
        if not self._retries:
            self._num_retries = 0
            self._survival.fade(view.slots[idle], _OLD_SHARE)
        self._last_probe, self._probes, self._retries = self._num_steps, not self._drafts, False
        return np.where(idle, 1, chosen).astype(np.int32)

    def _pause(self, view: LengthView, times: npt.NDArray[np.float64], idle: npt.NDArray[np.bool_]) -> float:
        """Return the steps after which a trial is at most 1 % of all time."""
        by_length = view.pads or len(idle) == 1
        place, drafting_s = (1, 0.0) if by_length else (int(idle.sum()), float(self._drafting_s(1)[1]))
        extra = (float(times[place]) + drafting_s) / float(times[0]) - 1
        return extra / _PROBE_SHARE

    def _asking(self, chosen: Int32Array) -> Int32Array:
        self._asked = int(chosen.max())
        return chosen


def _best_length(
    view: LengthView, survival: npt.NDArray[np.float64], times: npt.NDArray[np.float64]
) -> tuple[Int32Array, float]:
    """Return the best length of all drafts of a padded pass, and its tokens per second. Pure."""
    most, longest = view.max_draft_tokens, survival.shape[1]
    if len(most) > 1:
        survival = (survival * (np.arange(longest) < most[:, None])).sum(0)
    tokens = survival.cumsum()
    tokens += view.num_running
    rates = tokens / times[1:]
    best = int(rates.argmax())
    return np.minimum(most, best + 1).astype(np.int32), float(rates[best])


def _best_drafts(
    view: LengthView,
    survival: npt.NDArray[np.float64],
    times: npt.NDArray[np.float64],
    drafting_s: npt.NDArray[np.float64],
) -> tuple[Int32Array, float]:
    """Return how many drafts of each sequence are among the best ones, and the tokens per second. Pure.

    The time to draft is that of the longest: a deep draft that is likely may cost more than it brings, so that those up to each depth are
    tried where leaving out the deeper ones saves anything.
    """
    longest = survival.shape[1]
    if int(view.max_draft_tokens.min()) < longest:
        survival = np.where(np.arange(longest) < view.max_draft_tokens[:, None], survival, 0.0)
    flat = survival.ravel()
    # Stable: of two drafts that are equally likely the one in front comes first, so that no draft is chosen without those before it.
    order = np.argsort(-flat, kind="stable")[: len(times) - 1]
    depths = order % longest + 1
    chosen, best_rate = order[:0], 0.0
    for deepest in range(1, longest + 1):
        if deepest < longest and drafting_s[longest] - drafting_s[deepest] <= _SAVED_SHARE * times[0]:
            continue
        drafts = order[depths <= deepest]
        tokens = view.num_running + np.cumsum(flat[drafts])
        asked = np.maximum.accumulate(depths[depths <= deepest])
        rates = tokens / (times[1 : len(drafts) + 1] + drafting_s[asked])
        best = int(rates.argmax())
        if rates[best] > best_rate:
            chosen, best_rate = drafts[: best + 1], float(rates[best])
    return np.bincount(chosen // longest, minlength=len(survival)).astype(np.int32), best_rate
