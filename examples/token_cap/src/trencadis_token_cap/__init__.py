"""A cap on the KV tokens of each tenant: a stage for Trencadís."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import ConfigTable, StageDefinition

from trencadis_token_cap.config import TokenCapConfig

__all__ = ["trencadis_stages", "trencadis_tables"]


@hookimpl
def trencadis_tables() -> Iterable[ConfigTable]:
    """Yield ``[token_cap]``."""
    yield ConfigTable(name="token_cap", config=TokenCapConfig)


@hookimpl
def trencadis_stages() -> Iterable[StageDefinition]:
    """Yield ``token_cap``; an engine has it if the cap is set."""
    yield StageDefinition(
        name="token_cap",
        make=_make,
        summary="Caps the KV tokens that each tenant holds.",
        when=lambda config: _table(config).max_tokens_per_tenant > 0,
        before=frozenset({"transfer"}),  # who is held back looks nothing up
    )


def _make(makings: Any) -> Any:
    from trencadis_token_cap.token_cap import TokenCap

    return TokenCap(_table(makings.config).max_tokens_per_tenant)


def _table(config: Any) -> TokenCapConfig:
    table: TokenCapConfig = config.table("token_cap", TokenCapConfig)
    return table
