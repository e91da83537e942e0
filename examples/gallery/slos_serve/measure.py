"""Capacity under objectives of each request: the plan of SLOs-Serve against built-in policies, in six scenarios.

    python examples/gallery/slos_serve/measure.py [--json FILE] [--scenarios chat,...] [--policies fcfs_512,...] [--seeds N] [--num-requests N]

The capacity of a policy is the largest rate at which 90 % of the requests keep all of their objectives. It is found by bisection: every
policy serves the same requests, at rates that stretch their arrivals.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np

from trencadis.api import load_with_plugins
from trencadis.console import print_table
from trencadis.records import StepShape
from trencadis_tools.compare.candidates import Candidate, described
from trencadis_tools.compare.experiment import at_rate
from trencadis_tools.simulation import Run, simulate
from trencadis_tools.simulation.step_times import LinearStepTimes
from trencadis_tools.tune.slo import Slo
from trencadis_tools.tune.trials import Capacity, Trials, capacity_of
from trencadis_tools.workloads import Workload, WorkloadRequest, load_workload
from trencadis_tools.workloads.distributions import Distribution
from trencadis_tools.workloads.draws import Stream

__all__ = [
    "ATTAINMENT",
    "PAPERS",
    "POLICIES",
    "SCENARIOS",
    "Objective",
    "Row",
    "StageSlo",
    "candidate",
    "capacity",
    "mean_capacity",
    "measure",
    "ratio",
    "scenario",
    "serve",
]

HERE = Path(__file__).parent
STEP_TIMES = LinearStepTimes()
ATTAINMENT = 0.9
_LOWER = (1.15, 1.3, 1.5)
"""The objectives are also kept at rates so many times lower."""


class Objective(NamedTuple):
    """Latency objectives of a request.

    Attributes:
        slow_down: Its first token comes within so many times the time that it takes on an idle device.
        tpot_s: Seconds for each token after it, on average.
    """

    slow_down: float
    tpot_s: float


# The paper's: tight and loose.
_TIGHT, _LOOSE = (3.0, 0.05), (5.0, 0.1)
SUMMARISE = Objective(_TIGHT[0], _LOOSE[1])
CODER = Objective(_LOOSE[0], _TIGHT[1])
CHAT = Objective(*_LOOSE)
AGENT = Objective(*_TIGHT)

SCENARIOS: Mapping[str, Mapping[str, Objective]] = {
    "summarise": {"summarise": SUMMARISE},
    "coder": {"coder": CODER},
    "chat": {"chat": CHAT},
    "mixed": {"summarise": SUMMARISE, "coder": CODER, "chat": CHAT},
    "tool": {"tool": AGENT},
    "reasoning": {"reasoning": AGENT},
}
"""Workload files of each, and the objective of the first request of a session, which is a request alone in most."""

NUM_BLOCKS = {"reasoning": 20_000}
"""KV cache of scenarios whose model is small in the paper; the others have that of the device."""

ANSWERS = Distribution(kind="lognormal", mean=200, cv=0.7, min=20, max=1000)
"""Of the scenario ``reasoning``, after thinking."""

POLICIES: Mapping[str, Mapping[str, Any]] = {
    "slos_serve": {
        "scheduling.name": "examples.gallery.slos_serve.policy:SlosServe",
        "engine.max_num_batched_tokens": 2048,
    },
    "prefill_first": {"scheduling.name": "prefill_first", "engine.max_num_batched_tokens": 4096},
    "fcfs_256": {"scheduling.name": "fcfs", "engine.max_num_batched_tokens": 256},
    "fcfs_512": {"scheduling.name": "fcfs", "engine.max_num_batched_tokens": 512},
    "fcfs_1024": {"scheduling.name": "fcfs", "engine.max_num_batched_tokens": 1024},
    "deadline": {"scheduling.name": "deadline", "engine.max_num_batched_tokens": 2048},
    "shortest_first": {"scheduling.name": "shortest_first", "engine.max_num_batched_tokens": 512},
}
PAPERS = ("prefill_first", "fcfs_256", "fcfs_512", "fcfs_1024")
"""What the paper compares with: the order of vLLM, and chunks as in Sarathi-Serve."""


# ---------------------------------------------------------------------------------------------------------------- scenarios


def scenario(name: str, *, seed: int = 0, num_requests: int | None = None) -> Workload:
    """Return the requests of a scenario, with objectives.

    Args:
        name: One of ``SCENARIOS``.
        seed: Of lengths.
        num_requests: Of each workload file; None: as it says. Of several files each gives an equal part, at an equal rate.
    """
    parts: list[WorkloadRequest] = []
    for file, objective in SCENARIOS[name].items():
        workload = load_workload(str(HERE / f"{file}.toml"), seed=seed, limit=num_requests)
        part = attrs.evolve(workload, requests=workload.requests[: len(workload.requests) // len(SCENARIOS[name])])
        requests = [
            attrs.evolve(one, request_id=f"{file} {one.request_id}", after=f"{file} {one.after}" if one.after else "")
            for one in at_rate(part, 1.0).requests
        ]
        parts += _with_objectives(requests, objective)
    if name == "reasoning":
        parts = [call for index, one in enumerate(parts) for call in _thought_and_answer(one, seed, index)]
    parts.sort(key=lambda one: (one.arrival_s, one.request_id.partition(" ")[0]))
    return at_rate(Workload(name=name, requests=tuple(parts), seed=seed), 1.0)


def _with_objectives(requests: Sequence[WorkloadRequest], objective: Objective) -> list[WorkloadRequest]:
    """Return requests with targets; the last of a session, which a user reads, has the loose one for its tokens."""
    by_id = {one.request_id: one for one in requests}
    followed = {one.after for one in requests}
    made = []
    for one in requests:
        before = by_id.get(one.after)
        num_cached = before.num_prompt_tokens + before.num_output_tokens if before else 0
        is_last = bool(one.after) and one.request_id not in followed
        made.append(
            attrs.evolve(
                one,
                ttft_target_s=objective.slow_down * _alone_s(one.num_prompt_tokens, num_cached),
                tpot_target_s=_LOOSE[1] if is_last else objective.tpot_s,
            )
        )
    return made


def _alone_s(num_prompt_tokens: int, num_cached: int) -> float:
    """Return the time to the first token on an idle device that has the beginning of a prompt in its cache."""
    num_tokens = num_prompt_tokens - min(num_cached, num_prompt_tokens - 1) // 16 * 16
    shape = StepShape(num_prefills=1, num_prefill_tokens=num_tokens, num_prefill_context=num_prompt_tokens)
    return STEP_TIMES.device_s(shape)


def _thought_and_answer(thought: WorkloadRequest, seed: int, index: int) -> list[WorkloadRequest]:
    """Return two requests: an answer follows thinking at once, as if its tokens came in the same sequence."""
    answer = attrs.evolve(
        thought,
        request_id=f"{thought.request_id}.answer",
        after=thought.request_id,
        session=thought.request_id,
        num_prompt_tokens=thought.num_prompt_tokens + thought.num_output_tokens + 1,
        num_output_tokens=int(ANSWERS.draw_tokens(seed, Stream.OUTPUTS, index, 1)),
        ttft_target_s=_LOOSE[1],
        tpot_target_s=_LOOSE[1],
    )
    return [attrs.evolve(thought, session=thought.request_id), answer]


# ----------------------------------------------------------------------------------------------------------------- capacity


class StageSlo(Slo):
    """The share of sessions of which every request keeps its objectives; a request without a session is one."""

    def goodput_of(self, run: Run) -> float:
        """Return it. Pure."""
        kept: dict[str, bool] = {}
        for record in run.records:
            key = record.request.session or record.request.request_id
            kept[key] = kept.get(key, True) and self._keeps(record)
        return sum(kept.values()) / len(kept)


@attrs.frozen(kw_only=True)
class Row:
    """A policy in a scenario.

    Attributes:
        scenario: Its name.
        policy: Its name.
        seed: Of lengths.
        capacity: Requests a second, sessions where there are; 0: none was low enough.
        attainment: Share of them that keep their objectives at that rate.
        preemptions: At that rate.
    """

    scenario: str
    policy: str
    seed: int
    capacity: float
    attainment: float
    preemptions: int


def candidate(policy: str, name: str, **changes: Any) -> Candidate:
    """Return the configuration of a policy in a scenario.

    Args:
        policy: One of ``POLICIES``.
        name: One of ``SCENARIOS``.
        changes: Of the configuration, by dotted path.
    """
    blocks = {"cache.num_blocks": NUM_BLOCKS[name]} if name in NUM_BLOCKS else {}
    overrides = {**POLICIES[policy], **blocks, **changes}
    return described(policy, *load_with_plugins(file=HERE / "config.toml", environ={}, overrides=overrides))


def serve(policy: str, workload: Workload, **changes: Any) -> Run:
    """Serve a scenario at the rate that it has.

    Args:
        policy: One of ``POLICIES``.
        workload: Of a scenario.
        changes: See :func:`candidate`.
    """
    chosen = candidate(policy, workload.name, **changes)
    return simulate(chosen.config, chosen.registry, workload, step_times=STEP_TIMES)


def capacity(policy: str, workload: Workload, *, tolerance: float = 0.04) -> Capacity:
    """Return the largest rate at which a policy keeps the objectives of a scenario, as it does at those of ``_LOWER``.

    Args:
        policy: One of ``POLICIES``.
        workload: Of a scenario.
        tolerance: Largest ratio minus 1 between the rate that it keeps them at and the one that it does not.
    """
    slo = StageSlo(text=f"goodput>={ATTAINMENT}", limits=(), goodput=ATTAINMENT)
    trials = Trials(candidate(policy, workload.name), slo, STEP_TIMES, [workload])
    found = capacity_of(trials, {}, workload.name, hint=1.0, tolerance=tolerance)
    assert found is not None, "the configuration is that of the trials"
    while found.rate:
        # Under bursts a rate may keep the objectives though a lower one does not.
        lower = [float(f"{found.rate / factor:.4g}") for factor in _LOWER]
        missing = [rate for rate in lower if not _keeps(trials, workload.name, rate)]
        if not missing:
            break
        again = capacity_of(trials, {}, workload.name, hint=min(missing) / 1.1, factor=1.1, tolerance=tolerance)
        assert again is not None, "it ran at another rate"
        found = again
    return found


def _keeps(trials: Trials, name: str, rate: float) -> bool:
    trial = trials.run({}, name, rate)
    return trial is not None and trial.keeps


def measure(name: str, policies: Sequence[str], *, seed: int = 0, num_requests: int | None = None) -> list[Row]:
    """Return the capacity of policies in a scenario.

    Args:
        name: One of ``SCENARIOS``.
        policies: Of ``POLICIES``.
        seed: Of lengths.
        num_requests: See :func:`scenario`.
    """
    workload = scenario(name, seed=seed, num_requests=num_requests)
    rows: list[Row] = []
    for policy in policies:
        found = capacity(policy, workload)
        at = found.within
        rows.append(
            Row(
                scenario=name,
                policy=policy,
                seed=seed,
                capacity=found.rate,
                attainment=at.values["goodput"] if at else math.nan,
                preemptions=at.num_preemptions if at else 0,
            )
        )
    return rows


def ratio(rows: Sequence[Row], others: Sequence[str]) -> tuple[float, str]:
    """Return the capacity of the first policy by that of the best of others, geometric means over seeds, and which that is. Pure."""
    found = {policy: mean_capacity(rows, policy) for policy in (rows[0].policy, *others)}
    best = max(others, key=found.__getitem__)
    return found[rows[0].policy] / found[best], best


def mean_capacity(rows: Sequence[Row], policy: str) -> float:
    """Return the geometric mean over seeds. Pure."""
    return math.exp(np.mean([math.log(max(row.capacity, 1e-9)) for row in rows if row.policy == policy]))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of the page; write the rows as JSON, if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), metavar="A,B,...")
    parser.add_argument("--policies", default=",".join(POLICIES), metavar="A,B,...")
    parser.add_argument("--seeds", type=int, default=2, metavar="N")
    parser.add_argument("--num-requests", type=int, metavar="N", help="of each workload file (default: as it says)")
    args = parser.parse_args(argv)
    policies = args.policies.split(",")
    groups = [[one for one in names if one in policies[1:]] for names in (PAPERS, list(POLICIES))]
    all_rows: list[Row] = []
    table, ratios = [], []
    for name in args.scenarios.split(","):
        rows = [
            row
            for seed in range(args.seeds)
            for row in measure(name, policies, seed=seed, num_requests=args.num_requests)
        ]
        all_rows += rows
        found = [ratio(rows, names) for names in groups if names]
        ratios.append([gain for gain, _ in found])
        cells = [f"{mean_capacity(rows, policy):.2f}" for policy in policies]
        table.append([name, *cells, *(f"{gain:.2f} ({best})" for gain, best in found)])
    headings = [text for text, names in zip(("by vLLM's or Sarathi's", "by the best"), groups, strict=True) if names]
    if headings:
        means = np.exp(np.mean(np.log(ratios), axis=0))
        table.append(["geometric mean", *("" for _ in policies), *(f"{mean:.2f}" for mean in means)])
    print_table(["scenario", *policies, *headings], table)
    if args.json:
        args.json.write_text(json.dumps([attrs.asdict(row) for row in all_rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
