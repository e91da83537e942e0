"""A table fitted to a recorded workload: few buckets, placed at the most frequent shapes.

The time that a set of buckets saves, against running everything in the largest, is monotone and submodular: each point
runs in the fastest chosen bucket that covers it. So the greedy choice saves at least 1 - 1/e of what the best set of that
many buckets would. Where memory is the limit, time saved by byte is tried too, and the better of both is kept.
Swaps of one bucket against another follow while they help. Where a phase varies in one dimension only, its buckets are
replaced by the optimal ones of that number.

Source: Nemhauser, Wolsey and Fisher, An analysis of approximations for maximizing submodular set functions, 1978.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np

from trencadis.errors import ConfigValueError
from trencadis.records import Bucket, BucketLimits, FloatArray
from trencadis_gallery.bucketing.fitted_problem import Problem, decode_problem, prefill_problem
from trencadis_gallery.bucketing.fitted_sizes import optimal_sizes
from trencadis_gallery.bucketing.workloads.workload import read_source
from trencadis_gallery.config import FittedConfig
from trencadis_plugins.bucketing.strategy import TableStrategy

__all__ = ["Budget", "Fitted", "choose", "time_s"]


_MAX_SWAPS = 200
_LEAST_GAIN = 1e-9
"""Below this share of the whole time a gain is rounding."""


@attrs.frozen
class Budget:
    """Cost limits for the buckets of all phases together.

    Attributes:
        max_graphs: Most buckets; None for any number.
        max_bytes: Most memory; None for any.
    """

    max_graphs: int | None
    max_bytes: float | None

    def allows(self, num_graphs: int, num_bytes: float) -> bool:
        """Return whether so much is within the budget. Pure."""
        return (self.max_graphs is None or num_graphs <= self.max_graphs) and (
            self.max_bytes is None or num_bytes <= self.max_bytes
        )


def choose(problems: Sequence[Problem], budget: Budget) -> list[list[Bucket]]:
    """Return the buckets to prepare for each problem, those that must exist among them. Pure, deterministic.

    Args:
        problems: Phases that share the budget, which those buckets that must exist fit into.
        budget: Cost that all chosen buckets may have together.
    """
    trials = [_Choice(problems, budget) for _ in range(1 if budget.max_bytes is None else 2)]
    for trial, by_byte in zip(trials, (False, True), strict=False):
        trial.grow(by_byte=by_byte)
        trial.swap()
        trial.straighten()
    best = min(trials, key=lambda trial: trial.time_s)
    return [
        [problem.candidates[index] for index in chosen] for problem, chosen in zip(problems, best.chosen, strict=True)
    ]


def time_s(problem: Problem, chosen: Sequence[int]) -> float:
    """Return the time of all points of a problem, each in the fastest chosen candidate that covers it, seconds. Pure."""
    return float(problem.weights @ _fastest(problem, chosen))


def _fastest(problem: Problem, chosen: Sequence[int]) -> FloatArray:
    rows = list(chosen)
    times = np.where(problem.covers[rows], problem.times[rows, None], np.inf)
    fastest: FloatArray = times.min(axis=0)
    return fastest


class _Choice:
    """A growing choice."""

    def __init__(self, problems: Sequence[Problem], budget: Budget) -> None:
        self._problems = problems
        self._budget = budget
        self.chosen = [list(range(problem.num_tops)) for problem in problems]
        self._least = _LEAST_GAIN * self.time_s

    @property
    def time_s(self) -> float:
        return sum(time_s(problem, chosen) for problem, chosen in zip(self._problems, self.chosen, strict=True))

    def _cost(self) -> tuple[int, float]:
        num_bytes = sum(
            float(problem.bytes[chosen].sum()) for problem, chosen in zip(self._problems, self.chosen, strict=True)
        )
        return sum(map(len, self.chosen)), num_bytes

    def grow(self, *, by_byte: bool) -> None:
        """Add the candidate that saves most, again and again, until the budget or what can be saved is used up."""
        gains = [self._gains(index, self.chosen[index]) for index in range(len(self._problems))]
        while True:
            picked = self._pick(gains, *self._cost(), by_byte=by_byte)
            if picked is None:
                return
            index, candidate, _ = picked
            self.chosen[index].append(candidate)
            gains[index] = self._gains(index, self.chosen[index])

    def _gains(self, index: int, chosen: Sequence[int]) -> FloatArray:
        """Return the seconds that each candidate of a problem would save beside those chosen."""
        problem = self._problems[index]
        saved = np.maximum(_fastest(problem, chosen)[None, :] - problem.times[:, None], 0.0)
        gains: FloatArray = np.where(problem.covers, saved, 0.0) @ problem.weights
        return gains

    def _pick(
        self, gains: Sequence[FloatArray], num_graphs: int, num_bytes: float, *, by_byte: bool = False
    ) -> tuple[int, int, float] | None:
        """Return problem, candidate and gain of the best affordable candidate; None if none saves anything."""
        best: tuple[int, int, float] | None = None
        most = 0.0
        for index, (problem, gain) in enumerate(zip(self._problems, gains, strict=True)):
            if not self._budget.allows(num_graphs + 1, num_bytes):
                break
            affordable = gain > self._least
            if self._budget.max_bytes is not None:
                affordable &= num_bytes + problem.bytes <= self._budget.max_bytes
            worth = np.where(affordable, gain / problem.bytes if by_byte else gain, 0.0)
            place = int(worth.argmax())
            if worth[place] > most:
                best, most = (index, place, float(gain[place])), float(worth[place])
        return best

    def swap(self) -> None:
        """Exchange one chosen candidate for another while that saves time."""
        for _ in range(_MAX_SWAPS):
            if not self._swap_one():
                return

    def _swap_one(self) -> bool:
        gains = [self._gains(index, self.chosen[index]) for index in range(len(self._problems))]
        num_graphs, num_bytes = self._cost()
        for index, problem in enumerate(self._problems):
            now_s = time_s(problem, self.chosen[index])
            for candidate in self.chosen[index][problem.num_tops :]:
                rest = [item for item in self.chosen[index] if item != candidate]
                lost_s = time_s(problem, rest) - now_s
                others = [*gains[:index], self._gains(index, rest), *gains[index + 1 :]]
                picked = self._pick(others, num_graphs - 1, num_bytes - float(problem.bytes[candidate]))
                if picked is not None and picked[2] > lost_s + self._least:
                    self.chosen[index] = rest
                    self.chosen[picked[0]].append(picked[1])
                    return True
        return False

    def straighten(self) -> None:
        """Replace the choice of each problem in one dimension by the optimum, where that is affordable."""
        for index, problem in enumerate(self._problems):
            if not problem.is_line or not len(problem.weights):
                continue
            before, before_s = self.chosen[index], time_s(problem, self.chosen[index])
            self.chosen[index] = _optimum(problem, len(before))
            better = time_s(problem, self.chosen[index]) < before_s
            if not better or not self._budget.allows(*self._cost()):
                self.chosen[index] = before


def _optimum(problem: Problem, num_chosen: int) -> list[int]:
    """Return the best choice of so many candidates that differ in one dimension; the first, the top, comes last in order."""
    order = [*range(1, len(problem.candidates)), 0]
    # Each point belongs to the smallest candidate that covers it.
    first = problem.covers[order].argmax(axis=0)
    weights = np.bincount(first, weights=problem.weights, minlength=len(order))
    kept = optimal_sizes(problem.times[order].tolist(), weights.tolist(), num_chosen)
    return sorted(order[place] for place in kept)


class Fitted(TableStrategy):
    """The table that pads a workload least under a budget of buckets, compile time or memory.

    The largest buckets are always among them, so that every legal shape has one, whatever the trace held; only decode
    passes over more than three times the cache, which takes sequences that share most of their blocks, get a fallback.
    Tables are made once for each limits and then remembered; nothing else changes.

    Args:
        limits: Limits that ``bucket_for`` keeps.
        config: Source of the learned shapes, and the budget.

    Raises:
        ConfigValueError: No trace is named, or the budget does not pay for the largest buckets.
        ConfigError: The trace cannot be read.
    """

    def __init__(self, limits: BucketLimits, config: FittedConfig) -> None:
        if not config.trace:
            raise ConfigValueError(
                '[bucketing.fitted] trace = "": there is nothing to learn from.',
                hint="Name a trace or a file of recorded shapes, or choose another strategy.",
            )
        self._config = config
        self._source = read_source(Path(config.trace))
        self._tables: dict[BucketLimits, tuple[Bucket, ...]] = {}
        super().__init__(limits)

    def buckets(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        """Return the table: prefill buckets, then decode buckets.

        Raises:
            ConfigValueError: The budget does not pay for the largest buckets.
        """
        if limits not in self._tables:
            self._tables[limits] = self._fit(limits)
        return self._tables[limits]

    def _fit(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        config = self._config
        workload = self._source.workload(limits, config.cost)
        problems = (
            prefill_problem(workload, limits, config.cost),
            decode_problem(workload, limits, config.cost, config.reserve_ratio),
        )
        budget = _budget(config)
        _check(problems, budget, config)
        prefill, decode = choose(problems, budget)
        return (*sorted(prefill), *sorted(decode))


def _budget(config: FittedConfig) -> Budget:
    """Return the budget; every bucket takes equally long to prepare, so that time is a number of buckets."""
    numbers = [config.max_graphs] if config.max_graphs else []
    if config.max_compile_s:
        numbers.append(int(config.max_compile_s / config.cost.compile_s))
    if not numbers and not config.max_graph_bytes:
        raise ConfigValueError(
            "[bucketing.fitted] max_graphs, max_compile_s and max_graph_bytes are all 0: the table has no limit.",
            hint="Set one of them.",
        )
    return Budget(min(numbers) if numbers else None, config.max_graph_bytes or None)


def _check(problems: tuple[Problem, ...], budget: Budget, config: FittedConfig) -> None:
    num_graphs = sum(problem.num_tops for problem in problems)
    num_bytes = sum(float(problem.bytes[: problem.num_tops].sum()) for problem in problems)
    if budget.allows(num_graphs, num_bytes):
        return
    raise ConfigValueError(
        f"[bucketing.fitted] max_graphs = {config.max_graphs}, max_compile_s = {config.max_compile_s:g}, max_graph_bytes = "
        f"{config.max_graph_bytes:.4g}: the {num_graphs} largest buckets, which cover every legal shape, need "
        f"{num_graphs * config.cost.compile_s:.4g} s and {num_bytes:.4g} bytes.",
        hint="Raise the budget, or lower engine.max_num_batched_tokens or the backend's prefill batch size.",
    )
