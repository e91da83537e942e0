"""Tables ``[scheduling.tenants.NAME]``: what a tenant gets, and how much of it may wait."""

from __future__ import annotations

import math

import attrs
from attrs.validators import ge, gt, lt

from trencadis.interfaces.setting import setting

__all__ = ["DEFAULT_TENANT", "TenantConfig"]

DEFAULT_TENANT = "default"
"""The entry of every tenant that has none of its own."""


@attrs.frozen(kw_only=True)
class TenantConfig:
    """What one tenant gets. Enforced by the engine, whichever policy runs.

    A tenant is an API key's name, or what ``LLM.generate`` was told; ``key/user`` counts for ``key``.
    """

    weight: float = setting(
        1.0, "Share against other tenants, for policies that share fairly.", validator=[gt(0), lt(math.inf)]
    )
    priority: int = setting(0, "Added to the priority of each request; smaller is more urgent.")
    max_waiting: int = setting(
        0, "Most sequences that wait at once, more are refused; 0: no cap.", unit="sequences", validator=ge(0)
    )
    max_waiting_tokens: int = setting(
        0, "Most tokens of sequences that wait at once; 0: no cap.", unit="tokens", validator=ge(0)
    )
