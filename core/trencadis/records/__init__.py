"""Frozen values that pass between the stages of the engine; no behaviour beyond properties."""

from __future__ import annotations

from trencadis.records.arrays import BoolArray, Float32Array, FloatArray, Int32Array, Int64Array, read_only
from trencadis.records.batch import Batch, Pass, RowStart, TableWrites
from trencadis.records.beam import BeamSearchParams
from trencadis.records.bucket import Bucket, BucketLimits, Phase, Shape, UnifiedBucket, UnifiedShape
from trencadis.records.embedding import Embedding, EmbeddingRequest
from trencadis.records.explanation import Explanation, Range, Span
from trencadis.records.first_token import FirstToken
from trencadis.records.kv import KVLayout, KVPart, TransferCause
from trencadis.records.model import MemoryReport, ModelFacts, ModelSource, WarmUp, WarmUpReport
from trencadis.records.output import (
    CompletionOutput,
    ConnectorReport,
    FailedLoad,
    FinishedSequence,
    RequestOutput,
    RowError,
    StepOutput,
    TokenDeltas,
    TokenLogprobs,
)
from trencadis.records.parallel import EngineLoad, LayoutFeature, ParallelLayout, divide_layers
from trencadis.records.plain import MAX_DEPTH, check_plain, is_text, plain_fault
from trencadis.records.plan import DraftDistributions, Drafts, Plan
from trencadis.records.request import (
    DEFAULT_TERMS,
    MAX_TRANSFER_BYTES,
    FinishReason,
    ListedTerms,
    Request,
    RequestTerms,
    TermKeywords,
    evolve_unchecked,
    transfer_table,
)
from trencadis.records.sampling import (
    LEAST_FLOAT,
    MAX_INT,
    MAX_LISTED_IDS,
    MAX_LOGPROBS,
    PARAMETER_GROUPS,
    Limits,
    OneOf,
    SamplingParams,
    parameter_help,
    parameters_in,
)
from trencadis.records.stats import EngineGauges, EngineTotals, StepStats
from trencadis.records.step_shape import StepShape, step_shape
from trencadis.records.step_time import StepTime
from trencadis.records.structured import MAX_CHOICES, MAX_STRUCTURE_CHARACTERS, StructuredOutput

__all__ = [
    "DEFAULT_TERMS",
    "MAX_CHOICES",
    "MAX_DEPTH",
    "MAX_INT",
    "MAX_LISTED_IDS",
    "LEAST_FLOAT",
    "MAX_LOGPROBS",
    "MAX_STRUCTURE_CHARACTERS",
    "MAX_TRANSFER_BYTES",
    "ParallelLayout",
    "PARAMETER_GROUPS",
    "LayoutFeature",
    "Limits",
    "OneOf",
    "Batch",
    "BeamSearchParams",
    "BoolArray",
    "Bucket",
    "BucketLimits",
    "CompletionOutput",
    "ConnectorReport",
    "DraftDistributions",
    "Drafts",
    "Embedding",
    "EmbeddingRequest",
    "EngineLoad",
    "EngineGauges",
    "EngineTotals",
    "Explanation",
    "FailedLoad",
    "FinishReason",
    "ListedTerms",
    "FinishedSequence",
    "FirstToken",
    "Float32Array",
    "FloatArray",
    "Int32Array",
    "Int64Array",
    "KVLayout",
    "KVPart",
    "MemoryReport",
    "ModelFacts",
    "ModelSource",
    "Pass",
    "Phase",
    "Plan",
    "Range",
    "Request",
    "RequestOutput",
    "RequestTerms",
    "TermKeywords",
    "RowError",
    "RowStart",
    "SamplingParams",
    "Shape",
    "Span",
    "StepOutput",
    "StepShape",
    "StepStats",
    "StepTime",
    "StructuredOutput",
    "TableWrites",
    "TokenDeltas",
    "TokenLogprobs",
    "TransferCause",
    "UnifiedBucket",
    "UnifiedShape",
    "WarmUp",
    "WarmUpReport",
    "check_plain",
    "divide_layers",
    "is_text",
    "parameter_help",
    "evolve_unchecked",
    "parameters_in",
    "plain_fault",
    "read_only",
    "step_shape",
    "transfer_table",
]
