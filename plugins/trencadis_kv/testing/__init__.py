"""Conformance suites of the nouns ``kv_codec`` and ``kv_policy``."""

from __future__ import annotations

from trencadis_kv.testing.kv_codec import KVCodecConformance
from trencadis_kv.testing.kv_policy import KVPolicyConformance

__all__ = ["KVCodecConformance", "KVPolicyConformance"]
