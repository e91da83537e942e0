"""What speculation did for a command, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["speculation_summary"]


def speculation_summary(name: str, totals: Mapping[str, Any]) -> str:
    """Return drafted and accepted tokens, their ratio, and the mean of tokens that a sequence got in a step. Pure.

    Args:
        name: Name of the speculator that the configuration names.
        totals: Totals of an engine that ``LLM.totals`` returns.
    """
    now = totals["drafter"]
    if now != name:
        name = f"{name}, after a failure {now or 'off'}"
    drafted, accepted = totals["num_draft_tokens"], totals["num_accepted_tokens"]
    rate = f" ({accepted / drafted:.1%})" if drafted else ""
    mean = totals["num_emitted_tokens"] / max(1, totals["num_sequence_steps"])
    return f"speculation {name}: {drafted} tokens drafted, {accepted} accepted{rate}; {mean:.2f} tokens per step"
