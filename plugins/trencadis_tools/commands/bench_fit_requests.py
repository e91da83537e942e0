"""``trencadis bench fit --requests``: step times from the times of requests of an engine that cannot be recorded, and held-out errors."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from trencadis.api import Config, Registry
from trencadis.console import print_table, track
from trencadis.errors import ConfigError
from trencadis_tools.simulation.fleet import NUM_BLOCKS

if TYPE_CHECKING:
    from trencadis_tools.simulation.measured_requests import MeasuredRun
    from trencadis_tools.simulation.request_fit import LatencyErrors, RequestFit

__all__ = ["run"]

_UNITS = {
    "base_s": ("each step", "ms", 1e3),
    "prefill_token_s": ("each prompt token", "µs", 1e6),
    "context_s": ("each KV entry read", "ns", 1e9),
    "row_s": ("each sequence", "µs", 1e6),
}
_TOLD = 0.5
_SHARE = 0.2


def run(args: argparse.Namespace, config: Config, registry: Registry) -> dict[str, Any]:
    """Fit and print; return the content of a step-time file.

    Raises:
        ConfigError: Requests cannot be read, are too few, or are refused by the simulated engine.
        TrencadisError: A policy failed.
    """
    from trencadis_tools.simulation.measured_requests import read_measured
    from trencadis_tools.simulation.request_fit import fit_requests, latency_errors, predicted
    from trencadis_tools.simulation.step_times import load_step_times, step_times_json

    share = _share(args.held_out)
    measured = read_measured(Path(args.requests))
    other = None if share is not None else read_measured(Path(args.held_out))
    total = len(measured.requests)
    num_fitted = total if share is None else total - max(1, round(share * total))
    start = load_step_times(args.sheet) if args.sheet else None
    with track("Fitting", unit="simulations") as advance:
        fit = fit_requests(
            config,
            registry,
            measured,
            num_fitted=num_fitted,
            start=start,
            leave_out=[name.strip() for name in args.leave_out.split(",") if name.strip()],
            note=advance,
        )
    errors = {"fitted": latency_errors(measured, fit.run, end=num_fitted)}
    if other is None:
        errors["held out"] = latency_errors(measured, fit.run, first=num_fitted)
    else:
        errors["held out"] = latency_errors(other, predicted(config, registry, other, fit.times))
    written = step_times_json(fit.times, _facts(args, config, fit, errors, num_fitted))
    if not args.json:
        _print(config, measured, other, fit, errors, num_fitted)
    return written


def _share(text: str | None) -> float | None:
    """Return the share of the last requests to hold out; None: another file is held out."""
    try:
        share = float(text) if text else _SHARE
    except ValueError:
        return None
    if not 0 < share < 1:
        raise ConfigError(
            f"flag --held-out: {share:g} is no share of the requests.", hint="Write one such as 0.2, or a file."
        )
    return share


def _engine(config: Config) -> dict[str, Any]:
    """Return the settings, apart from step times, that the simulation depends on."""
    return {
        "scheduling": config.scheduling.name,
        "max_num_seqs": config.engine.max_num_seqs,
        "max_num_batched_tokens": config.engine.max_num_batched_tokens,
        "num_blocks": config.cache.num_blocks or NUM_BLOCKS,
        "block_size": config.cache.block_size or 16,
    }


def _facts(
    args: argparse.Namespace,
    config: Config,
    fit: RequestFit,
    errors: Mapping[str, Mapping[str, LatencyErrors]],
    num_fitted: int,
) -> dict[str, Any]:
    return {
        "standard_errors": {name: term.error for name, term in fit.terms.items()},
        "told": {name: term.told for name, term in fit.terms.items()},
        "provenance": {
            "requests": args.requests,
            "held_out": args.held_out or str(_SHARE),
            "sheet": args.sheet,
            "device": args.device,
            "num_requests": num_fitted,
            "num_simulations": fit.num_simulations,
            "engine": _engine(config),
        },
        "errors": {part: {name: attrs.asdict(one) for name, one in of.items()} for part, of in errors.items()},
    }


def _print(
    config: Config,
    measured: MeasuredRun,
    other: MeasuredRun | None,
    fit: RequestFit,
    errors: Mapping[str, Mapping[str, LatencyErrors]],
    num_fitted: int,
) -> None:
    engine = ", ".join(f"{name} {value}" for name, value in _engine(config).items())
    print(f"{num_fitted} of {len(measured.requests)} requests fitted in {fit.num_simulations} simulations: {engine}.")
    rows = [
        (
            _UNITS[name][0],
            name,
            f"{term.value * _UNITS[name][2]:.4g}",
            f"{term.error * _UNITS[name][2]:.2g}",
            _UNITS[name][1],
            f"{term.told:.0%}",
        )
        for name, term in fit.terms.items()
    ]
    print_table(("time", "coefficient", "value", "standard error", "unit", "told by the requests"), rows)
    print_table(
        ("requests", "latency", "measured", "simulated: mean", "p50", "p99", "each"),
        [
            (
                f"{part}, {one.num_requests}",
                name,
                f"{one.measured_s:.4g} s",
                *(f"{error:+.1%}" for error in (one.mean, one.p50, one.p99)),
                f"{one.each:.1%}",
            )
            for part, of in errors.items()
            for name, one in of.items()
        ],
    )
    for note in _notes(config, [measured, *([other] if other else [])], fit):
        print(note)


def _notes(config: Config, files: list[MeasuredRun], fit: RequestFit) -> list[str]:
    """Return notes about the fit, in sentences. Pure."""
    notes = []
    untold = [name for name, term in fit.terms.items() if term.told < _TOLD]
    if untold:
        notes.append(
            f"The requests do not tell {' and '.join(untold)} from the other coefficients: it stayed near where the fit began (--sheet). "
            "What is simulated with other lengths or numbers of sequences depends on it."
        )
    if not config.cache.num_blocks:
        notes.append(
            f"Simulated with {NUM_BLOCKS} KV blocks, the default: set cache.num_blocks to what the measured engine had."
        )
    for file in files:
        if file.num_failed:
            notes.append(
                f"{file.name}: {file.num_failed} requests with an error are left out, and the load that they were."
            )
        if file.num_cached:
            notes.append(
                f"{file.name}: {file.num_cached} requests had prompt tokens from a cache, which the simulation computes: the fit makes prompt tokens too cheap."
            )
    return notes
