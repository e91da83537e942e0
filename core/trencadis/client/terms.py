"""The terms of many requests, from one value for all or a list."""

from __future__ import annotations

from typing import Any

from trencadis.client.prompts import at_prompt, per_prompt
from trencadis.errors import RequestError
from trencadis.records import DEFAULT_TERMS, RequestTerms

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


def terms_per_prompt(num_prompts: int, **given: Any) -> list[RequestTerms]:
    """Return the terms of each prompt. Pure.

    Args:
        num_prompts: How many there are.
        given: By field of ``RequestTerms``: one value for all, a list or tuple with one for each, or None for the default.

    Raises:
        InvalidRequestError: A list of another length; the message has the name that ``LLM.generate`` gives it. Or an impossible
            value; the message has the index of the prompt if there are several.
    """
    columns = {
        name: per_prompt(value, num_prompts, name=_LIST_OF[name], default=getattr(DEFAULT_TERMS, name))
        for name, value in given.items()
    }
    terms = []
    for index in range(num_prompts):
        try:
            terms.append(RequestTerms(**{name: column[index] for name, column in columns.items()}))
        except RequestError as error:
            raise at_prompt(error, index) if num_prompts > 1 else error from None
    return terms
