"""Search for the configuration with the largest capacity.

    start ▶ each option alone ▶ several together (low-discrepancy sample) ▶ one step at a time ▶ longer parts, fewer left ▶ simpler ▶ check

Candidates are compared at one rate, the smallest at which the best so far misses the objectives, so that one simulation tells whether
another is better. Many candidates run on the short part of the workload, few on the longer ones. The final capacities are of a part that
the search has not seen. The only random input is a Sobol sequence with a fixed seed, so that equal inputs give equal results.

Source: Jamieson and Talwalkar, Non-stochastic best arm identification and hyperparameter optimization, 2016 (successive halving);
Sobol 1967 with Owen's scrambling, scipy.stats.qmc.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from trencadis.errors import ConfigError
from trencadis_tools.lab import library
from trencadis_tools.tune.space import Option, Space
from trencadis_tools.tune.trials import Capacity, Changes, Trial, Trials, capacity_of

__all__ = ["SPANS", "Effect", "Found", "Parts", "search"]

_NOTHING = 0.01
"""Relative change of the strain below which an option has no effect."""
_SAME = 0.02
"""Relative difference below which capacities are equal and latency decides."""
_ALONE, _TOGETHER, _REFINED = 0.45, 0.65, 0.85
"""Shares of the budget left after the start at which each stage ends at the latest."""
SPANS = 3.0
"""Minimum ratio of the duration of arrivals to the latency of a request, for a steady-state capacity."""
_SAMPLED_VALUES = 3
_MOST_SAMPLES = 64
_MOST_FINALISTS = 6
_RACE_TOLERANCE, _FINAL_TOLERANCE = 0.1, 0.025
"""Largest ratio, minus 1, of the smallest rate that misses the objectives to the largest that keeps them."""


@attrs.frozen(kw_only=True)
class Parts:
    """Names of parts of the workload.

    Attributes:
        rungs: Names of the parts to search with, in order of length.
        held_out: Name of the part for the final check.
        left_out: Requests of the workload that no part has because the model cannot take them, in words; empty: none.
        seeds: Seeds of the requests to search with and to check with; None: nothing is drawn.
    """

    rungs: Sequence[str]
    held_out: str
    left_out: str = ""
    seeds: tuple[int, int] | None = None


@attrs.frozen(kw_only=True)
class Effect:
    """Effect of one option changed alone.

    Attributes:
        option: Option that was changed.
        base: Trial of the base at the same rate.
        tried: Tried values, each with its trial.
    """

    option: Option
    base: Trial
    tried: Sequence[tuple[Any, Trial]]

    @property
    def best(self) -> tuple[Any, Trial]:
        """Value with the least strain, including the start's, and its trial."""
        return min([(self.option.start, self.base), *self.tried], key=lambda one: one[1].score)

    @property
    def matters(self) -> bool:
        """Whether some value changes the strain by more than 1 %."""
        return any(_differs(trial.strain, self.base.strain) for _, trial in self.tried)

    @property
    def improving(self) -> list[Any]:
        """Values that lower the strain by more than 1 %, the best first."""
        good = [
            one for one in self.tried if one[1].strain < self.base.strain and _differs(one[1].strain, self.base.strain)
        ]
        return [value for value, _ in sorted(good, key=lambda one: one[1].score)]


def _differs(one: float, other: float) -> bool:
    return one != other and not abs(one - other) <= _NOTHING * other


@attrs.frozen(kw_only=True)
class Found:
    """Result of the search; capacities are those of the held-out part.

    Attributes:
        start: Capacity of the starting configuration.
        best: Capacity of the best configuration; the start if nothing is better.
        second: Capacity of the second-best configuration; None: there is none.
        at_best: Trials of start, best and second at the largest rate that the best serves.
        alone: Capacity of each change of the best alone, by path of the option.
        effects: Effect of each option that was tried, on the shortest part.
        stages: Name of each stage, and the number of simulations up to its end.
    """

    start: Capacity
    best: Capacity
    second: Capacity | None
    at_best: Sequence[Trial]
    alone: Mapping[str, Capacity]
    effects: Sequence[Effect]
    stages: Sequence[tuple[str, int]]


def search(space: Space, trials: Trials, parts: Parts, *, hint: float, budget: int) -> Found:
    """Search, and check the best two configurations on the held-out part.

    Args:
        space: Options to search.
        trials: Runs candidates in the simulator.
        parts: Names of the parts of the workload.
        hint: Rate to begin with, requests per second.
        budget: Maximum number of simulations of the search; the check comes on top.

    Raises:
        TrencadisError: The starting configuration cannot be used, or scipy is missing.
    """
    return _Search(space, trials, parts, budget).run(hint)


class _Search:
    def __init__(self, space: Space, trials: Trials, parts: Parts, budget: int) -> None:
        self._space, self._trials, self._parts, self._budget = space, trials, parts, budget
        self._short = parts.rungs[0]
        self._options = {option.path: option for option in space.options()}
        self._effects: dict[str, Effect] = {}
        self._stages: list[tuple[str, int]] = []
        self._spent = 0

    def run(self, hint: float) -> Found:
        start = self._start(hint)
        self._ends("start")
        self._spent = self._trials.num_run
        self._alone(start.edge)
        self._ends("each option alone")
        best = self._together(start.edge)
        self._ends("together")
        best = self._refine(best, self._ranked(start.edge)[:_MOST_FINALISTS])
        self._ends("one step at a time")
        finalists = self._halve([best, *self._ranked(start.edge)])
        self._ends("longer parts")
        finalists = [self._simpler(one) for one in finalists[:1]] + finalists[1:]
        self._ends("simpler")
        return self._check(finalists, start.nearest.rate)

    def _start(self, hint: float) -> Capacity:
        """Return the capacity of the start on the shortest part whose arrivals last ``SPANS`` times the latency of a request.

        On a shorter part a queue only begins to grow, and the configuration that survives one burst would win.
        """
        found: Capacity | None = None
        for number, part in enumerate(self._parts.rungs):
            found = self._capacity({}, part, hint=hint if found is None else found.edge.rate)
            assert found is not None, "the start was not refused"
            self._short, rungs = part, self._parts.rungs[number:]
            if found.beyond and found.edge.spans >= SPANS:
                break
        assert found is not None, "there is a part"
        if not found.beyond:
            raise ConfigError(
                f"trencadis tune: the {self._short} requests keep the objectives even if all of them come at once.",
                hint="Search with more of the workload (--limit), or give tighter objectives.",
            )
        self._parts = attrs.evolve(self._parts, rungs=rungs)
        return found

    def _ends(self, stage: str) -> None:
        self._stages.append((stage, self._trials.num_run))

    def _may(self, share: float = 1.0) -> bool:
        """Return whether a stage may continue that ends at a share of the budget left after the start."""
        return self._trials.num_run < self._spent + share * (self._budget - self._spent)

    def _capacity(self, changes: Changes, part: str, *, hint: float, **more: float) -> Capacity | None:
        return capacity_of(self._trials, changes, part, hint=hint, **more)

    # ---------------------------------------------------------------------------------------------- each alone

    def _alone(self, base: Trial) -> None:
        """Try options alone, one value of each in turn, then the options of the two best policies."""
        self._try(list(self._options.values()), base, share=0.75 * _ALONE)
        policies = self._effects.get("scheduling.name")
        for name in policies.improving[:2] if policies else ():
            option = self._options["scheduling.name"]
            under = self._trials.run(option.change(name), self._short, base.rate)
            own = [one for one in self._space.options_of(name) if one.path not in self._options]
            if under is not None:
                self._options |= {one.path: one for one in own}
                self._try(own, under, share=_ALONE)

    def _try(self, options: Sequence[Option], base: Trial, *, share: float) -> None:
        waiting = {option.path: option.others() for option in options}
        tried: dict[str, list[tuple[Any, Trial]]] = {option.path: [] for option in options}
        while any(waiting.values()) and self._may(share):
            for option in options:
                if waiting[option.path] and self._may(share):
                    value = waiting[option.path].pop(0)
                    trial = self._run({**base.changes, **option.needs, **option.change(value)}, base.rate)
                    if trial is not None and trial.changes != base.changes:
                        tried[option.path].append((value, trial))
        self._effects |= {
            option.path: Effect(option=option, base=base, tried=tried[option.path])
            for option in options
            if tried[option.path]
        }

    def _run(self, changes: Changes, rate: float, part: str = "") -> Trial | None:
        return self._trials.run(self._space.in_force(changes), part or self._short, rate)

    # ------------------------------------------------------------------------------------------------ together

    def _together(self, base: Trial) -> Trial:
        """Combine improving values, the best first; then try sampled combinations."""
        good = [effect for effect in self._effects.values() if effect.improving]
        good.sort(key=lambda effect: effect.best[1].score)
        best = min([base, *(effect.best[1] for effect in good)], key=_score)
        for effect in good:
            if self._may(_TOGETHER):
                best = self._better(best, {**best.changes, **effect.option.change(effect.best[0])})
        matter = [effect for effect in self._effects.values() if effect.matters]
        for changes in self._samples(matter) if self._may(_TOGETHER) else ():
            if self._may(_TOGETHER):
                best = self._better(best, changes)
        return best

    def _better(self, best: Trial, changes: Changes) -> Trial:
        """Return the better of the best trial and one with other changes, at the same rate; it must be better by 1 %."""
        trial = self._run(changes, best.rate)
        return trial if trial is not None and trial.score < best.score and _differs(trial.strain, best.strain) else best

    def _samples(self, effects: Sequence[Effect]) -> Iterable[dict[str, Any]]:
        """Yield evenly spread combinations of starting and best other values, since options interact."""
        if len(effects) < 2:
            return
        sobol = library("scipy.stats.qmc", purpose="search of trencadis tune").Sobol(len(effects), seed=0)
        for point in sobol.random(_MOST_SAMPLES).tolist():
            changes: dict[str, Any] = {}
            for effect, place in zip(effects, point, strict=True):
                others = sorted(effect.tried, key=lambda one: one[1].score)[:_SAMPLED_VALUES]
                values = [effect.option.start, *(value for value, _ in others)]
                changes |= effect.option.change(values[min(int(place * len(values)), len(values) - 1)])
            yield changes

    # ------------------------------------------------------------------------------------------ one step at a time

    def _refine(self, best: Trial, others: Sequence[Trial]) -> Trial:
        """Move one option at a time to a neighbouring value while that is better, at a rate that the best does not serve."""
        options = [effect.option for effect in self._effects.values() if effect.matters]
        moved = True
        while moved and self._may(_REFINED):
            moved = False
            best = self._harder(best, others)
            for option in options:
                value = best.changes.get(option.path, option.start)
                for other in option.neighbours(value) if value in option.values else ():
                    if self._may(_REFINED):
                        before = best
                        rest = {path: one for path, one in best.changes.items() if path != option.path}
                        best = self._better(best, {**rest, **option.change(other)})
                        moved |= best is not before
        return best

    def _harder(self, best: Trial, others: Sequence[Trial]) -> Trial:
        """Compare the best and others at a rate that the best does not serve, until no other serves it."""
        while best.keeps and self._may(_REFINED):
            found = self._capacity(best.changes, self._short, hint=best.rate * 2, tolerance=_RACE_TOLERANCE)
            assert found is not None, "it ran at another rate"
            best = found.edge
            if best.keeps:  # no rate misses the objectives
                return best
            for one in others:
                best = self._better(best, one.changes)
        return best

    # ------------------------------------------------------------------------------------------------ fewer left

    def _ranked(self, base: Trial) -> list[Trial]:
        """Return the trials of the first comparison that are better than the start, the best first, one of equal ones."""
        raced = [one for one in self._trials.trials.values() if (one.part, one.rate) == (self._short, base.rate)]
        better = [one for one in raced if one.strain < base.strain and _differs(one.strain, base.strain)]
        simplest = {one.score: one for one in sorted(better, key=_complexity, reverse=True)}
        return [simplest[score] for score in sorted(simplest)]

    def _halve(self, ranked: Sequence[Trial]) -> list[Trial]:
        """Compare the best on longer parts, half as many each time; return the trials on the longest, the best first.

        Each comparison is at the rate that the best of the previous part does not serve on this one.
        """
        left = list({repr(one.changes): one for one in ranked if one.changes}.values())[:_MOST_FINALISTS]
        for part in self._parts.rungs[1:]:
            if not left:
                break
            edge = self._capacity(left[0].changes, part, hint=left[0].rate, tolerance=_RACE_TOLERANCE)
            assert edge is not None, "it ran on another part"
            found = [trial for one in left if (trial := self._run(one.changes, edge.edge.rate, part)) is not None]
            left = sorted(found, key=_score)[: max(2, len(left) // 2)]
        return left

    def _simpler(self, best: Trial) -> Trial:
        """Undo changes, one after the other, without which the best is equally good at its rate."""
        for path in list(best.changes):
            option = self._options.get(path)
            if option is None or path not in best.changes:
                continue
            fewer = self._run(_without(best.changes, option), best.rate, best.part)
            if fewer is not None and fewer.strain <= max(best.strain * (1 + _NOTHING), float(best.keeps)):
                best = fewer
        return best

    # ----------------------------------------------------------------------------------------------------- check

    def _check(self, finalists: Sequence[Trial], rate: float) -> Found:
        """Return capacities on the held-out part, beginning with the rates of the search."""
        part = self._parts.held_out
        start = self._final({}, rate)
        others: list[Capacity] = []
        for one in finalists:
            if one.changes and one.changes not in [other.changes for other in others] and len(others) < 2:
                others.append(self._final(one.changes, one.rate))
        ordered = self._by_capacity([start, *others], part)
        best = ordered[0]
        second = next((one for one in ordered[1:] if one.changes), None)
        alone = {}
        for path in best.changes:
            option = self._options.get(path)
            if option is not None:
                own = self._space.in_force({**option.needs, **option.change(best.changes[path])})
                alone[path] = self._final(own, start.nearest.rate)
        shown = [start, best, *([second] if second else [])]
        at_best = [self._run(one.changes, best.nearest.rate, part) for one in shown]
        self._ends("check")
        return Found(
            start=start,
            best=best,
            second=second,
            at_best=[trial for trial in at_best if trial is not None],
            alone=alone,
            effects=list(self._effects.values()),
            stages=self._stages,
        )

    def _by_capacity(self, capacities: Sequence[Capacity], part: str) -> list[Capacity]:
        """Return capacities, the largest first; ties within 2 % are ordered by latency at the smaller rate, then fewer changes.

        Unbounded capacities are equal.
        """
        left, ordered = list(capacities), []
        while left:
            top = max(one.bound for one in left)
            equal = [one for one in left if one.bound >= top * (1 - _SAME)]
            rate = min(one.nearest.rate for one in equal)
            scores = {}
            for one in equal:
                trial = self._run(one.changes, rate, part)
                assert trial is not None, "it ran at another rate"
                scores[id(one)] = (float(f"{trial.e2e_mean_s if one.rate else trial.strain:.2g}"), len(one.changes))
            best = min(equal, key=lambda one: scores[id(one)])
            ordered.append(best)
            left.remove(best)
        return ordered

    def _final(self, changes: Changes, hint: float) -> Capacity:
        found = self._capacity(changes, self._parts.held_out, hint=hint, factor=1.25, tolerance=_FINAL_TOLERANCE)
        assert found is not None, "it ran on another part"
        return found


def _score(trial: Trial) -> tuple[float, float, float]:
    return trial.score


def _complexity(trial: Trial) -> int:
    return len(trial.changes)


def _without(changes: Changes, option: Option) -> dict[str, Any]:
    brought = option.brings.get(changes[option.path], {})
    return {path: value for path, value in changes.items() if path != option.path and path not in brought}
