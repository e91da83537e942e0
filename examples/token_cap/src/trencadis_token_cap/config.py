"""Config table of the stage."""

from __future__ import annotations

import attrs
from attrs.validators import ge
from trencadis.interfaces import setting

__all__ = ["TokenCapConfig"]


@attrs.frozen(kw_only=True)
class TokenCapConfig:
    """Table ``[token_cap]``."""

    max_tokens_per_tenant: int = setting(
        0,
        "A tenant that holds so many tokens of KV gets no further sequence in; 0: no cap.",
        unit="tokens",
        validator=ge(0),
    )
