"""The terms of many requests, from one value for all or a list."""

from __future__ import annotations

from typing import Any

from trencadis.front.prompts import per_prompt
from trencadis.records import DEFAULT_TERMS

__all__ = ["terms_per_prompt"]

_LIST_OF = {
    "priority": "priorities",
    "tenant": "tenants",
    "cache_salt": "cache_salts",
    "weight": "weights",
    "ttft_target_s": "ttft_targets_s",
    "tpot_target_s": "tpot_targets_s",
    "adapter": "adapters",
    "transfer_params": "transfer_params",
}
"""What ``LLM.generate`` calls the lists of each of the terms."""


def terms_per_prompt(num_prompts: int, **given: Any) -> list[dict[str, Any]]:
    """Return the arguments of each prompt's ``RequestTerms``; they are checked when that is made. Pure.

    Args:
        num_prompts: How many there are.
        given: By field of ``RequestTerms``: one value for all, a list or tuple with one for each, or None for the default.

    Raises:
        InvalidRequestError: A list of another length; the message has the name that ``LLM.generate`` gives it.
    """
    columns = {
        name: per_prompt(value, num_prompts, name=_LIST_OF[name], default=getattr(DEFAULT_TERMS, name))
        for name, value in given.items()
    }
    return [{name: column[index] for name, column in columns.items()} for index in range(num_prompts)]
