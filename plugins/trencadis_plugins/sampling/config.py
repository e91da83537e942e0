"""Config tables of the samplers; does not import torch, since the command line reads them."""

from __future__ import annotations

import attrs

from trencadis.interfaces import setting

__all__ = ["LOGPROBS", "ORDERS", "StandardConfig"]

ORDERS = ("vllm", "hf", "llamacpp")
"""Programs whose order of temperature and truncation the chain may have."""

LOGPROBS = ("raw", "processed")
"""Kinds of reported log-probabilities."""


@attrs.frozen(kw_only=True)
class StandardConfig:
    """Table ``[sampling.standard]``.

    Attributes:
        order: Order of temperature and truncation. ``vllm``: temperature, min-p, top-k, top-p. ``hf``: temperature, top-k,
            top-p, min-p. ``llamacpp``: top-k, top-p, min-p, temperature last.
        chain: Names of processors, instead of a preset; a request with a parameter whose processor is not in it is refused.
        processors: Processors from other packages, after all others.
        logprobs: Kind of log-probabilities of output tokens. ``raw``: as the model gives them. ``processed``: of the distribution that a
            token is drawn from, with masks, penalties, temperature and truncation; of greedy rows with masks and penalties alone. Those
            of prompts are always raw.
    """

    order: str = setting(
        "vllm", "Order of temperature and truncation: vllm, hf or llamacpp.", validator=attrs.validators.in_(ORDERS)
    )
    chain: tuple[str, ...] = attrs.field(
        factory=tuple,
        metadata={"help": "Logits processors in order, by name or import path; empty: those of `order`.", "unit": ""},
    )
    processors: tuple[str, ...] = attrs.field(
        factory=tuple,
        metadata={
            "help": "Logits processors of other packages, by import path or entry point, after the others.",
            "unit": "",
        },
    )
    logprobs: str = setting(
        "raw",
        "Log-probabilities of output tokens: raw, or processed as they are drawn from.",
        validator=attrs.validators.in_(LOGPROBS),
    )
