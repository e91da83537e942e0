"""Config tables of the built-in scheduling policies.

Every policy has the settings of :class:`FcfsConfig`; its own come on top.
"""

from __future__ import annotations

import attrs
from attrs.validators import and_, deep_iterable, ge, gt, in_, instance_of

from trencadis.interfaces import setting

__all__ = [
    "DeadlineConfig",
    "FairShareConfig",
    "FcfsConfig",
    "PrefillFirstConfig",
    "PrefixAffinityConfig",
    "PriorityConfig",
    "ShortestFirstConfig",
]

_VICTIMS = ("youngest", "least_computed", "cheapest", "lowest_priority")


@attrs.frozen(kw_only=True)
class FcfsConfig:
    """Table ``[scheduling.fcfs]``: how far prompts may slow decodes down, and who loses its blocks.

    The step-time model's defaults are those of ``trencadis bench schedule``: an 8-billion-parameter model in bfloat16 on one
    RTX 4090. Source: docs/decisions/0014-scheduling-policies-learn-of-requests.md.
    """

    max_prefill_tokens: int = setting(
        0, "Most prompt tokens of a step, all sequences together; 0: the token budget.", unit="tokens", validator=ge(0)
    )
    long_prefill_threshold: int = setting(
        0, "Most tokens of one prompt in a step; 0: the token budget.", unit="tokens", validator=ge(0)
    )
    chunk_sizes: tuple[int, ...] = setting(
        (),
        "A part of a prompt has one of these sizes, such as query lengths of buckets; none: any size.",
        unit="tokens",
        validator=deep_iterable(and_(instance_of(int), ge(1))),
    )
    tpot_target_ms: float = setting(
        0.0,
        "Prompts take no more of a step than keeps decodes this fast, by the step-time model; 0: no target.",
        unit="ms",
        validator=ge(0),
    )
    step_ms: float = setting(16.9, "Step-time model: time of an empty step.", unit="ms", validator=ge(0))
    token_us: float = setting(90.0, "Step-time model: time of each token.", unit="us", validator=ge(0))
    context_token_us: float = setting(
        0.135, "Step-time model: time of each KV entry that attention reads.", unit="us", validator=ge(0)
    )
    victim: str = setting(
        "youngest",
        f"Who loses its blocks when a running sequence needs one: {', '.join(_VICTIMS)}.",
        validator=in_(_VICTIMS),
    )


@attrs.frozen(kw_only=True)
class PriorityConfig(FcfsConfig):
    """Table ``[scheduling.priority]``."""

    victim: str = setting(
        "lowest_priority",
        f"Who loses its blocks when a running sequence needs one: {', '.join(_VICTIMS)}.",
        validator=in_(_VICTIMS),
    )
    age_s: float = setting(
        30.0, "Waiting this long is worth one step of priority; 0: never.", unit="s", validator=ge(0)
    )
    preempt: bool = setting(False, "Running sequences give way to more urgent ones that wait.")


@attrs.frozen(kw_only=True)
class ShortestFirstConfig(FcfsConfig):
    """Table ``[scheduling.shortest_first]``."""

    predictor: str = setting(
        "history",
        "Output tokens to expect: none (only the prompt counts), max_tokens (what the request allows), history (the mean "
        "of its tenant so far), or package.module:function, called with the request.",
    )
    output_weight: float = setting(2.0, "Work of an output token, in prompt tokens.", validator=ge(0))
    age_tokens_per_s: float = setting(
        100.0, "Work that a second of waiting makes up for; 0: never.", unit="tokens/s", validator=ge(0)
    )


@attrs.frozen(kw_only=True)
class FairShareConfig:
    """Table ``[scheduling.fair_share]``: all but the order between tenants is the inner policy's, with its own table."""

    inner: str = setting(
        "fcfs",
        "Policy that orders the requests of one tenant and does all the rest.",
        component="scheduling",
    )
    prompt_price: float = setting(1.0, "What a prompt token costs a tenant.", validator=ge(0))
    output_price: float = setting(2.0, "What an output token costs a tenant.", validator=ge(0))


@attrs.frozen(kw_only=True)
class DeadlineConfig(FcfsConfig):
    """Table ``[scheduling.deadline]``."""

    ttft_target_ms: float = setting(2000.0, "First token of requests that state no target.", unit="ms", validator=gt(0))
    tpot_target_ms: float = setting(
        100.0,
        "Token to token of requests that state no target; caps prompts, by the step-time model.",
        unit="ms",
        validator=gt(0),
    )
    shed: bool = setting(
        False, "Refuse requests that cannot meet their target any more when they arrive, by the step-time model."
    )


@attrs.frozen(kw_only=True)
class PrefixAffinityConfig(FcfsConfig):
    """Table ``[scheduling.prefix_affinity]``."""

    max_waiting: int = setting(
        10_000, "With more sequences waiting they are admitted by arrival.", unit="sequences", validator=ge(0)
    )
    shared_tokens: int = setting(
        32,
        "Of waiting sequences that begin with the same so many tokens, uncached, one goes first and fills the cache for "
        "the others; 0: no such rule.",
        unit="tokens",
        validator=ge(0),
    )
    age_tokens_per_s: float = setting(
        100.0, "Cached tokens that a second of waiting makes up for; 0: never.", unit="tokens/s", validator=ge(0)
    )


@attrs.frozen(kw_only=True)
class PrefillFirstConfig(FcfsConfig):
    """Table ``[scheduling.prefill_first]``."""

    delay_factor: float = setting(
        0.0, "Prompts wait until the oldest has waited so many times the last prompt step; 0: never.", validator=ge(0)
    )
    watermark_ratio: float = setting(
        0.01, "Share of all blocks that a prompt step leaves free, no less than the engine's 0.01.", validator=ge(0.01)
    )
    chunked: bool = setting(False, "Prompts may be cut into chunks; else only one longer than the token budget is.")
