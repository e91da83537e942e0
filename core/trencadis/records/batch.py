"""What travels to the device in one step.

The device keeps, for each of ``max_num_seqs`` rows, the tokens, the block table and the sampling state of the
sequence that occupies it. A batch carries only what changes: rows that start, table entries that were added,
draft tokens; and the passes to run, each with its bucket. It is small, and the same for every layout and
for a device in another process. See docs/decisions/0002-row-state-lives-on-the-device.md.
"""

from __future__ import annotations

import attrs
import numpy as np

from trencadis.records.arrays import Int32Array
from trencadis.records.bucket import Bucket
from trencadis.records.plan import Drafts
from trencadis.records.sampling import SamplingParams

__all__ = ["Batch", "Pass", "RowStart", "TableWrites"]

_NONE: Int32Array = np.empty(0, np.int32)


@attrs.frozen(kw_only=True)
class RowStart:
    """A sequence takes a row: everything the device must know about it.

    Attributes:
        row: The row, 0 .. max_num_seqs - 1; whatever it held before is forgotten.
        token_ids: All known tokens, prompt and output, int32 ``[num_tokens]``.
        num_prompt_tokens: How many of them are the prompt.
        params: Sampling parameters.
        seed: Key of the row's random numbers, 0 .. 2**64 - 1; the same after a preemption.
        eos_token_ids: The model's end-of-sequence tokens (empty with ``ignore_eos``) and the request's stop
            tokens: what ``min_tokens`` masks.
    """

    row: int
    token_ids: Int32Array
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...] = ()


@attrs.frozen(kw_only=True)
class TableWrites:
    """Block-table entries to set before the passes run, applied in order; parallel arrays.

    Attributes:
        rows: int32 ``[num_writes]``.
        columns: Index of the block within the sequence, int32 ``[num_writes]``.
        block_ids: int32 ``[num_writes]``.
    """

    rows: Int32Array
    columns: Int32Array
    block_ids: Int32Array


@attrs.frozen(kw_only=True, slots=False)
class Pass:
    """One forward over some sequences of the plan.

    Attributes:
        bucket: The static shape to run in; covers ``rows`` and ``query_lens``. With a ragged layout it is the
            exact shape and nothing is padded; with a unified one it is a ``UnifiedBucket``.
        indices: Which sequences of the plan, int32 ``[num_sequences]``, ascending.
        rows: Their rows, int32 ``[num_sequences]``.
        starts: Computed tokens before the step: the first query token's position, int32 ``[num_sequences]``.
        query_lens: New tokens, int32 ``[num_sequences]``, each at least 1.
        num_logits: How many of the last query tokens need logits, int32 ``[num_sequences]``: 0 for a prefill
            chunk that is not the last, 1 for a plain sampling point, ``1 + num_drafts`` to verify drafts.
        num_prompt_logits: How many query tokens, from the first, need prompt logprobs; int32 ``[num_sequences]``.
    """

    bucket: Bucket
    indices: Int32Array
    rows: Int32Array
    starts: Int32Array
    query_lens: Int32Array
    num_logits: Int32Array
    num_prompt_logits: Int32Array


@attrs.frozen(kw_only=True, slots=False)
class Batch:
    """Everything the device does in one step, in this order: row starts, table writes, start tokens, drafts, passes.

    Attributes:
        step: Number of the step.
        num_sequences: Sequences in the plan; the length of ``StepOutput.num_emitted``.
        row_starts: Rows that change hands.
        table_writes: New block-table entries.
        passes: Forwards to run, in order.
        drafts: Draft tokens by plan index; the device writes them after each row's known tokens.
        start_token_ids: Token at the first position that each sequence computes, int32 ``[num_sequences]``, for stages of a pipeline:
            they have not sampled it. Empty where every rank has it.
        connector_message: For the KV connector's worker side; empty without one.
    """

    step: int
    num_sequences: int
    row_starts: tuple[RowStart, ...]
    table_writes: TableWrites
    passes: tuple[Pass, ...]
    drafts: Drafts | None = None
    start_token_ids: Int32Array = _NONE
    connector_message: bytes = b""
