"""Notes on whether decisions differed between configurations, and whether requests had the fields that a policy decides by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs

from trencadis_tools.compare.experiment import PointResult
from trencadis_tools.simulation import RequestRecord, Run
from trencadis_tools.workloads import WorkloadRequest

__all__ = ["decision_notes", "num_served_otherwise"]

_SAME_S = 1e-6
"""Tolerance of equal times, seconds: steps simulated in a batch differ from single ones by about 1e-9 s."""

_NO_EFFECT = 5e-4
"""Relative effects below this are shown as 0.0 %."""


@attrs.frozen
class _Term:
    """Optional field of the requests of a workload.

    Attributes:
        table: Table of a workload file that sets the field.
        names: Names of view columns and request fields that hold it.
        is_unsaid: Returns whether no request distinguishes itself by a field.
        words: Beginning of the note; the names of the fields follow.
    """

    table: str
    names: Sequence[str]
    is_unsaid: Callable[[Sequence[WorkloadRequest], str], bool]
    words: str = "No request has "


def _none_has(requests: Sequence[WorkloadRequest], name: str) -> bool:
    return all(math.isinf(getattr(one, name)) for one in requests)


def _all_alike(requests: Sequence[WorkloadRequest], name: str) -> bool:
    return len({getattr(one, name) for one in requests}) == 1


_TERMS = (
    _Term("[targets]", ("ttft_target_s", "tpot_target_s"), _none_has),
    _Term("[priorities]", ("priority",), _all_alike, "All requests have the same "),
    _Term("[tenants]", ("tenant",), _all_alike, "All requests are of the same "),
)


def decision_notes(result: PointResult) -> list[str]:
    """Return notes on equal decisions, if none differed or an effect is shown as 0.0 %, and on fields that policies read but no request has.

    Measurements give no notes: their times vary by themselves, and reads of their policies are not recorded.

    Args:
        result: Result of one point.
    """
    notes: list[str] = []
    if None in result.reads or not result.reads:
        return notes
    baseline, num_all = result.candidates[0].name, sum(len(run.records) for run in result.runs[0])
    for candidate, runs in zip(result.candidates[1:], result.runs[1:], strict=True):
        num_other = num_served_otherwise(result.runs[0], runs)
        if not num_other:
            notes.append(
                f"{candidate.name}: no decision differed from those of {baseline}. All {num_all:,} requests had the same times."
            )
        elif _shows_no_effect(result, candidate.name):
            notes.append(
                f"{candidate.name}: decisions differed from those of {baseline}. {num_other:,} of {num_all:,} requests had other times."
            )
    return [*notes, *_unsaid(result)]


def num_served_otherwise(baseline: Sequence[Run], other: Sequence[Run]) -> int:
    """Return how many requests differ in times, replica or number of preemptions. Pure.

    Args:
        baseline: Runs of the first configuration, one for each workload.
        other: Runs of the second configuration on the same workloads.
    """
    return sum(
        not _is_same(one, two)
        for first, second in zip(baseline, other, strict=True)
        for one, two in zip(first.records, second.records, strict=True)
    )


def _is_same(one: RequestRecord, two: RequestRecord) -> bool:
    facts = [(record.replica, record.num_preemptions, bool(record.error)) for record in (one, two)]
    times = ((one.sent_s, two.sent_s), (one.first_token_s, two.first_token_s), (one.finished_s, two.finished_s))
    return facts[0] == facts[1] and all(
        abs(mine - theirs) <= _SAME_S or (math.isnan(mine) and math.isnan(theirs)) for mine, theirs in times
    )


def _shows_no_effect(result: PointResult, name: str) -> bool:
    own = [effect for effect in result.judgement.effects if effect.other == name and effect.verdict != "unstable"]
    return any(abs(effect.relative(effect.interval.difference)) < _NO_EFFECT for effect in own)


def _unsaid(result: PointResult) -> list[str]:
    """Return notes on fields that policies read and that are equal or unset in all requests."""
    requests = [request for workload in result.workloads for request in workload.requests]
    notes = []
    for policy, reads in dict(_policies(result)).items():
        for term in _TERMS:
            names = [name for name in term.names if name in reads and term.is_unsaid(requests, name)]
            if names:
                notes.append(
                    f"{term.words}{' or '.join(names)}, which {policy} reads: {term.table} of a workload file gives it."
                )
    return notes


def _policies(result: PointResult) -> list[tuple[str, frozenset[str]]]:
    return [
        (candidate.config.scheduling.name, reads or frozenset())
        for candidate, reads in zip(result.candidates, result.reads, strict=True)
    ]
