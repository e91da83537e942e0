"""What simulated fleets cost: CPU seconds and memory, and what skipping steps saves.

    nice -n 15 python benchmarks/simulator/fleets.py --out benchmarks/results/simulator.json

Each case runs in a process of its own, and replaces what the file had of it. Requests of 600 prompt and 150 output tokens on average, one
a second for each replica. CPU seconds are those of the process, builds of engines included; other work on the machine's cores makes them
longer. All cases together take about half an hour.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "engine, one by one": {"replicas": 8, "requests": 800, "max_steady_steps": 1},
    "engine": {"replicas": 8, "requests": 800},
    "engine, 100 replicas": {"replicas": 100, "requests": 5_000},
    "engine, 1,000 replicas": {"replicas": 1_000, "requests": 10_000},
    "engine, 1,000 replicas, long": {"replicas": 1_000, "requests": 200_000},
    "engine, 10,000 replicas": {"replicas": 10_000, "requests": 10_000},
}
COMMANDS = {
    "twin_agents, 1,000 replicas": "trencadis simulate --replicas 1000 --router.name prefix_affinity --workload twin_agents --json",
}
ROUTER = "round_robin"


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case in this process."""
    from trencadis.api import load_with_plugins
    from trencadis_tools.simulation.fleet import Fleet
    from trencadis_tools.simulation.steady import MAX_STEADY_STEPS
    from trencadis_tools.simulation.step_times import LinearStepTimes
    from trencadis_tools.workloads import Workload, WorkloadRequest

    logging.disable(logging.INFO)
    tables = {"model": {"path": "demo"}, "router": {"name": ROUTER}}
    resolved, registry = load_with_plugins(environ={}, overrides=tables)
    import numpy as np

    draws = np.random.default_rng(7)
    number, replicas = case["requests"], case["replicas"]
    times = np.cumsum(draws.exponential(1 / replicas, number)).tolist()
    prompts = np.maximum(1, draws.gamma(1.0, 600, number)).astype(int).tolist()
    outputs = np.maximum(1, draws.gamma(1.0, 150, number)).astype(int).tolist()
    requests = tuple(
        WorkloadRequest(request_id=str(i), arrival_s=at, num_prompt_tokens=prompt, num_output_tokens=output)
        for i, (at, prompt, output) in enumerate(zip(times, prompts, outputs, strict=True))
    )
    workload = Workload(name="fleet", requests=requests)
    began_s = time.process_time()
    most = case.get("max_steady_steps", MAX_STEADY_STEPS)
    fleet = Fleet(
        resolved.config, registry, workload, step_times=LinearStepTimes(), replicas=replicas, max_steady_steps=most
    )
    built_s = time.process_time() - began_s
    run = fleet.run()
    cpu_s = time.process_time() - began_s
    return {
        "replicas": replicas,
        "requests": number,
        "build_cpu_s": round(built_s, 2),
        "cpu_s": round(cpu_s, 2),
        "us_per_request": round((cpu_s - built_s) / number * 1e6),
        "steps": run.num_steps,
        "steps_per_plan": round(run.num_steps / run.num_plans, 2),
        "simulated_s": round(run.duration_s, 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "load_average": round(os.getloadavg()[0], 1),
    }


def measure_command(command: str) -> dict[str, Any]:
    """Run a command in a process of its own; its CPU seconds are those of the whole process."""
    words = [sys.executable, "-m", *shlex.split(command)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command}: exit code {process.returncode}")
    summary = json.loads(text)
    cpu_s = used.ru_utime + used.ru_stime
    return {
        "command": command,
        "replicas": summary["num_replicas"],
        "requests": summary["num_requests"],
        "mean_prompt_tokens": round(summary["prompt_rate"] * summary["duration_s"] / summary["num_answered"]),
        "cpu_s": round(cpu_s, 1),
        "us_per_request": round(cpu_s / summary["num_requests"] * 1e6),
        "steps": summary["num_steps"],
        "simulated_s": round(summary["duration_s"], 1),
        "prefix_hit_ratio": round(summary["prefix_hit_ratio"], 4),
        "peak_mib": used.ru_maxrss // 1024,
        "load_average": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Run the cases, one process each."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*CASES, *COMMANDS]
    parser.add_argument("--out", type=Path, metavar="FILE", help="write results there; other cases in it are kept")
    parser.add_argument("--cases", nargs="+", choices=names, default=names, help="which (default: all)")
    parser.add_argument("--one", choices=list(CASES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(CASES[args.one])))
        return
    results: dict[str, Any] = {"cases": {}, "commands": {}}
    if args.out is not None and args.out.exists():
        results = json.loads(args.out.read_text(encoding="utf-8"))
    results["router"] = ROUTER
    for name in args.cases:
        if name in COMMANDS:
            results["commands"][name] = measured = measure_command(COMMANDS[name])
        else:
            command = [sys.executable, __file__, "--one", name]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            results["cases"][name] = measured = json.loads(text)
        print(name, measured, file=sys.stderr, flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
