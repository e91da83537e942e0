"""Under which terms an HTTP request runs: who asks, how urgent it is, and what it may share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trencadis.records import RequestTerms
from trencadis_server.errors import ApiError

if TYPE_CHECKING:
    from trencadis_server.protocol.generation import GenerationRequest

__all__ = ["terms_of"]


def terms_of(caller: str, body: GenerationRequest, *, allows_weight: bool) -> RequestTerms:
    """Return the terms of a request. Pure.

    Cached prefixes are shared neither between API keys nor between users of one key: the time to the first token would tell whether
    another has sent the same prompt. A ``cache_salt`` names, within the key, with whom they are shared instead. Users within a key
    share its weight, and only the operator can raise that.

    Args:
        caller: Name of the API key; empty where none is asked for.
        body: The request.
        allows_weight: Clients may set their share themselves.

    Raises:
        ApiError: It sets a weight and may not.
    """
    if body.weight is not None and not allows_weight:
        raise ApiError(
            400,
            "weight is set by this server's operator, in [scheduling.tenants]; clients may not (server.client_weights). "
            "Leave it out.",
            param="weight",
            code="unsupported_parameter",
        )
    return RequestTerms(
        priority=body.priority or 0,
        tenant=f"{caller}/{body.user}" if body.user else caller,
        cache_salt=_salt(caller, body),
        weight=body.weight,
        ttft_target_s=_seconds(body.ttft_target_ms),
        tpot_target_s=_seconds(body.tpot_target_ms),
        transfer_params=body.kv_transfer_params,
    )


def _salt(caller: str, body: GenerationRequest) -> str:
    if body.cache_salt:
        return f"{caller}\0{body.cache_salt}"
    return f"{caller}\0\0{body.user}" if body.user else caller


def _seconds(target_ms: float | None) -> float:
    return math.inf if target_ms is None else target_ms / 1e3
