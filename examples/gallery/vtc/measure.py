"""Fair sharing by four policies: the gap in service between clients, and what it costs.

    python examples/gallery/vtc/measure.py [--json FILE] [--clients 2,9,27] [--num-requests N]

The gap is that of theorem 4.4 of the paper: how far the service of two clients drifts apart while both have requests that wait.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs
import numpy as np

from trencadis.api import load_with_plugins
from trencadis.console import print_table
from trencadis.records import Request, TokenDeltas
from trencadis_tools.bench.service_gap import ServiceGap
from trencadis_tools.simulation import simulate
from trencadis_tools.simulation.step_times import LinearStepTimes
from trencadis_tools.workloads import Workload
from trencadis_tools.workloads.workload_file import read_recipe

__all__ = ["Row", "bound_of", "clients", "fair_limit", "measure", "returning"]

HERE = Path(__file__).parent
PROMPT_PRICE, OUTPUT_PRICE = 1.0, 2.0
REQUESTS_A_MINUTE = 135
"""What the engine answers of this workload; limits of requests a minute share it."""
STEP_TIMES = LinearStepTimes(base_s=0.045, token_s=2.2e-4, context_s=1.75e-6)
"""Llama 2 7B in float16 on an A10G, the paper's, at half the peaks of its data sheet (600 GB/s, 125 teraflops)."""
POLICIES = {
    "fcfs": {"name": "fcfs"},
    "rpm": {"name": "examples.gallery.vtc.policies:RequestsPerMinute"},
    "lcf": {"name": "examples.gallery.vtc.policies:LeastCounterFirst"},
    "vtc": {"name": "fair_share"},
}


@attrs.frozen(kw_only=True)
class Row:
    """One policy on one workload.

    Attributes:
        workload: Its name.
        policy: Its name.
        gap: Largest drift in service between two clients that both wait; a prompt token is worth 1, an output token 2.
        bound: Of the theorem, for this workload and cache.
        light_ttft_p90_s: Seconds to the first token of the half of the clients that send least.
        heavy_ttft_p90_s: Of the others.
        tokens_per_s: Prompt and output tokens of answers, until the last one.
        num_refused: Requests.
    """

    workload: str
    policy: str
    gap: float
    bound: float
    light_ttft_p90_s: float
    heavy_ttft_p90_s: float
    tokens_per_s: float
    num_refused: int


class Service:
    """Watches a simulated engine, and counts what each client is given.

    Args:
        names: Of the clients.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}
        self._of_slot: dict[int, int] = {}
        self._unserved: dict[int, int] = {}  # prompt tokens of slots without a token so far
        self.gap = ServiceGap(len(self._numbers))

    def added(self, replica: int, slot: int, request: Request) -> None:
        """Note whose request a slot has."""
        self._of_slot[slot] = self._numbers[request.tenant]
        self._unserved[slot] = len(request.prompt_token_ids)
        self.gap.waits(self._of_slot[slot])

    def stepped(self, replica: int, deltas: TokenDeltas) -> None:
        """Count what came."""
        if not deltas.slots.size:
            return
        slots = deltas.slots.tolist()
        costs = OUTPUT_PRICE * deltas.num_tokens.astype(np.float64)
        for place, slot in enumerate(slots):
            if slot in self._unserved:
                costs[place] += PROMPT_PRICE * self._unserved.pop(slot)
                self.gap.runs(self._of_slot[slot])
        self.gap.serve(np.array([self._of_slot[slot] for slot in slots], np.int64), costs)


def clients(num: int, num_requests: int = 0) -> Workload:
    """Return the workload of ``clients.toml`` with so many clients, and its first requests."""
    changes = {"name": f"{num} clients", "tenants": {"num": num}, "limit": num_requests}
    return read_recipe(str(HERE / "clients.toml"), changes=changes).make()


def returning(workload: Workload) -> Workload:
    """Return the workload without the first half of client 1's requests in time: it is away, and comes back. Pure."""
    half_s = workload.requests[-1].arrival_s / 2
    kept = tuple(one for one in workload.requests if one.tenant != "1" or one.arrival_s > half_s)
    return attrs.evolve(workload, name=f"{workload.name}, one returns", requests=kept)


def bound_of(workload: Workload, kv_tokens: int) -> float:
    """Return the bound of theorem 4.4: 2 max(w_p L_input, w_q M). Pure."""
    longest = max(one.num_prompt_tokens for one in workload.requests)
    return 2 * max(PROMPT_PRICE * longest, OUTPUT_PRICE * kv_tokens)


def fair_limit(num_clients: int) -> int:
    """Return the requests a minute of each client that together the engine can answer. Pure."""
    return REQUESTS_A_MINUTE // num_clients


def measure(workload: Workload, policy: str, **sizes: int) -> Row:
    """Serve a workload under a policy.

    Args:
        workload: Of clients.
        policy: One of ``POLICIES``.
        sizes: Of the cache, over those of ``config.toml``.
    """
    sent = Counter(one.tenant for one in workload.requests)
    options = {"per_minute": fair_limit(len(sent))} if policy == "rpm" else {}
    overrides = {"scheduling": {**POLICIES[policy], "options": options}, "cache": sizes}
    resolved, registry = load_with_plugins(file=HERE / "config.toml", environ={}, overrides=overrides)
    service = Service(sorted(sent))
    run = simulate(resolved.config, registry, workload, step_times=STEP_TIMES, watcher=service)
    light = {tenant for tenant, _ in sent.most_common()[(len(sent) + 1) // 2 :]}
    answered = [one for one in run.records if not one.error]
    num_tokens = sum(one.request.num_prompt_tokens + one.num_output_tokens for one in answered)
    cache = resolved.config.cache
    return Row(
        workload=workload.name,
        policy=policy,
        gap=service.gap.largest,
        bound=bound_of(workload, cache.num_blocks * (cache.block_size or 16)),
        light_ttft_p90_s=float(np.percentile([one.ttft_s for one in answered if one.request.tenant in light], 90)),
        heavy_ttft_p90_s=float(np.percentile([one.ttft_s for one in answered if one.request.tenant not in light], 90)),
        tokens_per_s=num_tokens / run.duration_s,
        num_refused=len(run.records) - len(answered),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of the page; write it as JSON, if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--clients", default="2,9,27", metavar="A,B,...")
    parser.add_argument("--num-requests", type=int, default=0, metavar="N", help="the first so many (default: all)")
    args = parser.parse_args(argv)
    loads = [clients(int(num), args.num_requests) for num in args.clients.split(",")]
    loads.append(returning(loads[0]))
    rows = [measure(load, policy) for load in loads for policy in POLICIES]
    headings = ["clients", "policy", "gap", "bound", "light p90 s", "heavy p90 s", "tokens/s", "refused"]
    shown = ("{}", "{}", "{:,.0f}", "{:,.0f}", "{:.3g}", "{:.3g}", "{:.0f}", "{}")
    print_table(
        headings, [[form.format(value) for form, value in zip(shown, attrs.astuple(row), strict=True)] for row in rows]
    )
    if args.json:
        args.json.write_text(json.dumps([attrs.asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
