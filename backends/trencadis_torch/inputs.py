"""From a pass to the model's inputs: token ids, positions, where keys go, and which positions need logits.

Shapes: T token positions of the pass, padding included; L logits rows; B sequences.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt
import torch

from trencadis.records import Bucket, Pass, Phase
from trencadis_torch.attention.adapter import AttentionPass
from trencadis_torch.attention.padded import PaddedDecode, PaddedKernelPass, PaddedPrefill, StaticKernelPass
from trencadis_torch.attention.ragged import RaggedPass, Workspace
from trencadis_torch.attention.trees import DraftTrees
from trencadis_torch.cache.kv_cache import PagedKVCache, StaticKernel
from trencadis_torch.device import to_device
from trencadis_torch.rows import Rows

__all__ = [
    "ModelInputs",
    "padded_facts",
    "padded_firsts",
    "padded_inputs",
    "padded_tokens",
    "ragged_inputs",
]


@attrs.frozen(kw_only=True)
class ModelInputs:
    """One forward.

    Attributes:
        token_ids: int64 ``[1, T]``: all sequences in one run, whatever the layout.
        positions: int64 ``[1, T]``.
        attention: Keeps them apart.
        firsts: Index of each sequence's first token among the T, on the host.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionPass
    firsts: npt.NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.token_ids.numel()


def ragged_inputs(
    one: Pass, rows: Rows, cache: PagedKVCache, workspace: Workspace, trees: DraftTrees | None = None
) -> ModelInputs:
    """Return the inputs of a pass without padding; reads the rows' tokens on the device.

    Args:
        one: The pass.
        rows: Tokens and block tables.
        cache: Keys and values.
        workspace: Buffers to use again.
        trees: Trees of drafts that branch: they lie after each other in the row and in the cache, and their positions repeat.
    """
    lengths = one.query_lens
    firsts = (np.cumsum(lengths) - lengths).astype(np.int64)
    total = int(lengths.sum())
    host = np.empty((2, total), np.int64)
    host[0] = np.repeat(one.rows, lengths)
    host[1] = np.arange(total) + np.repeat(one.starts - firsts, lengths)
    token_ids, columns, slots = _found(host, rows, cache.block_size)
    positions = columns
    if trees is not None:
        positions = to_device(trees.positions(host[1], firsts), rows.tokens.device)
    attention = RaggedPass(
        cache,
        tables=rows.tables,
        slots=slots,
        rows=one.rows,
        starts=one.starts,
        query_lens=lengths,
        workspace=workspace,
        trees=trees,
    )
    return ModelInputs(token_ids=token_ids[None], positions=positions[None], attention=attention, firsts=firsts)


def _found(host: npt.NDArray[np.int64], rows: Rows, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, columns and slots of some places ``[2, T]``, int64 ``[T]`` each: rows and their columns."""
    if rows.tokens.device.type == "cpu":
        # The same by numpy, a few microseconds sooner for each operation.
        row, columns = host
        blocks = rows.tables.numpy()[row, columns // size].astype(np.int64)
        found = rows.tokens.numpy()[row, columns].astype(np.int64), columns, blocks * size + columns % size
        token_ids, columns, slots = map(torch.from_numpy, found)
        return token_ids, columns, slots
    places = to_device(host, rows.tokens.device)
    blocks = rows.tables[places[0], places[1] // size].long()
    return rows.tokens[places[0], places[1]].long(), places[1], blocks * size + places[1] % size


def padded_inputs(one: Pass, rows: Rows, cache: PagedKVCache) -> ModelInputs:
    """Return the inputs of a pass padded to its bucket; every shape follows from the bucket."""
    bucket, host = one.bucket, padded_facts(one)
    token_ids, positions, slots = padded_tokens(to_device(host, rows.tokens.device), bucket, rows, cache)
    return ModelInputs(
        token_ids=token_ids,
        positions=positions,
        attention=_padded_attention(one, rows, cache, slots, host),
        firsts=padded_firsts(bucket),
    )


def padded_facts(one: Pass) -> npt.NDArray[np.int64]:
    """Return row, start and query length of each sequence of a bucket, int64 ``[3, B]``; 0 of padding. Pure."""
    host = np.zeros((3, one.bucket.batch_size), np.int64)
    host[:, : len(one.rows)] = one.rows, one.starts, one.query_lens
    return host


def padded_firsts(bucket: Bucket) -> npt.NDArray[np.int64]:
    """Return the index of each sequence's first token, ``[B]``. Pure."""
    return np.arange(bucket.batch_size, dtype=np.int64) * bucket.query_len


def padded_tokens(
    facts: torch.Tensor, bucket: Bucket, rows: Rows, cache: PagedKVCache
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids and positions, int64 ``[1, T]``, and slots, int64 ``[T]``, of a padded pass; looks at nothing on the host.

    Args:
        facts: Facts that :func:`padded_facts` returns, on the device.
        bucket: The shape.
        rows: Tokens and block tables.
        cache: Read for sizes only.
    """
    device, size = facts.device, cache.block_size
    row, starts, lengths = facts[:, :, None]
    steps = torch.arange(bucket.query_len, device=device)
    real = steps < lengths
    positions = torch.where(real, starts + steps, 0)
    token_ids = torch.where(real, rows.tokens[row, positions], 0).long()
    padding = cache.padding_block * size + torch.arange(real.numel(), device=device).view_as(real) % size
    slots = torch.where(real, rows.tables[row, positions // size].long() * size + positions % size, padding)
    return token_ids.view(1, -1), positions.view(1, -1), slots.flatten()


def _padded_attention(
    one: Pass, rows: Rows, cache: PagedKVCache, slots: torch.Tensor, host: npt.NDArray[np.int64]
) -> AttentionPass:
    bucket: Bucket = one.bucket
    if isinstance(cache.kernel, StaticKernel):
        calls = cache.kernel.begin(
            cache,
            tables=rows.tables,
            slots=slots,
            rows=one.rows,
            starts=one.starts,
            query_lens=one.query_lens,
            firsts=padded_firsts(bucket)[: len(one.rows)].astype(np.int32),
        )
        return StaticKernelPass(calls)
    if cache.kernel is not None:
        return PaddedKernelPass(cache, tables=rows.tables, slots=slots, facts=host, bucket=bucket)
    if bucket.phase is Phase.DECODE:
        return PaddedDecode(
            cache,
            tables=rows.tables,
            slots=slots,
            rows=one.rows,
            starts=one.starts,
            query_lens=one.query_lens,
            bucket=bucket,
        )
    row, starts, lengths = to_device(host, rows.tokens.device)
    return PaddedPrefill(
        cache, tables=rows.tables, slots=slots, rows=row, starts=starts, query_lens=lengths, bucket=bucket
    )
