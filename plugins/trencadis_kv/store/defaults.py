"""Codec and policy outside an engine: plain bytes, and loads that take no longer than computing."""

from __future__ import annotations

import logging
import math

from trencadis.errors import ContractError, TransferError
from trencadis.faults import CallMeter, FaultLog
from trencadis.interfaces import ComponentContext
from trencadis.records import TransferCause
from trencadis_kv.interfaces import KVCodec, KVPolicy, LoadView
from trencadis_kv.store.guarded_codec import GuardedCodec
from trencadis_kv.store.guarded_policy import GuardedPolicy

__all__ = ["IdentityCodec", "NoLongerThanComputing", "codec_of", "policy_of"]

logger = logging.getLogger("trencadis.kv")

_SHARE = 0.8


class IdentityCodec(KVCodec):
    """Returns payloads unchanged."""

    flags = 0
    max_growth_bytes = 0

    def encode(self, payload: memoryview, header: bytes) -> memoryview:
        """Return the payload."""
        return payload

    def decode(self, data: memoryview, header: bytes, out: memoryview) -> None:
        """Copy ``data`` into ``out``."""
        if len(data) != len(out):
            raise TransferError(
                f"The KV object is broken: {len(data)} bytes of payload, not {len(out)}.", cause=TransferCause.CORRUPT
            )
        out[:] = data


class NoLongerThanComputing(KVPolicy):
    """Admits a load if it is predicted to take at most a share of the time of computing its tokens."""

    def admits_load(self, view: LoadView) -> float:
        """Return the longest time of the load, seconds; 0 if it is predicted to take longer."""
        wait_s = view.timeout_s if math.isnan(view.compute_s) else min(view.timeout_s, _SHARE * view.compute_s)
        return 0.0 if view.load_s > wait_s else wait_s


def codec_of(context: ComponentContext) -> KVCodec:
    """Return the codec that the config names, guarded; :class:`IdentityCodec` outside an engine."""
    try:
        codec: KVCodec = context.make("kv_codec", "")
    except ContractError:
        return IdentityCodec()
    return GuardedCodec(codec, context.label_of("kv_codec", "") or f"the KV codec {type(codec).__name__}")


def policy_of(context: ComponentContext) -> KVPolicy:
    """Return the policy that the config names, guarded; :class:`NoLongerThanComputing` outside an engine."""
    try:
        policy: KVPolicy = context.make("kv_policy", "")
    except ContractError:
        return NoLongerThanComputing()
    label = context.label_of("kv_policy", "") or f"the KV policy {type(policy).__name__}"
    meter = CallMeter(
        label,
        clock=context.clock,
        budget_s=context.budget_s("kv_policy"),
        setting="[budget] kv_policy_ms",
        log=FaultLog(logger),
    )
    return GuardedPolicy(policy, label=label, meter=meter)
