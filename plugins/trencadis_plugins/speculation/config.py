"""Config tables of the speculators."""

from __future__ import annotations

from typing import Any

import attrs
from attrs.validators import and_, deep_iterable, ge, in_, instance_of, le, lt, min_len

from trencadis.interfaces import setting
from trencadis_plugins.speculation.draft_config import TreeConfig

__all__ = ["HeadConfig", "MixedConfig", "NgramConfig", "SuffixConfig"]

_OCCURRENCES = ("latest", "earliest")


def _most_drafts(default: int) -> Any:
    return setting(default, "Most drafts of a sequence in a step.", unit="tokens", validator=ge(1))


@attrs.frozen(kw_only=True)
class HeadConfig(TreeConfig):
    """Table ``[speculation.head]``; which head is ``model.head``.

    Attributes:
        max_draft_tokens: Most drafts of a sequence in a step.
        min_probability: Drafts in a line end before the first that the head gives less; 0: they do not.
    """

    max_draft_tokens: int = _most_drafts(6)
    min_probability: float = setting(
        0.0,
        "Drafts in a line end before the first that is less probable, by the head; 0: they do not.",
        validator=and_(ge(0.0), lt(1.0)),
    )


@attrs.frozen(kw_only=True)
class NgramConfig:
    """Table ``[speculation.ngram]``.

    Attributes:
        max_draft_tokens: Most drafts of a sequence in a step.
        min_match: Shortest run of tokens that is looked up.
        max_match: Longest.
        occurrence: Which occurrence of the longest run counts.
        continue_period: Draft beyond the end of the text where it repeats itself.
    """

    max_draft_tokens: int = _most_drafts(4)
    min_match: int = setting(2, "Shortest run of last tokens that is looked up.", unit="tokens", validator=ge(1))
    max_match: int = setting(4, "Longest run of last tokens that is looked up.", unit="tokens", validator=ge(1))
    occurrence: str = setting(
        "latest", f"Which occurrence of a run counts: {', '.join(_OCCURRENCES)}.", validator=in_(_OCCURRENCES)
    )
    continue_period: bool = setting(
        True, "Where what followed reaches the end of the text, the text repeats itself: draft on as it does."
    )


@attrs.frozen(kw_only=True)
class SuffixConfig:
    """Table ``[speculation.suffix]``. Source: Oliaro et al., SuffixDecoding, arXiv 2411.04975.

    Attributes:
        max_draft_tokens: Most drafts of a sequence in a step.
        max_depth: Longest run of tokens that is remembered, the match and its drafts together.
        factor: Drafts for each token of a match.
        offset: Drafts on top of that.
        min_prob: Least probability of a draft's path.
        tree: Draft trees: the most probable paths, not one.
        max_cached_requests: Finished requests whose outputs are remembered.
        max_cached_tokens: Their output tokens, all tenants together.
    """

    max_draft_tokens: int = _most_drafts(8)
    max_depth: int = setting(
        24,
        "Longest run of tokens that is remembered, the match and its drafts together.",
        unit="tokens",
        validator=ge(2),
    )
    factor: float = setting(1.0, "Drafts for each token that matches.", unit="tokens", validator=ge(0.0))
    offset: float = setting(0.0, "Drafts on top of that.", unit="tokens")
    min_prob: float = setting(
        0.1, "A draft's path must have been taken at least so often.", validator=and_(ge(0.0), le(1.0))
    )
    tree: bool = setting(False, "Draft several tokens after one, the most frequent first.")
    max_cached_requests: int = setting(
        10_000, "Finished requests whose outputs are remembered; 0: none.", unit="requests", validator=ge(0)
    )
    max_cached_tokens: int = setting(
        500_000, "Output tokens that are remembered, all tenants together; 0: none.", unit="tokens", validator=ge(0)
    )


@attrs.frozen(kw_only=True)
class MixedConfig:
    """Table ``[speculation.mixed]``; its members have their own tables.

    Attributes:
        members: Speculators to choose among, the cheapest first.
        explore_every: A request asks its other members once in so many steps.
        prior_weight: Number of steps that the evidence of a tenant's other requests counts as.
        memory: Steps after which what a member has shown counts a third.
    """

    members: tuple[str, ...] = setting(
        ("ngram", "suffix"),
        "Speculators to choose among, the cheapest first.",
        validator=and_(min_len(1), deep_iterable(instance_of(str))),
        component="speculation",
    )
    explore_every: int = setting(
        32,
        "A request tries the member it has asked least once in so many steps; 0: never.",
        unit="steps",
        validator=ge(0),
    )
    prior_weight: float = setting(
        4.0, "What the tenant's requests have shown counts as so many steps.", validator=ge(0.0)
    )
    memory: int = setting(
        32, "Steps after which what a member has shown counts a third.", unit="steps", validator=ge(1)
    )
