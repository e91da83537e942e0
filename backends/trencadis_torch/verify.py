"""Sampling, verification of drafts, and writing tokens back: the second half of a pass.

Verification goes along the drafts of a sequence: the acceptance rule gives the probability of each step, and random numbers of the core
decide. Node 0 is a sequence's newest token, node i + 1 its draft i.

Shapes: B or S sequences that emit, K most logits rows of one sequence, N most drafts of one, L logits rows given to the sampler, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from trencadis.interfaces import (
    AcceptanceRule,
    Distributions,
    Sampled,
    SampledLogprobs,
    Sampler,
    SamplingContext,
    Verification,
)
from trencadis.records import DraftDistributions, Drafts, Int32Array, Pass, Phase, RowError
from trencadis_torch.attention.trees import DraftTrees
from trencadis_torch.device import to_device
from trencadis_torch.parallel.tokens import Chosen, TokenExchange
from trencadis_torch.rows import Rows

__all__ = ["Emitted", "SamplePlan", "emit", "MatchingPrefix", "Verified", "verify_drafts"]

_MIDDLE = 0.5
"""Where a rule is shown tokens its shares are 0 or 1, and no random number is needed."""


@attrs.frozen(kw_only=True)
class SamplePlan:
    """Which logits rows a pass samples.

    Attributes:
        sequences: Sequences of the pass that emit, ``[S]``.
        counts: Logits rows of each, ``[S]``.
        entries: Which of the L rows belongs to sequence s and step k, ``[S', K]``; S' is S, or more where padding repeats
            the first sequence. Steps beyond a sequence's last repeat its last.
        tokens: Index of each logits row's token in the pass, ``[L]``.
        context: For the sampler.
        firsts: Position of the token of each sequence's first logits row, ``[S']``.
        trees: Trees of the whole pass, if drafts branch: step k is then node k.
        padded: Whether every shape follows from a bucket.
    """

    sequences: npt.NDArray[np.int64]
    counts: Int32Array
    entries: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    context: SamplingContext
    firsts: npt.NDArray[np.int64]
    trees: DraftTrees | None = None
    padded: bool = False

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
        trees: DraftTrees | None = None,
    ) -> SamplePlan | None:
        """Return the plan of a pass, or None if no sequence of it emits. Pure.

        Args:
            one: The pass.
            firsts: Index of each sequence's first token in the pass.
            history: Every row's tokens.
            padded: Make every shape follow from the bucket: repeats are free, for a token depends on its row alone.
            num_sequences: Most sequences of a padded pass that has them in one row of tokens; 0: the bucket's batch size.
            num_steps: Most logits rows of one of its sequences; 0: as many as the bucket's phase says.
            trees: Trees of a ragged pass whose drafts branch.
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
        # Steps beyond a sequence's last count its last again.
        entries = (np.cumsum(used).reshape(used.shape) - 1).astype(np.int64)
        return cls(
            sequences=sequences,
            counts=counts,
            entries=entries,
            tokens=(firsts[chosen][:, None] + starts)[used].astype(np.int64),
            context=_context(one, chosen, starts, used, history, trees),
            firsts=(one.starts[chosen] + starts[:, 0]).astype(np.int64),
            trees=trees,
            padded=padded,
        )


def _context(
    one: Pass,
    chosen: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    used: npt.NDArray[np.bool_],
    history: torch.Tensor,
    trees: DraftTrees | None,
) -> SamplingContext:
    """Return whose the logits rows are: of the steps that are used, the row and the position of each."""
    rows = tuple(np.broadcast_to(one.rows[chosen][:, None], used.shape)[used].tolist())
    if trees is None:
        positions = (one.starts[chosen][:, None] + starts)[used]
        return SamplingContext(rows=rows, positions=tuple(positions.tolist()), tokens=history)
    size = used.shape[1]
    positions = (trees.roots[chosen][:, None] + trees.depths[chosen, :size])[used]
    found = trees.histories(history)
    return SamplingContext(
        rows=rows,
        positions=tuple(positions.tolist()),
        tokens=found.tokens,
        branches=tuple(found.rows[chosen, :size][used].tolist()),
    )


def _bucket_steps(one: Pass) -> int:
    return one.bucket.query_len if one.bucket.phase is Phase.DECODE else 1


@attrs.frozen(kw_only=True)
class Emitted:
    """What a pass emits, on the device.

    Attributes:
        indices: Indices in the plan of the sequences that emit, on the host, ``[S]``.
        token_ids: int64 ``[S', K]``; of sequence s the first ``num_emitted[s]`` count, and what is after the S real ones
            does not: it is cut off on the host, where that costs no operation of another shape.
        num_emitted: int64 ``[S']``; None: one each.
        logprobs: Log-probabilities of sequences that asked: index in the plan, step, position, and the sampler's entry.
        paths: Node of each accepted draft, int64 ``[S', K - 1]``; None: drafts did not branch.
        vocab_size: Tokens that the model knows.
        chosen_by: Names the sampler in messages.
        row_errors: Sequences that the sampler had no token for: index in the plan, and why. Their tokens do not count.
        late_errors: Returns more of them, once the step is done; or None.
    """

    indices: Int32Array
    token_ids: torch.Tensor
    num_emitted: torch.Tensor | None
    logprobs: tuple[tuple[int, int, int, SampledLogprobs], ...]
    paths: torch.Tensor | None = None
    row_errors: tuple[RowError, ...] = ()
    late_errors: Callable[[], tuple[RowError, ...]] | None = None
    vocab_size: int = 1 << 31
    chosen_by: str = "the sampler"


def emit(
    logits: torch.Tensor,
    plan: SamplePlan,
    one: Pass,
    *,
    drafts: Drafts | None,
    rows: Rows,
    sampler: Sampler,
    acceptance: AcceptanceRule,
    exchange: TokenExchange | None = None,
) -> Emitted | None:
    """Sample, accept, and write the emitted tokens after each row's known ones; None if they come with a later batch.

    Args:
        logits: ``[L, V]``.
        plan: Whose.
        one: The pass.
        drafts: Drafts of the whole plan.
        rows: Written to.
        sampler: Chooses.
        acceptance: Says which drafts stand.
        exchange: Between ranks, one of which samples; None: there is one rank.
    """

    def choose() -> Chosen:
        if plan.entries.shape[1] == 1:
            sampled = sampler.sample(logits, plan.context)
            return Chosen(token_ids=sampled.token_ids[:, None], sampled=sampled)
        return _verify(logits, plan, one, drafts=drafts, sampler=sampler, acceptance=acceptance)

    chosen = choose() if exchange is None else _shared(choose, exchange, plan, logits.device)
    if chosen is None:
        return None
    tokens, sampled = chosen.token_ids, chosen.sampled
    # Another rank's tokens have been seen to where they were chosen, and logits here may be of no vocabulary.
    is_safe = tokens.device.type == "cpu" or sampled is None
    _write_back(tokens if is_safe else tokens.clamp(0, logits.shape[1] - 1), plan, rows)
    late = None
    if sampled is not None and sampled.late_errors is not None:
        unread, known = sampled.late_errors, chosen

        def late() -> tuple[RowError, ...]:
            return _located_errors(unread(), plan, one, known)

    return Emitted(
        indices=one.indices[plan.sequences],
        token_ids=tokens,
        num_emitted=None if chosen.num_accepted is None else chosen.num_accepted + 1,
        logprobs=() if sampled is None else _located(sampled.logprobs, plan, one, chosen),
        paths=chosen.nodes,
        row_errors=() if sampled is None else _located_errors(sampled.row_errors, plan, one, chosen),
        late_errors=late,
        vocab_size=logits.shape[1],
        chosen_by=getattr(sampler, "label", "") or f"the sampler {type(sampler).__name__}",
    )


def _shared(
    choose: Callable[[], Chosen], exchange: TokenExchange, plan: SamplePlan, device: torch.device
) -> Chosen | None:
    """Return the tokens that one rank chose; None if this one gets them later."""
    num_sequences, num_steps = plan.entries.shape
    has_paths = num_steps > 1 and plan.trees is not None
    if has_paths and plan.trees is not None:
        num_steps = plan.trees.max_depth + 1
    return exchange.share(choose, num_sequences=num_sequences, num_steps=num_steps, has_paths=has_paths, device=device)


def _verify(
    logits: torch.Tensor,
    plan: SamplePlan,
    one: Pass,
    *,
    drafts: Drafts | None,
    sampler: Sampler,
    acceptance: AcceptanceRule,
) -> Chosen:
    """Return each sequence's tokens, what was sampled, and the drafts that were accepted."""
    if logits.device.type == "cpu" and not (plan.padded or plan.trees or acceptance.needs_distributions):
        return _verify_on_host(logits, plan, one, drafts=drafts, sampler=sampler, acceptance=acceptance)
    max_depth = None if plan.trees is None else plan.trees.max_depth
    entries = to_device(plan.entries, logits.device)
    asked = draft_table(plan, one, drafts, logits)
    if not acceptance.needs_distributions:
        sampled = sampler.sample(logits, plan.context)
        chosen = sampled.token_ids[entries]
        found = attrs.evolve(asked, sampled=chosen)
        middle = torch.full(entries.shape, _MIDDLE, device=logits.device)
        verified = verify_drafts(found, acceptance.accept(found), middle, max_depth=max_depth)
        last = chosen.gather(1, verified.stops[:, None])
        return _chosen_after(_tokens(found, verified, last), sampled, verified, plan)
    told: list[tuple[torch.Tensor, Verified]] = []

    def choose(distributions: Distributions) -> torch.Tensor:
        found = attrs.evolve(asked, target=distributions.probabilities[entries])
        verified = verify_drafts(
            found, acceptance.accept(found), distributions.uniforms()[entries], max_depth=max_depth
        )
        weights = acceptance.last(found, verified.stops)
        last = distributions.draw(weights, entries.gather(1, verified.stops[:, None])[:, 0])[:, None]
        tokens = _tokens(found, verified, last)
        told.append((tokens, verified))
        return _chosen(distributions.probabilities, entries, verified, tokens)

    sampled = sampler.verify(logits, plan.context, choose)
    return _chosen_after(told[0][0], sampled, told[0][1], plan)


def _verify_on_host(
    logits: torch.Tensor,
    plan: SamplePlan,
    one: Pass,
    *,
    drafts: Drafts | None,
    sampler: Sampler,
    acceptance: AcceptanceRule,
) -> Chosen:
    """Return the same as :func:`_verify` for linear drafts and a rule that is shown tokens: by numpy, a dozen operations of PyTorch less."""
    sampled = sampler.sample(logits, plan.context)
    chosen = sampled.token_ids.numpy()[plan.entries]
    asked = attrs.evolve(draft_table(plan, one, drafts, logits), sampled=torch.from_numpy(chosen))
    tokens, counts = asked.tokens.numpy().copy(), asked.num_drafts.numpy()
    steps = np.arange(tokens.shape[1])
    stands = (acceptance.accept(asked).numpy() > _MIDDLE) & (steps < counts[:, None])
    num_accepted = np.logical_and.accumulate(stands, axis=1).sum(axis=1)
    last = chosen[np.arange(len(chosen)), num_accepted]
    emitted = np.where(
        np.arange(chosen.shape[1]) < num_accepted[:, None], np.append(tokens, last[:, None], 1), last[:, None]
    )
    accepted = torch.from_numpy(num_accepted)
    nodes = torch.from_numpy(np.tile(steps + 1, (len(tokens), 1)))
    verified = Verified(nodes=nodes, num_accepted=accepted, stops=accepted)
    return _chosen_after(torch.from_numpy(emitted), sampled, verified, plan)


def _chosen_after(tokens: torch.Tensor, sampled: Sampled, verified: Verified, plan: SamplePlan) -> Chosen:
    return Chosen(
        token_ids=tokens,
        num_accepted=verified.num_accepted,
        nodes=None if plan.trees is None else verified.nodes,
        sampled=sampled,
    )


def _tokens(found: Verification, verified: Verified, last: torch.Tensor) -> torch.Tensor:
    """Return accepted drafts and the last token after them, int64 ``[S', K]``; what follows does not count."""
    # A path without accepted drafts stays at node 0, whose index minus 1 is no draft.
    accepted = found.tokens.gather(1, (verified.nodes - 1).clamp(min=0))
    steps = torch.arange(accepted.shape[1] + 1, device=accepted.device)
    kept = torch.cat([accepted, last], dim=1)
    return torch.where(steps < verified.num_accepted[:, None], kept, last)


def _chosen(
    probabilities: torch.Tensor, entries: torch.Tensor, verified: Verified, tokens: torch.Tensor
) -> torch.Tensor:
    """Return a token for each logits row: the emitted one on the accepted path, elsewhere the most likely one."""
    chosen = probabilities.argmax(-1)
    start = torch.zeros_like(verified.stops)[:, None]
    nodes = torch.cat([start, verified.nodes], dim=1)
    steps = torch.arange(nodes.shape[1], device=nodes.device)
    # Beyond the stop the node is the last one again, with its own token: writes know no order.
    nodes = torch.where(steps <= verified.num_accepted[:, None], nodes, verified.stops[:, None])
    return chosen.index_put_((entries.gather(1, nodes),), tokens)


def draft_table(plan: SamplePlan, one: Pass, drafts: Drafts | None, logits: torch.Tensor) -> Verification:
    """Return the drafts of a pass, ``[S', N]``, on the device; padding sequences repeat the first."""
    real, num_steps = len(plan.sequences), plan.entries.shape[1] - 1
    table = np.full((3, len(plan.entries), num_steps), -1, np.int64)
    table[1] = np.arange(num_steps)
    counts = np.zeros(len(plan.entries), np.int64)
    distributions = None if drafts is None else drafts.distributions
    if drafts is not None:
        mine = drafts.take(one.indices[plan.sequences], drafts.num_drafts[one.indices[plan.sequences]])
        counts[:real] = mine.num_drafts
        is_real = np.arange(num_steps) < counts[:real, None]
        table[0, :real][is_real] = mine.token_ids
        if mine.parents is not None:
            table[1, :real][is_real] = mine.parents + 1
        if mine.distributions is not None:
            table[2, :real][is_real] = mine.distributions.rows
        counts[real:], table[:, real:] = counts[0], table[:, :1]
    tokens, parents = to_device(table[:2], logits.device)
    return Verification(
        tokens=tokens,
        parents=parents,
        num_drafts=to_device(counts, logits.device),
        is_linear=plan.trees is None,
        proposal=None if distributions is None else _proposal(distributions, table[2], logits.device),
    )


def _proposal(distributions: DraftDistributions, rows: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Return the distribution of each draft, ``[S', N, V]``, all 0 where there is none.

    Distributions on the host are picked there: how many there are is no shape of an operation on the device.
    """
    held: torch.Tensor = distributions.probabilities
    if held.device.type == "cpu":
        # By DLPack nothing is run, not even an operation that returns its argument.
        known = np.from_dlpack(held if held.dtype is torch.float32 else held.float())
        found = known[np.maximum(rows, 0)]
        found[rows < 0] = 0.0
        return to_device(found, device)
    where = to_device(rows, held.device)
    return (held[where.clamp(min=0)] * (where >= 0)[:, :, None]).to(device)


def _write_back(tokens: torch.Tensor, plan: SamplePlan, rows: Rows) -> None:
    """Put every step's token after the known ones; what is beyond the emitted ones is overwritten before it is read."""
    if tokens.shape[1] == 1 and tokens.device.type == rows.tokens.device.type == "cpu" and not plan.padded:
        # One each, as in most decode steps: without half a dozen operations. (What is padded stands for a device, whose
        # operations are the same ones.)
        entries = np.asarray(plan.context.rows)[plan.entries[:, 0]]
        rows.tokens.numpy()[entries, plan.firsts + 1] = tokens.numpy()[:, 0]
        return
    if tokens.shape[1] == 1 and rows.tokens.is_contiguous():
        entries = np.asarray(plan.context.rows)[plan.entries[:, 0]]
        places = to_device(entries * rows.tokens.shape[1] + plan.firsts + 1, tokens.device)
        rows.tokens.view(-1)[places] = tokens[:, 0].int()
        return
    if tokens.device.type == rows.tokens.device.type == "cpu" and not plan.padded:
        within = np.arange(tokens.shape[1]) < plan.counts[:, None]
        own = np.broadcast_to(np.asarray(plan.context.rows)[plan.entries[:, :1]], within.shape)
        at = plan.firsts[:, None] + 1 + np.arange(tokens.shape[1])
        rows.tokens.numpy()[own[within], at[within]] = tokens.numpy()[within]
        return
    # A step beyond a sequence's last is written where its last is: it must carry the same token, for writes know no order.
    steps = np.minimum(np.arange(tokens.shape[1]), _steps(plan)[:, None] - 1)
    sequence_rows = np.asarray(plan.context.rows)[plan.entries[:, :1]]
    where = np.stack([np.broadcast_to(sequence_rows, steps.shape), plan.firsts[:, None] + 1 + steps, steps])
    row, column, step = to_device(where.astype(np.int64), tokens.device)
    rows.tokens[row, column] = tokens.gather(1, step).int()


def _steps(plan: SamplePlan) -> Int32Array:
    return np.append(plan.counts, np.repeat(plan.counts[:1], len(plan.entries) - len(plan.counts)))


def _located(
    logprobs: tuple[SampledLogprobs, ...], plan: SamplePlan, one: Pass, chosen: Chosen
) -> tuple[tuple[int, int, int, SampledLogprobs], ...]:
    if not logprobs:
        return ()
    # Log-probabilities are on the host, so their step is done: nothing is waited for.
    paths: Sequence[Sequence[int]] = (
        [range(int(count)) for count in plan.counts] if chosen.nodes is None else _paths(chosen)
    )
    where = {int(plan.entries[s, node]): (s, k) for s, path in enumerate(paths) for k, node in enumerate(path)}
    found = []
    for entry in logprobs:
        if entry.index in where:
            s, k = where[entry.index]
            index = int(one.indices[plan.sequences[s]])
            found.append((index, k, plan.context.positions[entry.index] + 1, entry))
    return tuple(found)


def _located_errors(errors: tuple[RowError, ...], plan: SamplePlan, one: Pass, chosen: Chosen) -> tuple[RowError, ...]:
    """Return the errors of logits rows as errors of sequences; errors at drafts that were not reached are left out."""
    if not errors:
        return ()
    by_row = {error.index: error for error in errors}
    found = []
    for sequence, entries, path in zip(plan.sequences.tolist(), plan.entries, _paths(chosen), strict=False):
        wrong = [by_row[entry] for entry in entries[path].tolist() if entry in by_row]
        if wrong:
            found.append(attrs.evolve(wrong[0], index=int(one.indices[sequence])))
    return tuple(found)


def _paths(chosen: Chosen) -> list[list[int]]:
    """Return the nodes of each of S' sequences: node 0 and its accepted drafts. Waits for the device."""
    accepted = chosen.num_accepted
    counts = [0] * len(chosen.token_ids) if accepted is None else accepted.tolist()
    if chosen.nodes is None:
        return [list(range(count + 1)) for count in counts]
    return [[0, *path[:count]] for path, count in zip(chosen.nodes.tolist(), counts, strict=True)]


class MatchingPrefix(AcceptanceRule):
    """Drafts stand while the sampler chooses the very same tokens: the text is that of no speculation."""

    lossless = True
    supports_trees = True

    def accept(self, verification: Verification) -> torch.Tensor:
        """Return 1 where a draft is the token that was sampled at the node before it, ``[B, N]``."""
        assert verification.sampled is not None, "a rule that needs no distributions is shown the sampled tokens"
        return (verification.sampled.gather(1, verification.parents) == verification.tokens).float()


@attrs.frozen(kw_only=True, eq=False)
class Verified:
    """The accepted drafts of each sequence.

    Attributes:
        nodes: The nodes after node 0, int64 ``[B, N]``, or fewer; what is beyond the stop does not count.
        num_accepted: How many there are, int64 ``[B]``.
        stops: Last node of each accepted path, int64 ``[B]``.
    """

    nodes: torch.Tensor
    num_accepted: torch.Tensor
    stops: torch.Tensor


def verify_drafts(
    verification: Verification, accept: torch.Tensor, uniforms: torch.Tensor, *, max_depth: int | None = None
) -> Verified:
    """Return the drafts that are accepted. Pure; every shape follows from those of the arguments.

    At a node the drafts after it have, one after another, their shares of (0, 1): the draft in whose share the node's number lies is
    accepted; verification stops if the number lies after them all.

    Args:
        verification: The drafts.
        accept: Share of each draft at the node before it, ``[B, N]``.
        uniforms: A number of (0, 1) for each node, ``[B, N + 1]``.
        max_depth: No accepted path is longer, if known: then branching drafts have so many ``Verified.nodes``.
    """
    num_nodes = torch.arange(accept.shape[1], device=accept.device)
    is_real = num_nodes < verification.num_drafts[:, None]
    if verification.is_linear:
        stands = (uniforms[:, :-1] < accept) & is_real
        num_accepted = stands.long().cumprod(1).sum(1)
        return Verified(nodes=(num_nodes + 1).expand(accept.shape), num_accepted=num_accepted, stops=num_accepted)
    here = torch.zeros_like(verification.num_drafts)
    num_accepted = torch.zeros_like(here)
    continues = torch.ones_like(here, dtype=torch.bool)
    nodes = []
    for _ in range(accept.shape[1] if max_depth is None else max_depth):
        following = (verification.parents == here[:, None]) & is_real
        shares = torch.where(following, accept.double(), 0.0).cumsum(1)
        hits = following & (uniforms.gather(1, here[:, None]) < shares)
        continues = continues & hits.any(1)
        # Shares only grow: the first hit is the draft in whose share the number lies.
        here = torch.where(continues, hits.long().argmax(1) + 1, here)
        num_accepted = num_accepted + continues
        nodes.append(here)
    return Verified(nodes=torch.stack(nodes, 1), num_accepted=num_accepted, stops=here)
