"""Contracts: one file for each pluggable noun.

A plugin implements the abstract class of its noun and yields a :class:`Component` from the noun's register hook.
"""

from __future__ import annotations

from trencadis.interfaces.acceptance import AcceptanceRule, Verification, model_distribution, possible_drafts
from trencadis.interfaces.backend import AllocationPlan, Backend, BackendCapabilities, PendingStep
from trencadis.interfaces.block_store import BlockStore
from trencadis.interfaces.bucketing import BucketingStrategy
from trencadis.interfaces.collective import Collective, RankGroups
from trencadis.interfaces.command import Command, CommandGroup
from trencadis.interfaces.component import (
    Component,
    ComponentContext,
    NamedModel,
    NoConfig,
    Stability,
    import_attribute,
)
from trencadis.interfaces.config_table import ConfigTable
from trencadis.interfaces.covering import covering_buckets
from trencadis.interfaces.draft_length import DraftLength, LengthView, VerifiedStep
from trencadis.interfaces.eviction import EvictionPolicy
from trencadis.interfaces.executor import Executor
from trencadis.interfaces.health_check import Finding, HealthCheck, Severity
from trencadis.interfaces.kv_blender import BlendChunk, BlendOrder, KVBlender
from trencadis.interfaces.kv_connector import (
    ConnectorPair,
    KVSchedulerSide,
    KVWorkerSide,
    Lookup,
    SupportsHandover,
    SupportsLayerwise,
    SupportsMetrics,
    SupportsRemotePrefill,
    SupportsRemoteScheduler,
    SupportsRemoteWorkers,
    SupportsStepTimes,
)
from trencadis.interfaces.kv_pool import KVPool
from trencadis.interfaces.laws import (
    Law,
    Rule,
    all_of,
    at_least,
    at_most,
    law,
    legal,
    of_type,
    one_of,
    one_of_words,
    permutation_of,
    readable,
    rules_of,
    tell,
    tell_always,
)
from trencadis.interfaces.layer_gate import LayerGate
from trencadis.interfaces.noun import Noun
from trencadis.interfaces.observer import Observer
from trencadis.interfaces.optional_calls import (
    BlockCopies,
    GuessBatch,
    HeadBatch,
    HeadGuesses,
    HeadNodes,
    SupportsDeferredWarmUp,
    SupportsEmbedding,
    SupportsGuessing,
    SupportsHead,
    SupportsKVConnector,
    SupportsKVPool,
    SupportsPreload,
    SupportsRanks,
    SupportsRemoteKVConnector,
    SupportsRestart,
    SupportsSwapping,
)
from trencadis.interfaces.placement import Placement
from trencadis.interfaces.plain_state import has_plain_state, plain_state
from trencadis.interfaces.rank_quorum import RankQuorum
from trencadis.interfaces.restorable import Restorable
from trencadis.interfaces.router import LiveRequests, Move, ReplicaViews, Router, RoutingRequest, SupportsMoves
from trencadis.interfaces.sampling import (
    Distributions,
    LogitsProcessor,
    Sampled,
    SampledLogprobs,
    Sampler,
    SamplingContext,
    SupportsPreparation,
)
from trencadis.interfaces.sampling_fingerprint import SamplingFingerprint
from trencadis.interfaces.scheduling import SchedulerView, SchedulingPolicy, SupportsSteadySteps, TokenSplit
from trencadis.interfaces.setting import setting
from trencadis.interfaces.speculation import DraftView, Speculator
from trencadis.interfaces.stage_definition import StageDefinition
from trencadis.interfaces.vocabulary import Vocabulary

__all__ = [
    "all_of",
    "of_type",
    "one_of_words",
    "tell_always",
    "Law",
    "Rule",
    "at_least",
    "at_most",
    "law",
    "legal",
    "one_of",
    "permutation_of",
    "readable",
    "rules_of",
    "tell",
    "model_distribution",
    "possible_drafts",
    "has_plain_state",
    "plain_state",
    "AcceptanceRule",
    "AllocationPlan",
    "Backend",
    "BackendCapabilities",
    "BlendChunk",
    "BlendOrder",
    "BlockCopies",
    "GuessBatch",
    "HeadBatch",
    "HeadGuesses",
    "HeadNodes",
    "BlockStore",
    "BucketingStrategy",
    "Collective",
    "Command",
    "CommandGroup",
    "Component",
    "ComponentContext",
    "ConfigTable",
    "ConnectorPair",
    "DraftLength",
    "DraftView",
    "EvictionPolicy",
    "Executor",
    "Finding",
    "SamplingFingerprint",
    "HealthCheck",
    "KVBlender",
    "KVPool",
    "KVSchedulerSide",
    "KVWorkerSide",
    "LayerGate",
    "Distributions",
    "LengthView",
    "LiveRequests",
    "LogitsProcessor",
    "Lookup",
    "Move",
    "NamedModel",
    "NoConfig",
    "Noun",
    "Observer",
    "PendingStep",
    "Placement",
    "RankQuorum",
    "ReplicaViews",
    "Restorable",
    "Router",
    "RoutingRequest",
    "Sampled",
    "SampledLogprobs",
    "Sampler",
    "SamplingContext",
    "SchedulerView",
    "SchedulingPolicy",
    "Speculator",
    "StageDefinition",
    "Severity",
    "Stability",
    "SupportsDeferredWarmUp",
    "SupportsEmbedding",
    "SupportsGuessing",
    "SupportsHead",
    "SupportsHandover",
    "SupportsKVConnector",
    "RankGroups",
    "SupportsKVPool",
    "SupportsPreload",
    "SupportsRanks",
    "SupportsRestart",
    "SupportsLayerwise",
    "SupportsMetrics",
    "SupportsMoves",
    "SupportsPreparation",
    "SupportsRemoteKVConnector",
    "SupportsRemotePrefill",
    "SupportsRemoteScheduler",
    "SupportsRemoteWorkers",
    "SupportsSteadySteps",
    "SupportsStepTimes",
    "SupportsSwapping",
    "TokenSplit",
    "Verification",
    "VerifiedStep",
    "Vocabulary",
    "import_attribute",
    "setting",
    "covering_buckets",
]
