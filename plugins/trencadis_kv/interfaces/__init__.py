"""Contracts of the nouns ``kv_codec`` and ``kv_policy``."""

from __future__ import annotations

from trencadis_kv.interfaces.kv_codec import KVCodec
from trencadis_kv.interfaces.kv_policy import (
    FailureView,
    KVPolicy,
    LoadView,
    PrefillEngineView,
    PrefillView,
    SaveView,
    SourceView,
)

__all__ = [
    "FailureView",
    "KVCodec",
    "KVPolicy",
    "LoadView",
    "PrefillEngineView",
    "PrefillView",
    "SaveView",
    "SourceView",
]
