"""The number of drafts that gives the most tokens a second, which may be none.

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
"""Steps without drafts before each trial, and one more at the start: what a step costs without them is what all else is compared with."""

_PLAIN_STEPS = 256
"""Where drafts pay, steps after which as many go without them again: contexts grow, and steps with them."""

_NUM_TRIAL_STEPS = 3
"""Steps of a trial, all with drafts of one length; the first also computes what the speculator has missed, and tells no time."""

_NUM_FIRST_STEPS = 64
"""Steps of the first trial: who asked for drafts gets them until enough was measured on a machine that may be busy."""

_FIRST_LENGTH = 2
"""Drafts of its first steps; then twice as many, and so on, for longer ones may be dear."""

_LONGER_AT = (56, 48, 40)
"""Steps that are left of it when they become twice as long."""

_NUM_LONGER_STEPS = 2
"""Steps with twice as many drafts, now and then where drafts pay: the curve of times may bend behind the longest that were measured."""

_DOUBLES = 3
"""One trial of so many has twice as many drafts as seem best."""

_HOPELESS = 0.75
"""A trial ends early where it gives less than so much of the tokens a second without drafts; the first one at _LONGER_AT alone."""

_FIRST_PAUSE = 16
"""Steps until the first trial after drafts stopped paying; each that fails doubles them: to have stopped may have been a mistake."""

_NUM_LOSING = 4
"""Steps in a row in which drafts must seem not to pay before there are none."""

_STANDS = 3
"""Steps for which lengths stand that pay clearly: to choose and to learn costs a tenth of a small model's step."""

_CLEAR = 1.15
"""Tokens per second by those without drafts from which that is clear."""

_LONGEST_PAUSE = 4
"""Trials are never further apart than so many times the configured steps: the pause follows from times that may have been noise."""

_STEP_BASE = 32.0
"""Until measured: a step of 32 tokens takes twice as long as reading the weights does."""

_NOTHING = np.zeros(0)
_NOBODY = np.zeros(0, np.int32)

_TRIAL_SHARE = 0.01
_LEAST_LOSS = 0.1
"""A trial is taken to lose at least so much of its extra time, whatever it promises."""
_SAVED_SHARE = 0.01
"""Shorter drafts are tried where making them takes so much less of a step."""
_OLD_SHARE = 0.25
"""Weight of a sequence's old verifications when it is tried again."""
_SURE = 0.99
"""From this share of drafts on that are there when they are asked for, all are taken to be."""
_MADE_KEPT = 0.95
"""Factor by which each step decays earlier ones in the share of drafts that are there when they are asked for."""


class Goodput(DraftLength):
    """Maximises tokens per second over the number of drafts.

    With ``n`` drafts in a step the best ones are those with the largest survival. A ragged pass costs by its tokens: every ``n`` is
    tried. A padded one costs by its bucket, in which all sequences have the length of the longest: lengths are tried, and drafts
    fill what is paid for.

    Acceptance and times are learned as the engine runs; a draft that was asked for and is not there counts as one that fell, and as no
    token to verify. Where nothing is drafted, the best choice but that is tried now and then, or one twice as long: what was measured
    of it may have been noise. Between trials it rests. In trees
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
        self._made = np.zeros((2, 0))  # drafts that were there, and asked for, by place
        self._num_steps = 0
        self._last_trial = self._last_plain = 0
        self._num_plain = 1 + _NUM_PLAIN_STEPS  # steps without drafts, whatever they would bring
        self._num_trials = _NUM_FIRST_STEPS  # steps that the trial goes on for
        self._tried = _FIRST_LENGTH  # its drafts of each sequence, at most
        self._is_first = True
        self._num_tried = 0  # trials
        self._drafts = False
        self._num_losing = 0
        self._since = 0  # when drafts began to pay, or ceased to
        self._pause = _FIRST_PAUSE
        self._due = 0  # step of the next trial
        self._is_tried = True  # the next trial has no date yet
        self._rest = 0
        self._slots, self._chosen = _NOBODY, _NOBODY
        self._missed = True  # the speculator may have more to compute than what is new in a step

    def choose(self, view: LengthView) -> Int32Array:
        """Return the lengths with the most tokens per second."""
        self._num_steps += 1
        self._rest = 0
        most, longest = view.max_draft_tokens, int(view.max_draft_tokens.max())
        if self._num_plain or self._num_steps < self._due:
            if self._num_plain:
                self._num_plain -= 1
            return self._without_drafts(view)
        survival = self._survival.of(view.slots, view.epochs, longest)
        made = self._made_of(longest)
        times = self._step_s.at(self._positions(view, longest))
        drafting_s = self._drafting_s(longest)
        if view.pads or len(most) == 1:  # one sequence that is longer is one draft more
            taken = times + drafting_s
            if made[-1] < _SURE:
                taken[1:] -= np.cumsum((1 - made) ** len(most) * np.diff(times))
            chosen, rate = _best_length(view, survival, taken)
        else:
            chosen, rate = _best_drafts(view, survival, times, drafting_s, made)
        plain = view.num_running / float(times[0])
        self._judge(rate / plain)
        if not self._drafts:
            self._last_plain = self._num_steps
        elif self._num_steps - self._last_plain >= _PLAIN_STEPS:
            self._num_plain = _NUM_PLAIN_STEPS
        if self._drafts and not self._num_trials and self._is_time_for_longer(chosen, view):
            self._num_trials, self._tried = _NUM_LONGER_STEPS, 2 * int(chosen.max())
        if self._drafts and not self._num_trials:
            self._rest = _STANDS if rate > _CLEAR * plain else 0
            return self._asking(view, self._with_trials(chosen, view, times))
        if not self._num_trials and not self._is_trial_due(chosen, rate / plain, view, times):
            return self._without_drafts(view)
        return self._asking(view, self._trial(chosen, rate / plain, view))

    def rest(self) -> int:
        """Return for how many steps the choice stands."""
        self._num_steps += self._rest
        return self._rest

    def on_verified(self, step: VerifiedStep) -> None:
        """Learn from a step."""
        asked = self._asked_of(step)
        if asked.any():
            self._survival.add(
                step.slots,
                step.epochs,
                num_drafts=asked,
                num_accepted=step.num_accepted,
                num_steps=1 + self._rest,
            )
            self._count_made(asked, step.num_drafts)
            if not self._missed:
                self._drafting = _NOTHING
                self._draft_s.add(int(asked.max()), step.draft_s)
        if not step.num_prefill_tokens:
            self._step_s.add(step.num_tokens, step.step_s)
        self._missed = not asked.any()
        self._slots = self._chosen = _NOBODY

    def on_finished(self, *, slot: int) -> None:
        """Forget the sequence."""
        self._survival.forget(slot)

    # ------------------------------------------------------------------------------------------------- innards

    def _judge(self, gain: float) -> None:
        """Decide whether drafts pay, from the tokens per second with the best number of them by those without."""
        if not self._drafts:
            if gain > 1.0 + self._config.margin_ratio:
                self._drafts, self._since, self._num_losing = True, self._num_steps, 0
            return
        self._num_losing = 0 if gain > 1.0 else self._num_losing + 1
        if self._num_losing < _NUM_LOSING:
            return
        if self._num_steps - self._since >= self._config.probe_steps:
            self._pause = _FIRST_PAUSE
        self._drafts, self._is_tried = False, True
        self._since = self._num_steps

    def _without_drafts(self, view: LengthView) -> Int32Array:
        """Return no drafts, until a few steps before the next trial: they measure what a step without drafts takes."""
        self._last_plain = self._num_steps
        self._rest = max(0, self._due - self._num_steps - 1 - _NUM_PLAIN_STEPS)
        return self._asking(view, np.zeros(len(view.slots), np.int32))

    def _positions(self, view: LengthView, longest: int) -> Int64Array:
        """Return the token positions of a pass, from no drafts on: by the length of all in a padded one, else by their number."""
        if not view.pads:
            return np.arange(view.num_running, view.num_running + int(view.max_draft_tokens.sum()) + 1)
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

    def _made_of(self, longest: int) -> npt.NDArray[np.float64]:
        """Return how often there is a draft at each place where one is asked for, above 0 and at most 1, falling."""
        known = self._made.shape[1]
        if longest > known:
            self._made = np.pad(self._made, ((0, 0), (0, longest - known)))
        found, asked = self._made[:, :longest]
        share: npt.NDArray[np.float64] = np.minimum.accumulate((found + 1) / (asked + 1))
        return share

    def _count_made(self, asked: Int32Array, num_drafts: Int32Array) -> None:
        places = np.arange(max(int(asked.max()), self._made.shape[1]))
        self._made_of(len(places))
        wanted = (places < asked[:, None]).sum(0)
        self._made *= np.where(wanted > 0, _MADE_KEPT, 1.0)
        self._made += (places < np.minimum(num_drafts, asked)[:, None]).sum(0), wanted

    def _asked_of(self, step: VerifiedStep) -> Int32Array:
        """Return how many drafts were asked for of each sequence of a step."""
        chosen = self._chosen
        if self._slots.tobytes() != step.slots.tobytes():
            known = dict(zip(self._slots.tolist(), chosen.tolist(), strict=True))
            chosen = np.array([known.get(slot, 0) for slot in step.slots.tolist()], np.int32)
        return np.maximum(chosen, step.num_drafts)

    def _with_trials(self, chosen: Int32Array, view: LengthView, times: npt.NDArray[np.float64]) -> Int32Array:
        """Return the lengths with one draft for those that have none beside others that have, if it is time to try."""
        idle = chosen == 0
        if not idle.any():
            return chosen
        place, drafting_s = (1, 0.0) if view.pads else (int(idle.sum()), float(self._drafting_s(1)[1]))
        extra = (float(times[place]) + drafting_s) / float(times[0]) - 1
        if not self._is_time(extra / _TRIAL_SHARE):
            return chosen
        self._rest = 0
        self._survival.fade(view.slots[idle], _OLD_SHARE)
        self._last_trial = self._num_steps
        return np.where(idle, 1, chosen).astype(np.int32)

    def _is_trial_due(self, chosen: Int32Array, gain: float, view: LengthView, times: npt.NDArray[np.float64]) -> bool:
        """Begin a trial where drafts do not pay, or say when the next one begins; returns whether this is one.

        Args:
            chosen: The best lengths but no drafts.
            gain: Their tokens per second by those without drafts.
            view: The sequences.
            times: Durations of steps.
        """
        if self._is_tried:
            total = int(chosen.max()) if view.pads else int(chosen.sum())
            taken = (float(times[total]) + float(self._drafting_s(int(chosen.max()))[-1])) / float(times[0])
            loss = max(taken * (1 - gain), _LEAST_LOSS * (taken - 1))
            steps = self._config.probe_steps
            affordable = max(steps, min(_NUM_TRIAL_STEPS * loss / _TRIAL_SHARE, _LONGEST_PAUSE * steps))
            self._due = self._num_steps + int(min(self._pause, affordable))
            self._pause = min(2 * self._pause, _LONGEST_PAUSE * steps)
            self._is_tried = False
            return False
        self._survival.fade(view.slots, _OLD_SHARE)
        self._num_tried += 1
        times_as_long = 1 if self._num_tried % _DOUBLES else 2
        self._num_trials, self._tried = _NUM_TRIAL_STEPS, times_as_long * int(chosen.max())
        return True

    def _trial(self, chosen: Int32Array, gain: float, view: LengthView) -> Int32Array:
        """Return the lengths of a step of a trial."""
        self._num_trials -= 1
        self._last_trial, self._is_tried = self._num_steps, True
        is_told = not self._is_first or self._num_trials in _LONGER_AT
        if is_told and gain < _HOPELESS:
            self._num_trials = min(self._num_trials, 1)
        elif is_told and self._is_first:
            self._tried *= 2
        self._is_first = self._is_first and self._num_trials > 0
        if view.pads or len(chosen) == 1:
            length = min(self._tried, max(2 * int(chosen.max()), _FIRST_LENGTH))
            return np.minimum(view.max_draft_tokens, length).astype(np.int32)
        return chosen

    def _is_time_for_longer(self, chosen: Int32Array, view: LengthView) -> bool:
        """Return whether it is time to try longer drafts than the best, where all have one length."""
        is_longest = int(chosen.max()) >= int(view.max_draft_tokens.max())
        return not is_longest and (view.pads or len(chosen) == 1) and self._is_time(0)

    def _is_time(self, pause: float) -> bool:
        """Return whether so many steps, and those that are configured, went by since the last trial."""
        return self._num_steps - self._last_trial >= max(self._config.probe_steps, pause)

    def _asking(self, view: LengthView, chosen: Int32Array) -> Int32Array:
        self._slots, self._chosen = view.slots, chosen
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
    made: npt.NDArray[np.float64],
) -> tuple[Int32Array, float]:
    """Return how many drafts of each sequence are among the best ones, and the tokens per second. Pure.

    The step takes as long as one with the drafts that will be there: ``made`` says how often there is one at each place. The time to draft is that of the longest: a deep draft that is likely may cost more than it brings, so that those up to each depth are
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
        there = np.cumsum(made[drafts % longest])
        rates = tokens / (np.interp(there, np.arange(len(times)), times) + drafting_s[asked])
        best = int(rates.argmax())
        if rates[best] > best_rate:
            chosen, best_rate = drafts[: best + 1], float(rates[best])
    return np.bincount(chosen // longest, minlength=len(survival)).astype(np.int32), best_rate
