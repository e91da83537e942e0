"""Sampling, acceptance of drafts, and writing tokens back: the second half of a pass.

Shapes: S sequences that emit, K most logits rows of one sequence, L logits rows handed to the sampler, V vocabulary.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt
import torch

from trencadis.interfaces import AcceptanceRule, SampledLogprobs, Sampler, SamplingContext
from trencadis.records import Drafts, Int32Array, Pass, Phase
from trencadis_torch.device import to_device
from trencadis_torch.rows import Rows, drafts_of

__all__ = ["Emitted", "MatchingPrefix", "SamplePlan", "emit"]


class MatchingPrefix(AcceptanceRule):
    """Drafts stand while the sampler chooses the very same tokens: the text is that of no speculation."""

    lossless = True

    def accept(self, *, sampled: torch.Tensor, drafts: torch.Tensor, num_drafts: torch.Tensor) -> torch.Tensor:
        """Return the length of the matching prefix, int64 ``[B]``; padding drafts (-1) match nothing."""
        return (sampled[:, :-1] == drafts).long().cumprod(1).sum(1)


@attrs.frozen(kw_only=True)
class SamplePlan:
    """Which logits rows a pass samples.

    Attributes:
        sequences: Of the pass, those that emit, ``[S]``.
        counts: Logits rows of each, ``[S]``.
        entries: Which of the L rows belongs to sequence s and step k, ``[S', K]``; S' is S, or more where padding repeats
            the first sequence. Steps beyond a sequence's last repeat its last.
        tokens: Index of each logits row's token in the pass, ``[L]``.
        context: For the sampler.
    """

    sequences: npt.NDArray[np.int64]
    counts: Int32Array
    entries: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    context: SamplingContext

    @classmethod
    def of(
        cls,
        one: Pass,
        firsts: npt.NDArray[np.int64],
        history: torch.Tensor,
        *,
        padded: bool,
        num_sequences: int = 0,
        num_steps: int = 0,
    ) -> SamplePlan | None:
        """Return the plan of a pass, or None if no sequence of it emits. Pure.

        Args:
            one: The pass.
            firsts: Index of each sequence's first token in the pass.
            history: Every row's tokens.
            padded: Make every shape follow from the bucket: repeats are free, for a token depends on its row alone.
            num_sequences: Most sequences of a padded pass that has them in one row of tokens; 0: the bucket's batch size.
            num_steps: Most logits rows of one of its sequences; 0: as many as the bucket's phase says.
        """
        sequences = np.flatnonzero(one.num_logits)
        if not len(sequences):
            return None
        counts = one.num_logits[sequences]
        chosen, size = sequences, int(counts.max())
        if padded:
            most = num_sequences or one.bucket.batch_size
            chosen = np.append(sequences, np.repeat(sequences[:1], most - len(sequences)))
            size = max(size, num_steps or _bucket_steps(one))
        steps = np.minimum(np.arange(size), one.num_logits[chosen][:, None] - 1)
        starts = (one.query_lens - one.num_logits)[chosen][:, None] + steps
        used = np.ones(steps.shape, np.bool_) if padded else np.arange(size) < counts[:, None]
        entries = (np.cumsum(used).reshape(used.shape) - 1).astype(np.int64)
        rows = np.broadcast_to(one.rows[chosen][:, None], steps.shape)[used]
        positions = (one.starts[chosen][:, None] + starts)[used]
        context = SamplingContext(rows=tuple(rows.tolist()), positions=tuple(positions.tolist()), tokens=history)
        return cls(
            sequences=sequences,
            counts=counts,
            entries=entries,
            tokens=(firsts[chosen][:, None] + starts)[used].astype(np.int64),
            context=context,
        )


def _bucket_steps(one: Pass) -> int:
    return one.bucket.query_len if one.bucket.phase is Phase.DECODE else 1


@attrs.frozen(kw_only=True)
class Emitted:
    """What a pass emits, on the device.

    Attributes:
        indices: Indices in the plan of the sequences that emit, on the host, ``[S]``.
        token_ids: int64 ``[S', K]``; of sequence s the first ``num_emitted[s]`` count, and what is behind the S real ones
            does not: it is cut off on the host, where that costs no operation of another shape.
        num_emitted: int64 ``[S']``; None: one each.
        logprobs: Of sequences that asked: index in the plan, step, position, and the sampler's entry.
    """

    indices: Int32Array
    token_ids: torch.Tensor
    num_emitted: torch.Tensor | None
    logprobs: tuple[tuple[int, int, int, SampledLogprobs], ...]


def emit(
    logits: torch.Tensor,
    plan: SamplePlan,
    one: Pass,
    *,
    drafts: Drafts | None,
    rows: Rows,
    sampler: Sampler,
    acceptance: AcceptanceRule,
) -> Emitted:
    """Sample, accept, and write the emitted tokens behind each row's known ones.

    Args:
        logits: ``[L, V]``.
        plan: Whose.
        one: The pass.
        drafts: Of the whole plan.
        rows: Written to.
        sampler: Chooses.
        acceptance: Says how many drafts stand.
    """
    sampled = sampler.sample(logits, plan.context)
    num_emitted = None
    tokens = sampled.token_ids[:, None]
    if plan.entries.shape[1] > 1:
        device = sampled.token_ids.device
        tokens = sampled.token_ids[to_device(plan.entries, device)]
        table, counts = _draft_table(plan, one, drafts, tokens.shape)
        held, num_drafts = to_device(table, device), to_device(counts, device)
        accepted = acceptance.accept(sampled=tokens, drafts=held, num_drafts=num_drafts).minimum(num_drafts)
        steps = torch.arange(tokens.shape[1], device=device)
        kept = torch.cat([held, held.new_full((len(held), 1), -1)], dim=1)
        tokens = torch.where(steps < accepted[:, None], kept, tokens)
        num_emitted = accepted + 1
    _write_back(tokens, plan, rows)
    return Emitted(
        indices=one.indices[plan.sequences],
        token_ids=tokens,
        num_emitted=num_emitted,
        logprobs=_located(sampled.logprobs, plan, one),
    )


def _draft_table(
    plan: SamplePlan, one: Pass, drafts: Drafts | None, shape: torch.Size
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return drafts ``[S', K - 1]``, padded with -1, and their numbers ``[S']``."""
    table = np.full((shape[0], shape[1] - 1), -1, np.int64)
    counts = np.zeros(shape[0], np.int64)
    if drafts is not None:
        real = len(plan.sequences)
        counts[:real], tokens = drafts_of(drafts, one.indices[plan.sequences])
        table[:real][np.arange(table.shape[1]) < counts[:real, None]] = tokens
        counts[real:], table[real:] = counts[0], table[0]
    return table, counts


def _write_back(tokens: torch.Tensor, plan: SamplePlan, rows: Rows) -> None:
    """Put every step's token behind the known ones; what is beyond the emitted ones is overwritten before it is read."""
    context_rows = np.asarray(plan.context.rows)[plan.entries]
    columns = np.asarray(plan.context.positions)[plan.entries] + 1
    # A step beyond a sequence's last repeats its last entry: it must carry the same token, for writes know no order.
    last = np.minimum(np.arange(tokens.shape[1]), _steps(plan)[:, None] - 1)
    where = np.stack([context_rows, columns, last]).astype(np.int64)
    row, column, step = to_device(where, tokens.device)
    rows.tokens[row, column] = tokens.gather(1, step).int()


def _steps(plan: SamplePlan) -> Int32Array:
    return np.append(plan.counts, np.repeat(plan.counts[:1], len(plan.entries) - len(plan.counts)))


def _located(
    logprobs: tuple[SampledLogprobs, ...], plan: SamplePlan, one: Pass
) -> tuple[tuple[int, int, int, SampledLogprobs], ...]:
    if not logprobs:
        return ()
    where = {int(plan.entries[s, k]): (s, k) for s in range(len(plan.sequences)) for k in range(int(plan.counts[s]))}
    found = []
    for entry in logprobs:
        if entry.index in where:
            s, k = where[entry.index]
            index = int(one.indices[plan.sequences[s]])
            found.append((index, k, plan.context.positions[entry.index] + 1, entry))
    return tuple(found)
