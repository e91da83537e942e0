"""What rounding costs: perplexity of a text, and how far probabilities are from those of fp32. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import chain, compress
from typing import Any

from peers.catalogue import OURS

__all__ = ["quality_of"]

NOT_SCORED = 8
"""First probabilities of a text, which are those of any text."""

Record = Mapping[str, Any]


def quality_of(scores: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a row for each model, precision and engine.

    Tokens of which an engine does not tell the probability count for none.

    Args:
        scores: ``model``, ``precision``, ``engine``, ``logprobs`` (of each text), ``is_text``: of a model that can read.

    Returns:
        ``perplexity`` of texts, None of tokens that were drawn; ``from_fp32``, the mean distance of the natural logarithms of
        probabilities from those of our fp32, None where that was not measured; ``num_scored``.
    """
    found: dict[tuple[str, str, str], Record] = {}
    for score in scores:
        found.setdefault((score["model"], score["precision"], score["engine"]), score)
    known: dict[str, list[bool]] = {}
    for (model, _, _), score in found.items():
        told = [not math.isnan(value) for value in _scored(score)]
        known[model] = [one and other for one, other in zip(told, known.get(model, told), strict=True)]
    rows = []
    for (model, precision, engine), score in found.items():
        values, reference = list(compress(_scored(score), known[model])), found.get((model, "fp32", OURS))
        distance = None
        if reference is not None and reference is not score:
            pairs = zip(values, compress(_scored(reference), known[model]), strict=True)
            distance = statistics.fmean(abs(one - other) for one, other in pairs)
        perplexity = math.exp(-statistics.fmean(values)) if score["is_text"] else None
        about = {"model": model, "precision": precision, "engine": engine, "num_scored": len(values)}
        rows.append({**about, "perplexity": perplexity, "from_fp32": distance})
    return rows


def _scored(score: Record) -> list[float]:
    return list(chain.from_iterable(text[NOT_SCORED:] for text in score["logprobs"]))
