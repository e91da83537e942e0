"""``trencadis warmup``: prepare every bucket, print the costs, and check that requests need no further compilation."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from trencadis.api import Config, Registry
from trencadis.console import print_table

if TYPE_CHECKING:
    from trencadis.api import Engine

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument(
        "--requests", type=int, default=8, metavar="N", help="requests to run afterwards (default: 8; 0: none)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Warm up and print; returns 0.

    Raises:
        ConfigValueError: There is nothing to warm up, or a negative number of requests.
        StepFailedError: A request failed.
        TrencadisError: The engine cannot be built.
    """
    from trencadis.api import Engine, build_engine
    from trencadis.console import track
    from trencadis.errors import ConfigValueError

    if args.requests < 0:
        raise ConfigValueError(f"trencadis warmup --requests {args.requests}: must be at least 0.")
    with track(f"Warming up {config.model.path}", unit="buckets") as advance:
        engine = build_engine(config, registry=registry, progress=advance)
    try:
        if not isinstance(engine, Engine) or not engine.warm_up.buckets:
            raise ConfigValueError(
                f"trencadis warmup: {config.model.path} has no buckets with this configuration.",
                hint='Choose a backend with a padded layout, such as [backend] name = "gaudi", and a bucketing with a table.',
            )
        _serve(engine, args.requests)
        report = _report(engine)
    finally:
        engine.close()
    if args.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0


def _serve(engine: Engine, num_requests: int) -> None:
    """Run greedy requests of many lengths at once, a few tokens each."""
    from trencadis.errors import StepFailedError
    from trencadis.records import FinishReason, Request, SamplingParams

    special = set(engine.model.eos_token_ids)
    tokens = [token for token in range(min(engine.model.vocab_size, 1000)) if token not in special]
    longest = max(1, engine.max_model_len // 2)
    for index in range(num_requests):
        length = max(1, longest * (index + 1) // num_requests)
        prompt = tuple(tokens[(7 * index + place) % len(tokens)] for place in range(length))
        max_tokens = max(1, min(8, engine.max_model_len - length))
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        engine.add(Request(request_id=f"warmup/{index}", prompt_token_ids=prompt, params=params))
    while engine.has_work:
        for finished in engine.step().finished:
            if finished.finish_reason is FinishReason.ERROR:
                raise StepFailedError(f"request {finished.request_id!r} failed: {finished.error}")


def _report(engine: Engine) -> dict[str, Any]:
    from trencadis.records import Phase

    warm_up, totals = engine.warm_up, engine.totals
    return {
        "num_buckets": len(warm_up.buckets),
        "num_prefill_buckets": sum(bucket.phase is Phase.PREFILL for bucket in warm_up.buckets),
        "num_decode_buckets": sum(bucket.phase is Phase.DECODE for bucket in warm_up.buckets),
        "num_prepared": len(warm_up.report.prepared),
        "num_deferred": warm_up.report.num_deferred,
        "skipped": [
            [bucket.phase.value, bucket.batch_size, bucket.query_len, bucket.num_blocks] for bucket in warm_up.skipped
        ],
        "num_graphs": warm_up.report.num_graphs,
        "num_compilations": warm_up.report.num_compilations,
        "num_cached": warm_up.report.num_cached,
        "graph_bytes": warm_up.report.graph_bytes,
        "took_s": warm_up.took_s,
        "num_requests": totals.num_finished,
        "num_fallbacks": totals.num_fallbacks,
        "num_substituted": totals.num_substituted,
        "num_recompilations": totals.num_compilations,
        "padding_ratio": 1 - totals.num_scheduled_tokens / totals.num_padded_tokens
        if totals.num_padded_tokens
        else 0.0,
    }


def _print(report: dict[str, Any]) -> None:
    rows = [(name, _show(value)) for name, value in report.items() if name != "skipped"]
    print_table(("measure", "value"), [*rows, ("skipped", _list(report["skipped"]))])


def _show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _list(skipped: list[list[Any]]) -> str:
    return ", ".join(f"{phase} {batch}x{query}+{blocks}" for phase, batch, query, blocks in skipped) or "none"
