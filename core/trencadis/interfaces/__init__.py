"""Contracts: one file for each pluggable noun.

A plugin implements the abstract class of its noun and yields a :class:`Component` from the noun's register hook.
"""

from __future__ import annotations

from trencadis.interfaces.backend import AllocationPlan, Backend, BackendCapabilities, BlockCopies, PendingStep
from trencadis.interfaces.bucketing import BucketingStrategy
from trencadis.interfaces.component import Component, ComponentContext, NoConfig
from trencadis.interfaces.eviction import EvictionPolicy
from trencadis.interfaces.executor import Executor
from trencadis.interfaces.kv_connector import ConnectorPair, KVSchedulerSide, KVWorkerSide, Lookup
from trencadis.interfaces.observer import Observer
from trencadis.interfaces.sampling import LogitsProcessor, Sampled, SampledLogprobs, Sampler, SamplingContext
from trencadis.interfaces.scheduling import SchedulerView, SchedulingPolicy, TokenSplit
from trencadis.interfaces.speculation import AcceptanceRule, DraftView, Speculator

__all__ = [
    "AcceptanceRule",
    "AllocationPlan",
    "Backend",
    "BackendCapabilities",
    "BlockCopies",
    "BucketingStrategy",
    "Component",
    "ComponentContext",
    "ConnectorPair",
    "DraftView",
    "EvictionPolicy",
    "Executor",
    "KVSchedulerSide",
    "KVWorkerSide",
    "LogitsProcessor",
    "Lookup",
    "NoConfig",
    "Observer",
    "PendingStep",
    "Sampled",
    "SampledLogprobs",
    "Sampler",
    "SamplingContext",
    "SchedulerView",
    "SchedulingPolicy",
    "Speculator",
    "TokenSplit",
]
