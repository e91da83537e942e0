"""Every noun that comes with Trencadís, those of its own plugins too."""

from __future__ import annotations

from collections.abc import Mapping

from trencadis.config.settings import with_nouns
from trencadis.interfaces import Noun
from trencadis.registry.contracts import CORE_NOUNS
from trencadis_kv import NOUNS as NOUNS_OF_KV

__all__ = ["ALL_NOUNS", "HOOKS"]

_BOTH = {**CORE_NOUNS, **{noun.name: noun for noun in NOUNS_OF_KV}}
ALL_NOUNS: Mapping[str, Noun] = {name: _BOTH[name] for name in with_nouns(CORE_NOUNS, NOUNS_OF_KV)}

HOOKS: Mapping[str, str] = {name: noun.hook for name, noun in ALL_NOUNS.items()}
"""Register hook of each noun."""
