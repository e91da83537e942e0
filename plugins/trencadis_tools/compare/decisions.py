"""Whether configurations decided anything otherwise, and whether requests had what a policy decides by, in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs

from trencadis_tools.compare.experiment import PointResult
from trencadis_tools.simulation import RequestRecord, Run
from trencadis_tools.workloads import WorkloadRequest

__all__ = ["decision_notes", "num_served_otherwise"]

_SAME_S = 1e-6
"""Times this near to each other are equal: several steps that are computed at once differ from single ones by some 1e-9 s."""

_NO_EFFECT = 5e-4
"""Effects below are shown as 0.0 %."""


@attrs.frozen
class _Term:
    """What requests of a workload may say.

    Attributes:
        table: Of a workload file, that says it.
        names: Columns of the view and fields of requests that hold it.
        is_unsaid: Return whether requests leave a column without it.
        words: That none says it, before the names.
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
    """Return in words whether decisions differed, if none did or an effect is shown as 0.0 %, and what policies read that no request has.

    Nothing of measurements: their times differ by themselves, and their policies are not watched.

    Args:
        result: Of one point.
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
    """Return how many requests were served otherwise: at other times, on another replica, or with other preemptions. Pure.

    Args:
        baseline: Runs of one configuration.
        other: Runs of another one on the same workloads.
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
    """Return what policies read by which no request of the workloads differs from another."""
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
