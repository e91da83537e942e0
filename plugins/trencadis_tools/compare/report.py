"""A comparison as one self-contained page of HTML: verdicts, plots, and the data to repeat it."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trencadis.errors import ConfigError
from trencadis_tools.compare.comparison import Comparison
from trencadis_tools.compare.decisions import decision_notes
from trencadis_tools.compare.experiment import PointResult, rate_of
from trencadis_tools.compare.metrics import metric_of
from trencadis_tools.compare.plots import cdf_plot, differences_plot, effects_plot, line_plot, sequence_plot
from trencadis_tools.compare.record import workload_digest
from trencadis_tools.compare.wording import outcome_notes, sentence, show, table_of

__all__ = ["page_of", "write_report"]

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #111; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; font-size: .875rem; }
caption { text-align: left; font-weight: bold; padding: .3rem 0; }
th, td { border: 1px solid #999; padding: .25rem .6rem; text-align: left; white-space: nowrap; }
th:first-child, td:first-child { white-space: normal; }
td:last-child { white-space: normal; overflow-wrap: anywhere; min-width: 10rem; }
thead th { background: #eee; }
figure { margin: 1.5rem 0; overflow-x: auto; } figcaption { font-style: italic; } svg { max-width: 100%; min-width: 40rem; height: auto; }
pre { background: #f4f4f4; padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #181818; } thead th { background: #333; } pre { background: #262626; } svg { background: #fff; }
}
"""


def write_report(file: Path, comparison: Comparison, *, command: str) -> None:
    """Write the page.

    Args:
        file: Output file.
        comparison: Comparison to report.
        command: Command line that repeats the comparison.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    page = page_of(comparison, command=command)
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error}.", hint="Give another path to --out.") from error


def page_of(comparison: Comparison, *, command: str) -> str:
    """Return the page; equal comparisons give equal pages.

    Args:
        comparison: Comparison to report.
        command: Command line that repeats the comparison.

    Raises:
        ConfigError: matplotlib is missing.
    """
    names = [name for name, _ in comparison.arguments.configs]
    title = f"{' against '.join([' and '.join(names[1:]), names[0]])} on {comparison.arguments.workload}"
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>",
        f"<h1>{html.escape(title)}</h1>",
        *_verdicts(comparison),
        *_who(comparison),
        *_numbers(comparison),
        *_lines(comparison.results),
        *(part for result in comparison.results for part in _of_point(result)),
        *_provenance(comparison, command),
        "</main>\n</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{html.escape(heading)}</th>' for heading in headings)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>\n<caption>{html.escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _figure(svg: str, caption: str) -> str:
    text = html.escape(caption)
    return f'<figure role="group" aria-label="{text}">\n{svg}\n<figcaption>{text}</figcaption>\n</figure>'


def _list(items: Sequence[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{html.escape(item)}</li>" for item in items) + "\n</ul>"


def _growing(result: PointResult) -> list[str]:
    return [outcome.name for outcome in result.judgement.outcomes if outcome.backlog.is_growing]


def _at(result: PointResult) -> str:
    return f" at {result.point}" if str(result.point) else ""


def _verdicts(comparison: Comparison) -> Iterator[str]:
    yield "<h2>Verdict</h2>"
    for result in comparison.results:
        baseline = result.judgement.outcomes[0].name
        if str(result.point):
            yield f"<h3>{html.escape(str(result.point))}</h3>"
        yield _list([sentence(effect, baseline, _growing(result)) for effect in result.judgement.effects])
        notes = [*decision_notes(result), *outcome_notes(result)]
        if notes:
            yield _list(notes)


def _who(comparison: Comparison) -> Iterator[str]:
    """Yield the baseline, the settings that differ between configurations, and those that all share."""
    configs = dict(comparison.arguments.configs)
    paths = sorted({path for given in configs.values() for path in given})
    apart = [path for path in paths if len({_in_words(given.get(path)) for given in configs.values()}) > 1]
    rows = [
        (
            name,
            "candidate" if number else "baseline",
            "; ".join(f"{path} = {_in_words(given[path]) if path in given else 'its default'}" for path in apart),
        )
        for number, (name, given) in enumerate(configs.items())
    ]
    yield "<h2>Who is who</h2>"
    yield _table("What sets them apart", ("configuration", "is the", "settings"), rows)
    first = next(iter(configs.values()))
    same = [f"{path} = {_in_words(first[path])}" for path in paths if path not in apart]
    yield f"<p>Set in all of them: {html.escape('; '.join(same) or 'nothing')}. Everything else is at its default.</p>"


def _in_words(value: Any) -> str:
    """Return the value of a setting in the form of a flag."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(map(_in_words, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_in_words(item)}" for key, item in value.items()) or "none"
    return str(value) if value not in ("", None) else "none"


def _numbers(comparison: Comparison) -> Iterator[str]:
    yield "<h2>In numbers</h2>"
    yield _table("Each configuration against the baseline, by each metric", *table_of(comparison.results))
    picture = effects_plot(comparison.results)
    if picture:
        baseline = comparison.results[0].judgement.outcomes[0].name
        yield _figure(picture, f"Differences from {baseline} in per cent, with 95 % intervals")
    yield (
        "<p>better: the 95 % interval of the difference does not hold 0, the difference is at least 2 % of the baseline, and p adjusted "
        "by Holm for the number of configurations is at most .05. equal: the interval lies within ±2 %. open: neither. "
        "unstable: more requests arrive than are answered, so that latencies have no value.</p>"
    )


def _lines(results: Sequence[PointResult]) -> Iterator[str]:
    """Yield plots of metrics over rates (one for each combination of swept settings) and over swept settings (one for each rate)."""
    names = dict.fromkeys(effect.metric for effect in results[0].judgement.effects)
    metrics = [metric_of(name) for name in names]
    groups: dict[tuple[str, str], list[tuple[Any, PointResult]]] = defaultdict(list)
    for result in results:
        swept, rate = result.point.swept, result.point.rate
        if rate:
            at = ", ".join(f"{path} = {value}" for path, value in swept.items())
            groups["rate, requests/s", at].append((rate, result))
        for path, value in swept.items():
            others = [f"{other} = {text}" for other, text in swept.items() if other != path]
            others += [f"rate {rate:g}"] if rate else []
            groups[path, ", ".join(others)].append((_number(value), result))
    groups = {key: members for key, members in groups.items() if len(members) > 1}
    if groups:
        yield "<h2>Over rates and settings</h2>"
    for (label, at), members in groups.items():
        own = sorted(members, key=lambda item: item[0]) if _are_numbers(members) else members
        xs = [x if _are_numbers(members) else str(x) for x, _ in own]
        for metric in metrics:
            caption = f"{metric.name} over {label}" + (f", {at}" if at else "")
            yield _figure(line_plot([result for _, result in own], metric, xs=xs, label=label), caption)


def _are_numbers(members: Sequence[tuple[Any, PointResult]]) -> bool:
    return all(isinstance(x, float) for x, _ in members)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _of_point(result: PointResult) -> Iterator[str]:
    baseline = result.judgement.outcomes[0].name
    at = _at(result)
    growing = _growing(result)
    if len(growing) < len(result.candidates):
        yield f"<h2>Distributions{html.escape(at)}</h2>"
        without = f", without {' and '.join(growing)}, unstable" if growing else ""
        yield _figure(cdf_plot(result), f"Shares of requests by TTFT, TPOT and E2E{at}, all runs together{without}")
    shown = [effect for effect in result.judgement.effects if any(effect.differences)]
    if shown:
        yield f"<h2>Pairs{html.escape(at)}</h2>"
    for effect in shown:
        what = f"{effect.metric}, {effect.other} minus {baseline}{at}"
        yield _figure(differences_plot(effect, baseline), f"Paired differences of {what}")
        if np.isfinite(effect.sequence[-1].low):
            yield _figure(sequence_plot(effect, baseline), f"Confidence sequence of {what}")


def _provenance(comparison: Comparison, command: str) -> Iterator[str]:
    yield "<h2>How it was made</h2>"
    yield f"<p>Run it again:</p>\n<pre>{html.escape(command)}</pre>"
    arguments = comparison.arguments
    how = "measured on real engines in turns" if arguments.live else _simulated(arguments.replicas)
    lines = [how, *(f"{name} {version}" for name, version in comparison.record["made_with"].items() if version)]
    lines += comparison.assumed
    yield _list(lines)
    rows = [
        (str(result.point) or "-", candidate.name, candidate.plan_hash)
        for result in comparison.results
        for candidate in result.candidates
    ]
    yield _table("Plans", ("at", "config", "plan hash"), rows)
    yield _table(
        f"Workload {arguments.workload}",
        ("at", "seed", "requests", "requests/s", "mean prompt tokens", "mean output tokens", "digest"),
        list(_workloads(comparison.results)),
    )


def _simulated(replicas: int) -> str:
    return "simulated, one replica" if replicas == 1 else f"simulated, {replicas} replicas"


def _workloads(results: Sequence[PointResult]) -> Iterator[tuple[str, ...]]:
    for result in results:
        for workload in result.workloads:
            requests = workload.requests
            yield (
                str(result.point) or "-",
                str(workload.seed),
                str(len(requests)),
                show(rate_of(workload)),
                show(float(np.mean([request.num_prompt_tokens for request in requests]))),
                show(float(np.mean([request.num_output_tokens for request in requests]))),
                workload_digest(workload),
            )
