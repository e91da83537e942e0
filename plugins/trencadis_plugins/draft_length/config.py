"""Config tables of the draft lengths."""

from __future__ import annotations

import attrs
from attrs.validators import and_, ge, gt, le, lt

from trencadis.interfaces import setting
from trencadis_plugins.draft_length.sizes import read_sizes

__all__ = ["FixedConfig", "GoodputConfig", "TableConfig"]


def _check_sizes(_: object, attribute: attrs.Attribute[tuple[str, ...]], value: tuple[str, ...]) -> None:
    read_sizes(value)


@attrs.frozen(kw_only=True)
class FixedConfig:
    """Table ``[draft_length.fixed]``.

    Attributes:
        num_draft_tokens: How many; 0 for as many as the speculator makes.
    """

    num_draft_tokens: int = setting(
        0, "Drafts of a sequence in a step; 0: as many as the speculator makes.", unit="tokens", validator=ge(0)
    )


@attrs.frozen(kw_only=True)
class TableConfig:
    """Table ``[draft_length.table]``.

    The default drafts freely while a step mostly reads weights, and not at all once arithmetic fills it: a draft is then as dear as the
    token that it may save.

    Attributes:
        sizes: ``low-high:drafts`` by the number of decoding sequences, ascending, without gap or overlap; the first ``low`` is 1,
            the last ``high`` may be left out. ``all``: as many as the speculator makes.
    """

    sizes: tuple[str, ...] = setting(
        ("1-8:all", "9-32:3", "33-128:1", "129-:0"),
        'Drafts of a sequence by decoding sequences: low-high:drafts, from 1 up; "all": as many as the speculator makes.',
        unit="tokens",
        validator=_check_sizes,
    )


@attrs.frozen(kw_only=True)
class GoodputConfig:
    """Table ``[draft_length.goodput]``.

    Attributes:
        smoothing: Weight of the newest verdict in a sequence's moving acceptance.
        prior_weight: Verdicts that the acceptance of all sequences counts for in that of one.
        margin_ratio: Gain that it takes to begin drafting; it goes on while there is any.
        probe_steps: Steps between two trials where nothing is drafted; more if trials would cost over 1 %.
    """

    smoothing: float = setting(
        0.1,
        "Weight of the newest verdict in a sequence's moving acceptance.",
        unit="ratio",
        validator=and_(gt(0), lt(1)),
    )
    prior_weight: float = setting(
        2.0, "What the acceptance of all sequences counts for in that of one.", unit="verdicts", validator=gt(0)
    )
    margin_ratio: float = setting(
        0.03,
        "Gain that it takes to begin drafting; it goes on while there is any.",
        unit="ratio",
        validator=and_(ge(0), le(1)),
    )
    probe_steps: int = setting(
        64, "Fewest steps between two trials of one draft where nothing is drafted.", unit="steps", validator=ge(1)
    )
