"""Refuses logits that no token can be chosen from, naming the row."""

from __future__ import annotations

import torch

from trencadis.interfaces import LogitsProcessor, SamplingContext

__all__ = ["check_choices", "check_logits", "check_one_position"]


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
        "structured output, allowed_token_ids, bad_token_ids, bad_words, min_tokens and logit_bias together leave {where} no token to choose (largest "
        "processed logit: {value}). Relax one of them in this request.",
    )


def check_one_position(context: SamplingContext, processor: LogitsProcessor) -> None:
    """Refuse drafts to a processor that is not safe with them. Pure; host only.

    Args:
        context: Whose logits are sampled.
        processor: Looks at one position of a sequence at a time.

    Raises:
        ValueError: A sequence has logits at two positions in the call.
    """
    position_of: dict[int, int] = {}
    for row, position in zip(context.rows, context.positions, strict=True):
        if position_of.setdefault(row, position) != position:
            name = processor.name or type(processor).__name__
            raise ValueError(
                f"logits processor {name} is not safe with speculation, and row {row} at position {position} verifies drafts. "
                "Leave the processor out, or [speculation] name empty."
            )


def _check(peaks: torch.Tensor, context: SamplingContext, message: str) -> None:
    if bool(torch.isfinite(peaks).all()):
        return
    for index, value in enumerate(peaks.tolist()):
        if not -float("inf") < value < float("inf"):
            where = f"row {context.rows[index]} at position {context.positions[index]}"
            raise ValueError(message.format(where=where, value=value))
