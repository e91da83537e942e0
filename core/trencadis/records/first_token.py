"""A first output token that another engine has chosen."""

from __future__ import annotations

import attrs

from trencadis.records.output import TokenLogprobs

__all__ = ["FirstToken"]


@attrs.frozen(kw_only=True)
class FirstToken:
    """What follows a prompt, chosen where the prompt was computed.

    Attributes:
        token_id: The token.
        logprobs: Log-probabilities of the token, if the request asked for some; ``index`` means nothing.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
