"""Published results of inference-sim (BLIS) once more: the same workload and constants, our engine and policies in place of its own.

    python benchmarks/validation/inference_sim_entry.py --json > benchmarks/results/inference_sim_entry.json

Taken from testdata/trained_physics_iter29.json of github.com/inference-sim/inference-sim at f90a1e3a (Apache-2.0): the runs of one stage
at six requests a second, with the results that its tests hold fast, and from results_trainval/error_records.csv of
inference-sim/sim-to-real-accuracy-validation at dcec3fd4 what vLLM 0.15.1 took on an H100. Users share system prompts in groups of five,
and ask again 8.33 s after each answer with a prompt of the same length. The first questions come at random, in both from other generators; since
every user then keeps his pace, who meets whom depends on them alone. So ours are means over seeds, with their range, and of fewer rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import attrs
import numpy as np

from trencadis.registry import load_with_plugins
from trencadis_tools.simulation import Run, simulate
from trencadis_tools.simulation.step_times import load_step_times
from trencadis_tools.workloads import Workload, WorkloadRequest

ARRIVAL_S, FINISH_S, TOKEN_S = 15_563.199579e-6, 777.3455e-6, 45.907545e-6
"""From arrival to the queue, at the end of a request, for every token. Source: alpha_coeffs of defaults.yaml."""


@attrs.frozen(kw_only=True)
class Entry:
    """One published run.

    Attributes:
        model: Of our list.
        num_blocks: KV blocks of 16 tokens.
        published: Its results, ms.
        measured: Mean results of vLLM for the same run where they are published, ms.
    """

    model: str
    num_blocks: int
    published: dict[str, float]
    measured: dict[str, float]


ENTRIES = {
    "64": Entry(
        model="qwen2_5_7b",
        num_blocks=65352,
        published={
            "ttft_mean": 27.800832,
            "ttft_p90": 30.9356,
            "ttft_p99": 35.23918,
            "e2e_mean": 1720.109232,
            "e2e_p90": 1748.8049,
            "e2e_p99": 1773.592,
            "itl_mean": 6.766126,
        },
        measured={"ttft_mean": 26.72, "e2e_mean": 1771.80, "itl_mean": 7.02},
    ),
    "20260217-162547": Entry(
        model="llama_2_7b",
        num_blocks=7463,
        published={
            "ttft_mean": 32.041193,
            "ttft_p90": 36.194,
            "ttft_p99": 40.42,
            "e2e_mean": 2431.282175,
            "e2e_p90": 2513.5696,
            "e2e_p99": 2601.2744,
            "itl_mean": 9.593856,
        },
        measured={},
    ),
}
FORMS = ("published", "bounded")
NUM_GROUPS, NUM_USERS, SYSTEM, QUESTION, OUTPUT, RATE = 10, 5, 150, 600, 251, 6.0


def workload(num_rounds: int, *, seed: int) -> Workload:
    """Return every user's questions; prompts of a group share the whole blocks of its system prompt."""
    num_sessions = NUM_GROUPS * NUM_USERS
    think_s = num_sessions / RATE + ARRIVAL_S
    requests = []
    for user in range(num_sessions):
        group = user // NUM_USERS
        start_s = num_sessions / RATE * float(np.random.default_rng((seed, user)).standard_exponential())
        requests += [
            WorkloadRequest(
                request_id=f"{user}-{number}",
                arrival_s=start_s,
                num_prompt_tokens=SYSTEM + QUESTION,
                num_output_tokens=OUTPUT,
                session=str(user),
                after=f"{user}-{number - 1}" if number else "",
                think_s=think_s if number else 0.0,
                block_ids=tuple(group * 100 + block for block in range(SYSTEM // 16)),
            )
            for number in range(num_rounds)
        ]
    requests.sort(key=lambda one: one.arrival_s)  # those of a user stay in order
    return Workload(name="roleplay", requests=tuple(requests), seed=seed)


def measures(run: Run) -> dict[str, float]:
    """Return latencies as inference-sim counts them, ms: with its times outside of steps."""
    ttfts = np.array([one.ttft_s for one in run.records]) + ARRIVAL_S + TOKEN_S
    itls = np.array([one.tpot_s for one in run.records]) + TOKEN_S
    e2es = ttfts + (OUTPUT - 1) * itls + FINISH_S
    found = {"itl_mean": float(itls.mean())}
    for name, values in (("ttft", ttfts), ("e2e", e2es)):
        found |= {f"{name}_mean": float(values.mean())}
        found |= {f"{name}_p{part}": float(np.percentile(values, part)) for part in (90, 99)}
    return {name: 1e3 * value for name, value in found.items()}


def run_again(entry: Entry, num_rounds: int, seed: int) -> dict[str, dict[str, float]]:
    """Return our results for the published form of step times and for the bounded one."""
    overrides = {
        "scheduling.name": "fcfs",
        "engine.async_scheduling": False,
        "engine.max_num_seqs": 128,
        "engine.max_num_batched_tokens": 2048,
        "cache.num_blocks": entry.num_blocks,
        "cache.block_size": 16,
    }
    resolved, registry = load_with_plugins(overrides=overrides, environ={})
    found = {}
    for form in FORMS:
        times = load_step_times(f"h100:{entry.model}:{form}")
        found[form] = measures(simulate(resolved.config, registry, workload(num_rounds, seed=seed), step_times=times))
    return found


def beside(entry: Entry, runs: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Return the mean over seeds of our results and their range, beside those published."""
    told: dict[str, Any] = {"model": entry.model, "theirs": entry.published, "vllm": entry.measured}
    for form in FORMS:
        ours = {name: [one[form][name] for one in runs] for name in entry.published}
        told[form] = {
            "ours": {name: round(statistics.fmean(values), 3) for name, values in ours.items()},
            "least": {name: round(min(values), 3) for name, values in ours.items()},
            "largest": {name: round(max(values), 3) for name, values in ours.items()},
            "difference": {
                name: round(statistics.fmean(ours[name]) / value - 1, 4) for name, value in entry.published.items()
            },
            "from_vllm": {
                name: round(statistics.fmean(ours[name]) / value - 1, 4) for name, value in entry.measured.items()
            },
        }
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16, help="questions of each user; published: 144")
    parser.add_argument("--seeds", type=int, default=4, help="how many")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    seeds = range(1, args.seeds + 1)
    result = {
        name: beside(entry, [run_again(entry, args.rounds, seed) for seed in seeds]) for name, entry in ENTRIES.items()
    }
    if args.json:
        print(json.dumps({"num_rounds": args.rounds, "num_seeds": args.seeds, "entries": result}, indent=1))
        return
    for name, told in result.items():
        print(name, told["model"])
        for form in FORMS:
            print(" ", form, told[form]["ours"], told[form]["difference"], told[form]["from_vllm"])


if __name__ == "__main__":
    main()
