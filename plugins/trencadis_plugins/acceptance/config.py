"""Config tables of the acceptance rules."""

from __future__ import annotations

from typing import Any

import attrs
from attrs.validators import and_, deep_iterable, ge, gt, le, lt, min_len

from trencadis.interfaces import setting

__all__ = ["SyntheticConfig", "TypicalConfig"]


@attrs.frozen(kw_only=True)
class TypicalConfig:
    """Table ``[acceptance.typical]``.

    Attributes:
        epsilon: A draft that the model gives more than this always stands, 0 .. 1.
        delta: The threshold is this times exp(-entropy) where that is lower.
    """

    epsilon: float = setting(
        0.09, "A draft that the model gives more than this probability always stands.", validator=and_(gt(0.0), lt(1.0))
    )
    delta: float = setting(
        0.3,
        "Where it is lower, the threshold is this times exp(-entropy of the model's distribution).",
        validator=gt(0.0),
    )


def _fits(config: Any, attribute: attrs.Attribute[float], value: float) -> None:
    if value and value < 1:
        raise ValueError(f"'{attribute.name}' must be 0, or at least 1: every step has one token. Got {value}.")


@attrs.frozen(kw_only=True)
class SyntheticConfig:
    """Table ``[acceptance.synthetic]``.

    Attributes:
        rates: Chance that the draft at each place stands if those before it do, 0 .. 1 each; the last holds for all further places.
        mean_tokens: Mean tokens of a step instead, 1 or more, if drafts enough are made; 0: go by ``rates``.
    """

    rates: tuple[float, ...] = setting(
        (0.8,),
        "Chance that the draft at each place stands if those before it do; the last is that of all further places.",
        validator=and_(min_len(1), deep_iterable(and_(ge(0.0), le(1.0)))),
    )
    mean_tokens: float = setting(
        0.0,
        "Mean tokens of a step, if so many drafts are made; 0: go by rates.",
        unit="tokens",
        validator=and_(ge(0.0), _fits),
    )

    def place_rates(self) -> tuple[float, ...]:
        """Return the rates of the places; at least one, the last for all further places. Pure.

        A mean of 3.4 is two drafts that always stand, one that does in four steps of ten, and none after it.
        """
        if not self.mean_tokens:
            return self.rates
        whole, part = divmod(self.mean_tokens - 1, 1)
        return (*[1.0] * int(whole), part, 0.0)
