"""What a client asked for, and how it ended."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable

import attrs
from attrs.validators import gt, lt

from trencadis.records.sampling import SamplingParams

__all__ = ["FinishReason", "Request"]


class FinishReason(enum.Enum):
    """Why a sequence ended; the values are OpenAI's where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def _token_ids(token_ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(token_ids)


@attrs.frozen(kw_only=True)
class Request:
    """One prompt and how to continue it. Frozen; the engine makes one sequence of it.

    A request with ``params.n > 1`` is expanded into n requests before it reaches the engine.

    Attributes:
        request_id: Unique among live requests.
        prompt_token_ids: At least one token id.
        params: How tokens are chosen and when the sequence ends.
        priority: Smaller is served first by policies that look at it.
        tenant: Who asks; policies may share fairly between tenants.
        cache_salt: Prefix-cache blocks are shared only between requests of equal salt; the tenant by default.
        weight: The tenant's share against other tenants, for policies that share fairly; above 0, finite.
        ttft_target_s: Seconds within which the first token is wanted, above 0; infinity for no target.
        tpot_target_s: Seconds from token to token that are wanted at most, above 0; infinity for no target.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...] = attrs.field(converter=_token_ids, repr=False)
    params: SamplingParams = attrs.field(factory=SamplingParams)
    priority: int = 0
    tenant: str = ""
    cache_salt: str = attrs.Factory(lambda self: self.tenant, takes_self=True)
    weight: float = attrs.field(default=1.0, validator=[gt(0), lt(math.inf)])
    ttft_target_s: float = attrs.field(default=math.inf, validator=gt(0))
    tpot_target_s: float = attrs.field(default=math.inf, validator=gt(0))
