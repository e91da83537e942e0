"""Assumptions of a simulation, in words: step times, and acceptance of drafts."""

from __future__ import annotations

from collections.abc import Mapping

from trencadis_tools.simulation import DraftFacts, StepTimes
from trencadis_tools.simulation.drafts import ANY
from trencadis_tools.simulation.step_times import BucketStepTimes, LinearStepTimes, SheetStepTimes

__all__ = ["drafts_in_words", "step_times_in_words"]

_PARTS = {
    "base_s": "a step",
    "token_s": "a token",
    "prefill_token_s": "a prompt token in addition",
    "context_s": "a KV entry that is read",
    "product_s": "a pair of a prompt token and a KV entry that it reads",
    "row_s": "a sequence",
    "host_base_s": "a step on the host",
    "host_row_s": "a sequence on the host",
    "host_new_s": "an admitted sequence on the host",
}


def step_times_in_words(name: str, step_times: StepTimes) -> str:
    """Return the step times in words. Pure.

    Args:
        name: Name or path that the user gave; empty: the default.
        step_times: Model of step times.
    """
    source = f"{name}: " if name else "the default, an RTX 4090 with Llama 3.1 8B: "
    if isinstance(step_times, LinearStepTimes):
        parts = [f"{_time(value)} {words}" for key, words in _PARTS.items() if (value := getattr(step_times, key))]
        return source + ", ".join(parts)
    if isinstance(step_times, SheetStepTimes):
        model, num = step_times.model, step_times.tensor
        return (
            f"{source}{f'{num} x ' if num > 1 else ''}{step_times.device.name}, a model of {model.num_layers} layers and hidden size "
            f"{model.hidden_size:,} in {model.dtype}"
        )
    if isinstance(step_times, BucketStepTimes):
        return f"{source}measured times of {len(step_times.times_s)} buckets"
    return source.removesuffix(": ")


def drafts_in_words(drafts: Mapping[str, DraftFacts]) -> list[str]:
    """Return the acceptance and cost of each speculator's drafts, in words. Pure."""
    return [
        f"drafts of {'every speculator' if name == ANY else name}: {', '.join(_draft_parts(one))}"
        for name, one in drafts.items()
    ]


def _draft_parts(facts: DraftFacts) -> list[str]:
    by_position = ", ".join(f"{share:g}" for share in facts.acceptance_by_position)
    right = f"by position {by_position}" if facts.acceptance is None else f"{facts.acceptance:g}"
    parts = [f"chance of being right {right}"]
    parts += [f"of each request up to {facts.spread:g} more or less"] if facts.spread else []
    parts += [f"made in {100 * facts.found:g} % of the steps"] if facts.found < 1 else []
    parts += [f"{_time(facts.step_s)} in each step"] if facts.step_s else []
    parts += [f"{_time(facts.token_s)} for each"] if facts.token_s else []
    parts += [f"{100 * facts.step_ratio:g} % of a step of the model for each"] if facts.step_ratio else []
    return parts


def _time(value_s: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if value_s * factor >= 1:
            return f"{value_s * factor:.3g} {unit}"
    return f"{value_s * 1e9:.3g} ns"
