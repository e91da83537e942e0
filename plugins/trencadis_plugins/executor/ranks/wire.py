"""Batches and outputs as bytes: the arrays of one step in one piece, which is copied once.

The bytes are Python pickles, and loading one can run any code: they travel only between an engine and ranks that it started itself,
through a pair of sockets that no other process can open. A decode step of 32 sequences takes 820 bytes.
"""

from __future__ import annotations

import pickle
from typing import Any

import attrs
import numpy as np

from trencadis.records import (
    Batch,
    Bucket,
    ConnectorReport,
    DraftDistributions,
    Drafts,
    Pass,
    Phase,
    StepOutput,
    TableWrites,
    UnifiedBucket,
)

__all__ = ["decode_batch", "decode_output", "encode_batch", "encode_output"]

_PASS_ARRAYS = ("indices", "rows", "starts", "query_lens", "num_logits", "num_prompt_logits")
_PHASES = tuple(Phase)


def encode_batch(batch: Batch) -> bytes:
    """Return a batch as bytes. Pure.

    Raises:
        TypeError: Drafts come with distributions on a device, of which this process alone knows the memory.
    """
    writes, drafts = batch.table_writes, batch.drafts
    arrays = [writes.rows, writes.columns, writes.block_ids, batch.start_token_ids]
    passes = []
    for one in batch.passes:
        arrays += [getattr(one, name) for name in _PASS_ARRAYS]
        passes.append((_bucket_numbers(one.bucket), len(one.rows)))
    counts = None
    if drafts is not None:
        arrays += [drafts.num_drafts, drafts.token_ids]
        if drafts.parents is not None:
            arrays.append(drafts.parents)
        counts = len(drafts.num_drafts), len(drafts.token_ids), drafts.parents is not None
    flat = np.concatenate(arrays, dtype=np.int32, casting="same_kind").tobytes()
    return pickle.dumps(
        (
            batch.step,
            batch.num_sequences,
            batch.row_starts,
            batch.connector_message,
            (len(writes.rows), len(batch.start_token_ids)),
            passes,
            counts,
            None if drafts is None or drafts.distributions is None else _plain(drafts.distributions),
            flat,
        ),
        protocol=5,
    )


def decode_batch(data: bytes | memoryview) -> Batch:
    """Return what :func:`encode_batch` was given. Pure."""
    step, num_sequences, row_starts, message, (num_writes, num_starts), passes, counts, distributions, flat = (
        pickle.loads(data)
    )
    numbers = np.frombuffer(flat, np.int32)
    first = 0

    def take(length: int) -> Any:
        nonlocal first
        first += length
        return numbers[first - length : first]

    writes = TableWrites(rows=take(num_writes), columns=take(num_writes), block_ids=take(num_writes))
    start_token_ids = take(num_starts)
    made = []
    for bucket, length in passes:
        arrays = {name: take(length) for name in _PASS_ARRAYS}
        made.append(Pass(bucket=_bucket(bucket), **arrays))
    drafts = None
    if counts is not None:
        num_sequences_drafted, num_drafts, branches = counts
        drafts = Drafts(
            num_drafts=take(num_sequences_drafted),
            token_ids=take(num_drafts),
            parents=take(num_drafts) if branches else None,
            distributions=None if distributions is None else _distributions(*distributions),
        )
    return Batch(
        step=step,
        num_sequences=num_sequences,
        row_starts=row_starts,
        table_writes=writes,
        passes=tuple(made),
        drafts=drafts,
        start_token_ids=start_token_ids,
        connector_message=message,
    )


def encode_output(output: StepOutput, report: ConnectorReport | None) -> bytes:
    """Return a step's output, and what the rank's KV connector reports, as bytes. Pure."""
    values = {
        field.name: value
        for field in attrs.fields(StepOutput)
        if (value := getattr(output, field.name)) is not field.default and field.name not in _ARRAYS
    }
    return pickle.dumps(
        (
            np.ascontiguousarray(output.token_ids, np.int32).tobytes(),
            np.ascontiguousarray(output.num_emitted, np.int32).tobytes(),
            values,
            report,
        ),
        protocol=5,
    )


def decode_output(data: bytes | memoryview) -> tuple[StepOutput, ConnectorReport | None]:
    """Return what :func:`encode_output` was given. Pure."""
    token_ids, num_emitted, values, report = pickle.loads(data)
    output = StepOutput(
        token_ids=np.frombuffer(token_ids, np.int32), num_emitted=np.frombuffer(num_emitted, np.int32), **values
    )
    return output, report


_ARRAYS = ("token_ids", "num_emitted", "connector_reports")


def _bucket_numbers(bucket: Bucket) -> tuple[int, ...]:
    if isinstance(bucket, UnifiedBucket):
        return bucket.query_len, bucket.num_blocks, bucket.num_unique_blocks, int(bucket.is_causal), 1
    return bucket.batch_size, bucket.query_len, bucket.num_blocks, _PHASES.index(bucket.phase)


def _bucket(numbers: tuple[int, ...]) -> Bucket:
    if len(numbers) > 4:
        query_len, num_blocks, num_unique, is_causal, _ = numbers
        return UnifiedBucket(query_len, num_blocks, num_unique, bool(is_causal))
    batch_size, query_len, num_blocks, phase = numbers
    return Bucket(batch_size, query_len, num_blocks, _PHASES[phase])


def _plain(distributions: DraftDistributions) -> tuple[Any, Any]:
    """Return distributions as arrays of the host."""
    return distributions.rows, distributions.probabilities.cpu().numpy()


def _distributions(rows: Any, probabilities: Any) -> DraftDistributions:
    import torch

    return DraftDistributions(rows=rows, probabilities=torch.from_numpy(probabilities))
