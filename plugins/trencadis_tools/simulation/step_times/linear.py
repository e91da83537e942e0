"""Step times that are linear in the sizes of a step, for the device and for the host."""

from __future__ import annotations

import math

import attrs
from attrs.validators import and_, ge, lt

from trencadis.records import StepShape, StepTime

__all__ = ["HostTimes", "LinearStepTimes"]

_BASE = StepTime()
_SECONDS = and_(ge(0.0), lt(math.inf))


@attrs.frozen(kw_only=True)
class HostTimes:
    """Time of the host for a step, beside what the device takes.

    Attributes:
        host_base_s: Time of every step, seconds.
        host_row_s: Time of every sequence, seconds.
        host_new_s: Time of every sequence that is admitted, seconds.
        overlap: The host plans a step while the device computes the one before (engine depth 2): of its time only what exceeds the
            device's counts. Times fitted from records are those that the device waited, whatever the depth: for them it is False.
    """

    host_base_s: float = attrs.field(default=0.0, validator=_SECONDS)
    host_row_s: float = attrs.field(default=0.0, validator=_SECONDS)
    host_new_s: float = attrs.field(default=0.0, validator=_SECONDS)
    overlap: bool = False

    def device_s(self, shape: StepShape) -> float:
        """Return how long the device computes the step, seconds; 0 for a step without tokens."""
        raise NotImplementedError

    def host_s(self, shape: StepShape) -> float:
        """Return how long the device waits for the host, seconds."""
        spent_s = self.host_base_s + self.host_row_s * shape.num_rows + self.host_new_s * shape.num_new
        return max(0.0, spent_s - self.device_s(shape)) if self.overlap else spent_s


@attrs.frozen(kw_only=True)
class LinearStepTimes(HostTimes):
    """Coefficients times sizes; the defaults are those of :class:`~trencadis.records.StepTime`, and no host time.

    Attributes:
        base_s: Time of every step on the device, seconds: weights are read once, kernels are launched.
        token_s: Time of every token, seconds.
        context_s: Time of every KV entry that is read, seconds.
        product_s: Time of every pair of a prefill's token and a KV entry that it reads, seconds.
        row_s: Time of every sequence, seconds.
        prefill_token_s: Time of every token of a prefill in addition to ``token_s``, seconds: a decode's token is nearly free where
            reading weights takes longer than computing it.
    """

    base_s: float = attrs.field(default=_BASE.base_s, validator=_SECONDS)
    token_s: float = attrs.field(default=_BASE.token_s, validator=_SECONDS)
    context_s: float = attrs.field(default=_BASE.context_token_s, validator=_SECONDS)
    product_s: float = attrs.field(default=0.0, validator=_SECONDS)
    row_s: float = attrs.field(default=0.0, validator=_SECONDS)
    prefill_token_s: float = attrs.field(default=0.0, validator=_SECONDS)

    def device_s(self, shape: StepShape) -> float:
        """Return how long the device computes the step, seconds; 0 for a step without tokens."""
        if not shape.num_tokens:
            return 0.0
        line_s = self.base_s + self.token_s * shape.num_tokens + self.context_s * shape.num_context
        line_s += self.prefill_token_s * shape.num_prefill_tokens
        return line_s + self.product_s * shape.prefill_products + self.row_s * shape.num_rows
