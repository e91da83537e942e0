"""``trencadis simulate``: a workload on simulated replicas: the real engine, policies and router, without a device."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from trencadis.api import Config, Registry
from trencadis.console import print_table, track
from trencadis.errors import ConfigError
from trencadis_tools.commands.lines import say
from trencadis_tools.commands.rate import add_rate

if TYPE_CHECKING:
    from trencadis_tools.simulation.summary import Percentiles, RunSummary

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument("--workload", metavar="W", help="a workload file, a trace, or the name of a built-in one")
    parser.add_argument("--max-requests", type=int, metavar="N", help="the first N of it (default: all)")
    add_rate(parser)
    parser.add_argument("--seed", type=int, metavar="N", help="of what is drawn (default: the workload's)")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="engines behind [router] (default: 1)")
    parser.add_argument(
        "--step-times", default="", metavar="S", help="fitted step times, or a device sheet such as h100:llama_3_1_8b"
    )
    parser.add_argument(
        "--drafts",
        default="",
        metavar="D",
        help="with a speculator: how often a draft is right, such as 0.7, or a TOML file",
    )
    parser.add_argument("--events", type=Path, metavar="FILE.toml", help="failures, drains and joins of replicas")
    parser.add_argument("--requests", type=Path, metavar="FILE", help="write a row for each request, .csv or .parquet")
    parser.add_argument(
        "--token-times",
        action="store_true",
        help="keep when each token came, for max_itl_s, qoe and token_times_s of --requests",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Simulate and print; returns 0.

    Raises:
        ConfigError: An argument, file or configuration cannot be used.
        TrencadisError: A component cannot be built, or broke its contract.
    """
    from trencadis_tools.compare.requests_file import check_requests_file, row_of, write_rows
    from trencadis_tools.simulation import load_drafts, simulate
    from trencadis_tools.simulation.drafts import one_seed, speculates
    from trencadis_tools.simulation.events import read_events
    from trencadis_tools.simulation.fleet import notes_on
    from trencadis_tools.simulation.step_times import LinearStepTimes, load_step_times
    from trencadis_tools.simulation.summary import summary_of
    from trencadis_tools.workloads import depends_on_seed, load_workload

    if not args.workload:
        raise ConfigError(
            "trencadis simulate: --workload is missing.", hint="Name a workload file, a trace or a built-in."
        )
    if args.requests is not None:
        check_requests_file(args.requests)
    workload = load_workload(args.workload, seed=args.seed, rate=args.rate, limit=args.max_requests)
    step_times = load_step_times(args.step_times) if args.step_times else LinearStepTimes()
    events = () if args.events is None else read_events(args.events)
    began_s = time.process_time()
    with track("Simulating", total=len(workload.requests), unit="requests") as advance:
        result = simulate(
            config,
            registry,
            workload,
            step_times=step_times,
            replicas=args.replicas,
            events=events,
            drafts=load_drafts(args.drafts),
            token_times=args.token_times,
            note=advance,
        )
    cpu_s = time.process_time() - began_s
    summary = summary_of(result)
    seed = one_seed(
        f"seed {workload.seed}",
        requests=depends_on_seed(args.workload, workload),
        drafts=speculates(config),
        more="Run others with --seed; trencadis compare --seeds gives intervals.",
    )
    notes = [*notes_on(config), *([seed] if seed else [])]
    if args.requests is not None:
        write_rows(args.requests, [row_of(record, token_times=args.token_times) for record in result.records])
    if args.json:
        facts: dict[str, object] = {
            "workload": workload.name,
            "seed": workload.seed,
            "step_times": repr(step_times),
            "notes": notes,
        }
        print(json.dumps(facts | attrs.asdict(summary)))
        return 0
    _print(summary, cpu_s)
    for note in notes:
        print()
        say(note)
    refused = [record for record in result.records if record.error]
    if refused:
        print()
        say(f"{len(refused)} requests have no answer; the first: {refused[0].error}")
    return 0


def _print(summary: RunSummary, cpu_s: float) -> None:
    saturated = {True: "yes: latencies grow with the length of the run", False: "no", None: "unknown without scipy"}
    rows = [
        ("replicas", f"{summary.num_replicas:,}"),
        ("requests answered", f"{summary.num_answered:,} of {summary.num_requests:,}"),
        ("simulated time", f"{summary.duration_s:,.1f} s"),
        *(
            (name, _show(values))
            for name, values in (("TTFT", summary.ttft_s), ("TPOT", summary.tpot_s), ("E2E", summary.e2e_s))
        ),
        ("requests a second", f"{summary.request_rate:,.4g}"),
        ("of these within targets", f"{summary.goodput:,.4g}"),
        ("output tokens a second", f"{summary.output_rate:,.0f}"),
        ("prompt tokens a second", f"{summary.prompt_rate:,.0f}"),
        ("prompt tokens from caches", f"{summary.prefix_hit_ratio:.1%}"),
        *_kv_rows(summary),
        (
            "replicas compute",
            f"{summary.busy_ratio:.1%} of the time; the busiest {summary.busy_imbalance:.2f} x the mean",
        ),
        ("requests of a replica", f"at most {summary.request_imbalance:.2f} x the mean"),
        ("saturated", saturated[summary.is_saturated]),
        ("preemptions", f"{summary.num_preemptions:,}; {summary.recompute_ratio:.1%} of tokens computed again"),
        ("drafts", f"{summary.num_draft_tokens:,}, of which {summary.num_accepted_tokens:,} were accepted"),
        ("moved after failures", f"{summary.num_moved:,}"),
        ("moved by the router", f"{summary.num_rebalanced:,}"),
        ("steps", f"{summary.num_steps:,}, of which {summary.num_skipped_steps:,} were skipped"),
        (
            "cost",
            f"{cpu_s:.1f} CPU s; {summary.duration_s * summary.num_replicas / max(cpu_s, 1e-9):,.0f} engine seconds each",
        ),
    ]
    print_table(("measure", "value"), rows)


def _kv_rows(summary: RunSummary) -> list[tuple[str, str]]:
    kv = summary.kv
    if kv is None:
        return []
    mean_s = kv.load_s / max(1, kv.num_loads)
    return [
        (
            "KV loaded",
            f"{kv.num_tokens_loaded:,} tokens in {kv.num_loads:,} loads of {mean_s:.4g} s; {kv.num_late_loads:,} given up, "
            f"{kv.num_declined_loads:,} declined",
        ),
        (
            "KV saved",
            f"{kv.num_tokens_saved:,} tokens; {kv.num_tokens_dropped:,} not saved, {kv.num_tokens_evicted:,} evicted",
        ),
        ("links to KV stores", f"busy {summary.kv_link_ratio:.1%} of the time"),
    ]


def _show(values: Percentiles) -> str:
    return f"mean {values.mean:.4g} s, median {values.p50:.4g}, p90 {values.p90:.4g}, p99 {values.p99:.4g}"
