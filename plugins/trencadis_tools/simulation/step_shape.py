"""What the time of a step depends on, and what a model of step times answers."""

from __future__ import annotations

from typing import Protocol

import attrs

from trencadis.records import Bucket

__all__ = ["StepShape", "StepTimes"]


@attrs.frozen(kw_only=True)
class StepShape:
    """Sizes of one step.

    Attributes:
        num_decodes: Sequences with one token to compute, drafts beside it included.
        num_prefills: Sequences with prompt tokens to compute.
        num_decode_tokens: Tokens of decodes.
        num_prefill_tokens: Tokens of prefills.
        num_decode_context: KV entries that decodes read.
        num_prefill_context: KV entries that prefills read, those of the step included.
        prefill_products: Sum over prefills of computed tokens times the mean number of KV entries that each reads.
        num_new: Sequences that were admitted in this step.
        buckets: Of its passes on a device with static shapes; empty on others.
    """

    num_decodes: int = 0
    num_prefills: int = 0
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_decode_context: int = 0
    num_prefill_context: int = 0
    prefill_products: float = 0.0
    num_new: int = 0
    buckets: tuple[Bucket, ...] = ()


class StepTimes(Protocol):
    """A model of step times. Pure: the same shape takes the same time."""

    def device_s(self, shape: StepShape) -> float:
        """Return how long the device computes the step, seconds."""
        ...

    def host_s(self, shape: StepShape) -> float:
        """Return how long the host takes to plan, build and commit it, seconds; 0 where the device hides it."""
        ...
