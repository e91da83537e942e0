"""Attention by data parallelism: a rank has the tokens of its own sequences, and their KV; experts are spread over all ranks.

    own rows of a pass ─▶ attention ─▶ gather ─▶ tokens of all ranks ─▶ own experts ─▶ sum ─▶ own rows ─▶ next layer
                                                                 after the last layer: gather of the rows to be sampled ─▶ logits

Every rank gets every batch, and rows are shared out by their numbers: rank r has those from r · R on, and the blocks from r · N on. So each
knows how many tokens the others have, and no rank is asked. What is gathered is padded to the most tokens of a rank. A rank without tokens
computes one of padding, so that all make the same calls.

Shapes: T token positions of a rank, M the most of any, n ranks, H hidden size, k experts of a token, L logits rows of all ranks.

Source: DP attention of SGLang (``--enable-dp-attention``; ``layers/dp_attention.py``), which is told of the other ranks' numbers of tokens by
a collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trencadis.errors import ModelLoadError
from trencadis.interfaces import AllocationPlan, BlockCopies, Collective
from trencadis.records import Int32Array, Pass, TableWrites
from trencadis_torch.attention.trees import DraftTrees
from trencadis_torch.device import to_device
from trencadis_torch.inputs import ModelInputs, padded_firsts
from trencadis_torch.parallel.experts import OwnExperts, real_tokens
from trencadis_torch.rows import Rows
from trencadis_torch.runner import PassRunner, selects_positions

__all__ = ["DataRunner", "OwnBlocks", "OwnRows", "Spread", "TokenGather", "gather_tokens"]


@attrs.frozen(kw_only=True, eq=False)
class Spread:
    """The sequences of a pass on their ranks; on the host.

    Attributes:
        parts: Part of the pass that each rank runs; padding on a rank without sequences.
        sequences: Which of the pass's each rank has, ascending.
        num_tokens: T of each rank, at least 1.
        firsts: Where each sequence's first token is among those of all ranks: rank · M + place there, int64 ``[num_sequences]``.
        padded: Parts are padded to their bucket, so that T is M.
    """

    parts: tuple[Pass, ...]
    sequences: tuple[npt.NDArray[np.int64], ...]
    num_tokens: tuple[int, ...]
    firsts: npt.NDArray[np.int64]
    padded: bool

    @classmethod
    def of(cls, one: Pass, *, num_ranks: int, num_rows: int, padded: bool) -> Spread:
        """Return the parts of a pass. Pure.

        Args:
            one: The pass.
            num_ranks: n.
            num_rows: Number of rows of all ranks.
            padded: Parts are padded to their bucket.
        """
        ranks, bucket = one.rows // (num_rows // num_ranks), one.bucket
        sequences = tuple(np.flatnonzero(ranks == rank) for rank in range(num_ranks))
        # In the ragged layout padding is a token of another rank's row: of that the block table here names the padding block.
        parts = tuple(
            _taken(one, own) if len(own) or padded else _padding(one, (rank + 1) % num_ranks * (num_rows // num_ranks))
            for rank, own in enumerate(sequences)
        )
        lengths = [part.query_lens.astype(np.int64) for part in parts]
        num_tokens = tuple(bucket.batch_size * bucket.query_len if padded else int(own.sum()) for own in lengths)
        firsts = np.zeros(len(one.rows), np.int64)
        for rank, (own, length) in enumerate(zip(sequences, lengths, strict=True)):
            within = padded_firsts(bucket) if padded else np.cumsum(length) - length
            firsts[own] = rank * max(num_tokens) + within[: len(own)]
        return cls(parts=parts, sequences=sequences, num_tokens=num_tokens, firsts=firsts, padded=padded)

    @property
    def most(self) -> int:
        """M."""
        return max(self.num_tokens)

    @property
    def is_even(self) -> bool:
        """Whether all ranks have as many tokens: nothing is padded to be gathered."""
        return min(self.num_tokens) == self.most

    def real_rows(self) -> npt.NDArray[np.int64]:
        """Return which of the n · M gathered rows are tokens, in the order of ranks. Pure."""
        return np.concatenate([rank * self.most + np.arange(number) for rank, number in enumerate(self.num_tokens)])

    def counted(self) -> npt.NDArray[np.int64]:
        """Return 1 for each token of a sequence and 0 for padding, in the order in which experts get them. Pure."""
        pairs = zip(self.parts, self.sequences, strict=True)
        return np.concatenate([real_tokens(part, padded=self.padded) * bool(len(own)) for part, own in pairs])

    def kept(self, tokens: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return which tokens' hidden states each rank hands in, and where they then are. Pure.

        Args:
            tokens: Tokens whose logits are wanted, counted as ``firsts``, int64 ``[L]``.

        Returns:
            Places within each rank, as many of each, int64 ``[n, most]``, and of each of the L its place among these, int64 ``[L]``.
        """
        ranks, within = np.divmod(tokens, self.most)
        counts = np.bincount(ranks, minlength=len(self.parts))
        order = np.argsort(ranks, kind="stable")
        columns = np.empty(len(tokens), np.int64)
        columns[order] = np.arange(len(tokens)) - np.repeat(np.cumsum(counts) - counts, counts)
        places = np.zeros((len(self.parts), max(1, int(counts.max()))), np.int64)
        places[ranks, columns] = within
        return places, ranks * places.shape[1] + columns


def _taken(one: Pass, sequences: npt.NDArray[np.int64]) -> Pass:
    return attrs.evolve(
        one,
        indices=one.indices[sequences],
        rows=one.rows[sequences],
        starts=one.starts[sequences],
        query_lens=one.query_lens[sequences],
        num_logits=one.num_logits[sequences],
        num_prompt_logits=one.num_prompt_logits[sequences],
    )


def _padding(one: Pass, row: int) -> Pass:
    """Return a pass over the first token of a row, of which nothing is wanted."""
    zero = np.zeros(1, np.int32)
    return attrs.evolve(
        one,
        indices=zero,
        rows=np.array([row], np.int32),
        starts=zero,
        query_lens=zero + 1,
        num_logits=zero,
        num_prompt_logits=zero,
    )


class TokenGather:
    """Brings the tokens of all ranks together, and gives each its own back. One thread; the same calls on every rank.

    Outside of :meth:`over` the ranks hold the same tokens, and nothing is gathered: so a model is checked, and texts are embedded.

    Args:
        group: The ranks.

    Attributes:
        is_on: Ranks hold different tokens.
        order: Which of the rows that all ranks hand to the output projection are wanted, int64 ``[L]`` on the device; None: all those of
            this rank.
    """

    def __init__(self, group: Collective) -> None:
        self.group = group
        self.is_on = False
        self.order: torch.Tensor | None = None
        self._spread: Spread | None = None
        self._real: torch.Tensor | None = None

    @contextlib.contextmanager
    def over(self, spread: Spread | None = None, order: torch.Tensor | None = None) -> Iterator[None]:
        """Gather within this context.

        Args:
            spread: How many tokens the ranks have; None: each as many as this one.
            order: See the attribute.
        """
        self.is_on, self._spread, self.order = True, spread, order
        try:
            yield
        finally:
            self.is_on, self._spread, self.order, self._real = False, None, None, None

    def rows(self, own: torch.Tensor, most: int) -> torch.Tensor:
        """Return the rows of all ranks in their order, each rank's padded to as many, ``[n * most, width]``.

        Args:
            own: ``[T, width]``.
            most: Largest number of rows of a rank.
        """
        padded = nn.functional.pad(own, (0, 0, 0, most - len(own)))
        return self.group.all_gather(padded.reshape(-1)).view(-1, own.shape[1])

    def routed(
        self, hidden_states: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return hidden states, experts and weights of the tokens of all ranks; one message.

        Args:
            hidden_states: ``[T, H]``.
            experts: int64 ``[T, k]``.
            weights: ``[T, k]``.
        """
        parts = [one.contiguous() for one in (hidden_states, experts.int(), weights)]
        own = torch.cat([one.view(torch.uint8) for one in parts], -1)
        spread = self._spread
        found = self.rows(own, len(own) if spread is None else spread.most)
        if spread is not None and not spread.is_even:
            if self._real is None:  # the same in every layer
                self._real = to_device(spread.real_rows(), own.device)
            found = found.index_select(0, self._real)
        widths = [one.shape[1] * one.element_size() for one in parts]
        hidden, routes, shares = (
            piece.contiguous().view(one.dtype) for piece, one in zip(torch.split(found, widths, -1), parts, strict=True)
        )
        return hidden, routes.long(), shares

    def own_rows(self, rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return this rank's rows ``[T, H]`` of those of all ranks.

        Args:
            rows: In the order of :meth:`routed`.
            num_tokens: T.
        """
        rank, spread = self.group.rank, self._spread
        first = rank * num_tokens if spread is None else sum(spread.num_tokens[:rank])
        return rows[first : first + num_tokens]


class SpreadExperts(nn.Module):
    """Experts whose ranks have different tokens: each computes what all ranks' tokens are routed to its own, and gets its tokens' outputs.

    Args:
        own: Experts of this rank, for tokens that all ranks hold.
        gather: Brings them together.
    """

    def __init__(self, own: OwnExperts, gather: TokenGather) -> None:
        super().__init__()
        self.own = own
        self._gather = gather

    def forward(self, hidden_states: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return ``[T, H]``; arguments as in :class:`OwnExperts`."""
        gather = self._gather
        if not gather.is_on:
            return self.own(hidden_states, experts, weights)  # type: ignore[no-any-return]
        found = self.own(*gather.routed(hidden_states, experts, weights))
        return gather.own_rows(found, len(hidden_states))


class SpreadHead(nn.Module):
    """An output projection of the rows of all ranks.

    Args:
        local: The projection, which every rank calls with the same rows.
        gather: Brings them together.
    """

    def __init__(self, local: Any, gather: TokenGather) -> None:
        super().__init__()
        self.local = local
        self.in_features, self.out_features = local.in_features, local.out_features
        self._gather = gather

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return ``[1, L, V]`` from ``[1, rows of a rank, H]``."""
        order = self._gather.order
        if order is not None:
            own = hidden_states[0]
            hidden_states = self._gather.rows(own, len(own)).index_select(0, order)[None]
        return self.local(hidden_states)  # type: ignore[no-any-return]


def gather_tokens(model: Any, group: Collective) -> TokenGather:
    """Let the experts and the output projection of a share take the tokens of all ranks; returns what says where they are.

    Args:
        model: Whole but for experts and output projection; changed.
        group: The ranks.

    Raises:
        ModelLoadError: It computes logits of every token, which ranks with different tokens would all have to gather.
    """
    if not selects_positions(model):
        raise ModelLoadError(
            f'[parallel] attention = "data": {type(model).__name__} does not say of which tokens it computes logits (logits_to_keep).',
            hint='Set [parallel] attention = "tensor".',
        )
    gather = TokenGather(group)
    for name, module in list(model.named_modules()):
        if isinstance(module, OwnExperts):
            _put(model, name, SpreadExperts(module, gather))
        elif module is model.get_output_embeddings():
            _put(model, name, SpreadHead(module, gather))
    return gather


def _put(model: Any, name: str, module: nn.Module) -> None:
    owner, _, own = name.rpartition(".")
    setattr(model.get_submodule(owner), own, module)


@attrs.frozen(kw_only=True)
class OwnBlocks:
    """The KV blocks of a rank, by which a batch and copies name them, and by which its cache does.

    Attributes:
        rank: Which.
        num_blocks: Number of blocks of a rank.
        num_host_blocks: Number of host blocks of a rank.
    """

    rank: int
    num_blocks: int
    num_host_blocks: int

    def copies(self, sources: Int32Array, targets: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Return the copies that are this rank's, within its cache. Pure."""
        is_own = sources // self.num_blocks == self.rank
        first = self.rank * self.num_blocks
        return sources[is_own] - first, targets[is_own] - first

    def swaps(self, *, outs: BlockCopies, ins: BlockCopies) -> dict[str, BlockCopies]:
        """Return the copies to host memory and back that are this rank's. Pure."""
        first, first_host = self.rank * self.num_blocks, self.rank * self.num_host_blocks
        out, back = (device // self.num_blocks == self.rank for device in (outs.sources, ins.targets))
        return {
            "outs": BlockCopies(sources=outs.sources[out] - first, targets=outs.targets[out] - first_host),
            "ins": BlockCopies(sources=ins.sources[back] - first_host, targets=ins.targets[back] - first),
        }


class OwnRows(Rows):
    """Rows of all ranks, and block tables of a rank's own: those of others name the padding block alone.

    Tokens of all rows are on every rank: the one that samples wants them, and all are told what it chose.

    Args:
        plan: Sizes, of all ranks.
        device: Where.
        own: The rank's blocks.
        num_ranks: n.
    """

    def __init__(self, plan: AllocationPlan, device: torch.device, own: OwnBlocks, num_ranks: int) -> None:
        super().__init__(plan, device)
        self.tables.fill_(own.num_blocks)
        self._own = own
        self._num_own = plan.num_rows // num_ranks

    def write_tables(self, writes: TableWrites) -> None:
        """Take new blocks of this rank's rows."""
        is_own = writes.rows // self._num_own == self._own.rank
        blocks = writes.block_ids[is_own] - self._own.rank * self._own.num_blocks
        super().write_tables(TableWrites(rows=writes.rows[is_own], columns=writes.columns[is_own], block_ids=blocks))


@attrs.frozen(kw_only=True)
class SpreadInputs(ModelInputs):
    """Inputs of a rank's part of a pass.

    Attributes:
        spread: Sequences of the pass on their ranks.
    """

    spread: Spread

    @property
    def num_tokens(self) -> int:
        """Token positions of all ranks."""
        return sum(self.spread.num_tokens)


class DataRunner(PassRunner):
    """Runs this rank's part of each pass; logits are of the whole pass, on every rank.

    Args:
        gather: Exchange of the model's tokens.
        num_rows: Number of rows of all ranks.
        options: Arguments of :class:`PassRunner`.
    """

    def __init__(self, model: Any, *, gather: TokenGather, num_rows: int, **options: Any) -> None:
        super().__init__(model, **options)
        self._gather = gather
        self._num_rows = num_rows
        self._num_ranks = gather.group.size

    def inputs(self, one: Pass, trees: DraftTrees | None = None) -> SpreadInputs:
        """Return the inputs of this rank's part of a pass; ``firsts`` are of the whole one."""
        spread = Spread.of(one, num_ranks=self._num_ranks, num_rows=self._num_rows, padded=self._padded)
        own = spread.sequences[self._gather.group.rank]
        trees = trees.take(own) if trees is not None and len(own) else None
        found = super().inputs(spread.parts[self._gather.group.rank], trees)
        return SpreadInputs(
            token_ids=found.token_ids,
            positions=found.positions,
            attention=found.attention,
            firsts=spread.firsts,
            spread=spread,
        )

    def forward(self, inputs: ModelInputs, tokens: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return the logits ``[L, V]`` at some tokens of the whole pass."""
        assert isinstance(inputs, SpreadInputs), "made by this runner"
        places, order = inputs.spread.kept(tokens)
        with self._gather.over(inputs.spread, to_device(order, inputs.token_ids.device)):
            return super().forward(inputs, places[self._gather.group.rank])
