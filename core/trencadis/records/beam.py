"""What a client may ask of beam search; validated when it is made."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import attrs

from trencadis.errors import InvalidRequestError
from trencadis.faults import shown
from trencadis.keywords import suggesting
from trencadis.records.sampling import MAX_INT, MAX_LOGPROBS

__all__ = ["BeamSearchParams"]


def _refuse(name: str, value: object, allowed: str) -> None:
    raise InvalidRequestError(
        f"beam search parameter {name} = {shown(value)} is impossible: it must be {allowed}.", field=name
    )


def _whole(low: int, high: int = MAX_INT, *, optional: bool = False) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None and optional:
            return
        if type(value) is not int or not low <= value <= high:
            _refuse(attribute.name, value, f"a whole number from {low} to {high}")

    return check


def _penalty(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or abs(value) > 10:
        _refuse(attribute.name, value, "a number from -10 to 10")


def _stopping(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, bool) and value != "never":
        _refuse(attribute.name, value, 'True, False or "never"')


def _as_tuple(value: Iterable[int] | None) -> tuple[int, ...]:
    return () if value is None else tuple(value)


def _ids(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not all(type(token) is int and token >= 0 for token in value):
        _refuse(attribute.name, value, "a list of token ids from 0")


@suggesting
@attrs.frozen(kw_only=True)
class BeamSearchParams:
    """How the most likely continuations of a prompt are searched. Frozen; validated at construction.

    The score of a continuation is the sum of its log-probabilities divided by its number of tokens, the one that ends it
    included, to the power of ``length_penalty``.

    Attributes:
        beam_width: Continuations that are followed at once, 1 to 49; with the tokens that may end a text at most 50.
        n: Continuations to return, best first, 1 to ``beam_width``; None returns all.
        max_tokens: The most tokens of a continuation; None means up to the model's length limit.
        length_penalty: Above 0 long texts gain, below 0 short ones; 0 compares plain sums. -10 to 10.
        early_stopping: When ``beam_width`` texts have ended, True ends the search. False ends it once the best running text, at
            its present length, scores no better than the worst of those; ``"never"`` once no running text can (with
            ``length_penalty`` above 0: at the greatest length).
        stop_token_ids: Tokens that end a text, besides the model's own end-of-sequence tokens.
        ignore_eos: Do not end at the model's end-of-sequence tokens.
        include_stop_str_in_output: Keep the text of the token that ended it.
        skip_special_tokens: Leave special tokens out of the returned text.
        logprobs: Alternatives to report at each output token, 0 to ``beam_width``; None reports nothing.

    Raises:
        InvalidRequestError: A value is out of range; the message names it.

    Source: transformers 5, ``GenerationMixin._beam_search``, for scores and for when the search ends.
    """

    beam_width: int = attrs.field(default=4, validator=_whole(1, MAX_LOGPROBS - 1))
    n: int | None = attrs.field(default=None, validator=_whole(1, optional=True))
    max_tokens: int | None = attrs.field(default=16, validator=_whole(1, optional=True))
    length_penalty: float = attrs.field(default=1.0, validator=_penalty)
    early_stopping: bool | Literal["never"] = attrs.field(default=False, validator=_stopping)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_as_tuple, validator=_ids)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = attrs.field(default=None, validator=_whole(0, optional=True))

    def __attrs_post_init__(self) -> None:
        if self.n is not None and self.n > self.beam_width:
            _refuse("n", self.n, f"at most beam_width = {self.beam_width}")
        if self.logprobs is not None and self.logprobs > self.beam_width:
            _refuse("logprobs", self.logprobs, f"at most beam_width = {self.beam_width}")

    @property
    def num_returned(self) -> int:
        """Continuations to return."""
        return self.beam_width if self.n is None else self.n
