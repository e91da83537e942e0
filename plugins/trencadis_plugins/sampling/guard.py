"""Refuses logits that no token can be chosen from, naming the row."""

from __future__ import annotations

import torch

from trencadis.interfaces import SamplingContext

__all__ = ["check_logits", "check_choices"]


def check_logits(logits: torch.Tensor, context: SamplingContext) -> None:
    """Refuse a row whose largest logit is not finite. Pure; waits for the device once.

    Args:
        logits: The model's, ``[L, V]``.
        context: Whose they are.

    Raises:
        ValueError: A row holds NaN or +inf, or nothing but -inf.
    """
    _check(
        logits.amax(-1),
        context,
        "the model's logits of {where} have no finite largest value (it is {value}). The weights, the KV cache or a kernel "
        'are damaged or overflow: try [model] dtype = "float32".',
    )


def check_choices(peaks: torch.Tensor, context: SamplingContext) -> None:
    """Refuse a row in which masks and bias leave no token. Pure; waits for the device once.

    Args:
        peaks: Largest processed logit of each row, ``[L]``.
        context: Whose they are.

    Raises:
        ValueError: A largest value is -inf, +inf or NaN.
    """
    _check(
        peaks,
        context,
        "allowed_token_ids, bad_token_ids, min_tokens and logit_bias together leave {where} no token to choose (largest "
        "processed logit: {value}). Relax one of them in this request.",
    )


def _check(peaks: torch.Tensor, context: SamplingContext, message: str) -> None:
    if bool(torch.isfinite(peaks).all()):
        return
    for index, value in enumerate(peaks.tolist()):
        if not -float("inf") < value < float("inf"):
            where = f"row {context.rows[index]} at position {context.positions[index]}"
            raise ValueError(message.format(where=where, value=value))
