"""Optional calls of backends and executors: capabilities beside their contracts.

A backend or executor that has the method has the capability; the engine looks once, when it is composed.

    capability                backend        executor
    SupportsEmbedding         embed          embed                        models that turn text into a vector
    SupportsSwapping          swap_blocks    swap_blocks                  preempted sequences wait in host memory
    SupportsGuessing          guess                                       a draft model makes several drafts in one call
    SupportsHead              draft, rank    draft, rank                  a head drafts from the model's hidden states
    SupportsDeferredWarmUp    warm_up_rest   warm_up_rest                 buckets prepared while requests are served
    SupportsKVPool            kv_cache                                    a KV connector reads and writes its blocks
    SupportsKVConnector                      kv_layout, close_connector   it runs a connector's worker sides
    SupportsRemoteKVConnector                kv_layouts                   it runs them in other processes
    SupportsRanks             join                                        it computes a share of a model, together with others
    SupportsRestart                          restart                      its ranks can be started again after they were lost

``SupportsPreload`` is one of what an executor is given to make backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import attrs
import numpy as np

from trencadis.interfaces.collective import RankGroups
from trencadis.interfaces.kv_pool import KVPool
from trencadis.records import BoolArray, Bucket, Float32Array, Int32Array, KVLayout, TableWrites

__all__ = [
    "BlockCopies",
    "GuessBatch",
    "HeadBatch",
    "HeadGuesses",
    "HeadNodes",
    "SupportsDeferredWarmUp",
    "SupportsEmbedding",
    "SupportsGuessing",
    "SupportsHead",
    "SupportsKVConnector",
    "SupportsKVPool",
    "SupportsPreload",
    "SupportsRanks",
    "SupportsRemoteKVConnector",
    "SupportsRestart",
    "SupportsSwapping",
]


@attrs.frozen(kw_only=True, eq=False)
class BlockCopies:
    """Whole KV blocks, all layers, that are copied one way between device and host memory.

    Attributes:
        sources: int32 ``[n]``.
        targets: int32 ``[n]``, none twice.
    """

    sources: Int32Array
    targets: Int32Array

    def __len__(self) -> int:
        return len(self.sources)

    @classmethod
    def none(cls) -> BlockCopies:
        """Return no copies at all."""
        return cls(sources=np.empty(0, np.int32), targets=np.empty(0, np.int32))


@runtime_checkable
class SupportsEmbedding(Protocol):
    """Embeds texts; whether the loaded model can is ``ModelFacts.embedding_size``."""

    def embed(self, token_ids: Sequence[Int32Array]) -> Float32Array:
        """Return one vector for each text, float32 ``[num_texts, embedding_size]``; leaves no trace in KV cache or rows.

        Needs ``load`` only. Called where ``submit`` is, between batches, with at most ``max_num_batched_tokens`` tokens in all
        unless one text alone is longer. The same text gives the same vector whatever else is in the call, up to rounding.
        An executor embeds on one rank, after every batch submitted so far, and returns when done.

        Args:
            token_ids: Tokens of each text, int32 ``[num_tokens]``, at least one and at most ``ModelFacts.max_model_len``.

        Raises:
            BackendError: The model cannot embed (``ModelFacts.embedding_size`` is 0).
        """
        ...


@runtime_checkable
class SupportsSwapping(Protocol):
    """Copies KV blocks to host memory and back. A backend says so in ``BackendCapabilities.swaps_blocks``, too."""

    def swap_blocks(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
        """Copy KV blocks to host memory and back, after every batch submitted so far and before any later one.

        All of ``outs`` are read before any of ``ins`` is written. Every bit comes back as it was. May return before the copies
        are done. Called at most once a step.

        An executor does so on every rank and need not wait. A copy that fails later fails the batch that is submitted next: the
        engine then recomputes the sequences of both. Beside a KV connector blocks go out before ``begin_step`` of the next batch,
        which may load into them, and come in after it, for it may still save what they held.

        Args:
            outs: From device blocks to host blocks.
            ins: From host blocks to device blocks.

        Raises:
            BackendError: The capabilities do not say ``swaps_blocks``.
        """
        ...


@attrs.frozen(kw_only=True, eq=False)
class GuessBatch:
    """Texts that a model continues with the tokens it finds most likely. Sequences are parallel.

    Attributes:
        rows: Device row of each sequence, none twice, int32 ``[num_sequences]``.
        starts: Tokens computed before, int32 ``[num_sequences]``.
        query_lens: Tokens of the text that are computed now, at least 1, int32 ``[num_sequences]``.
        token_ids: They, one sequence after another, int32 ``[sum(query_lens)]``.
        num_guesses: Tokens to add to each, at least 1, int32 ``[num_sequences]``; there are blocks for all but the last of them.
        min_probability: A sequence's guesses end before the first that is less probable, 0 to 1.
        table_writes: New blocks of the rows.
        closed: Tokens that are never chosen, bool ``[vocab_size]``; None: there are none.
    """

    rows: Int32Array
    starts: Int32Array
    query_lens: Int32Array
    token_ids: Int32Array
    num_guesses: Int32Array
    table_writes: TableWrites
    min_probability: float = 0.0
    closed: BoolArray | None = None


@runtime_checkable
class SupportsGuessing(Protocol):
    """A backend that continues texts greedily, several tokens in one call: without sampler, row starts and a batch for each token."""

    def guess(self, batch: GuessBatch) -> Int32Array | None:
        """Return the most likely tokens, int32 ``[num_sequences, largest num_guesses]``; -1 after a sequence's last.

        Writes keys and values of the text and of all guesses but the last. Of equally likely tokens the lowest is chosen. Called
        where ``submit`` is, after ``allocate``.

        Args:
            batch: At most ``max_num_batched_tokens`` tokens of text.

        Returns:
            None where the loaded model cannot, and then always; nothing was changed.
        """
        ...


@attrs.frozen(kw_only=True, eq=False)
class HeadBatch:
    """Sequences that a head drafts for; arrays are parallel.

    Attributes:
        rows: Device row of each, int32 ``[num_sequences]``.
        positions: Position of each sequence's newest token that was computed, int32 ``[num_sequences]``; the row knows one token more.
        num_drafts: How many tokens to draft, at least 1, int32 ``[num_sequences]``.
        min_probability: A sequence's drafts end before the first that the head finds less probable, 0 to 1.
    """

    rows: Int32Array
    positions: Int32Array
    num_drafts: Int32Array
    min_probability: float = 0.0


@attrs.frozen(kw_only=True, eq=False)
class HeadNodes:
    """Nodes of draft trees that a head is to look beyond, level by level; the first level are the newest tokens themselves.

    Attributes:
        rows: Device row of each sequence, int32 ``[num_sequences]``; the same in all levels of a tree, like ``positions``.
        positions: Newest token of each that was computed, int32 ``[num_sequences]``; the row knows one token more.
        owners: Sequence of each node, int32 ``[num_nodes]``; without nodes trees begin, and those of before are forgotten.
        token_ids: Their tokens, int32 ``[num_nodes]``.
        parents: The node before each, int32 ``[num_nodes]``: its place among all nodes of its sequence that earlier levels had, in their
            order; -1: the newest token.
        num_ranked: Most likely tokens to return after each.
    """

    rows: Int32Array
    positions: Int32Array
    owners: Int32Array
    token_ids: Int32Array
    parents: Int32Array
    num_ranked: int


@attrs.frozen(kw_only=True, eq=False)
class HeadGuesses:
    """The most likely tokens after nodes, best first.

    Attributes:
        token_ids: int32 ``[num_nodes, num_ranked]``; -1 where there are none.
        logprobs: Their log-probabilities, float32 ``[num_nodes, num_ranked]``.
    """

    token_ids: Int32Array
    logprobs: Float32Array


@runtime_checkable
class SupportsHead(Protocol):
    """Drafts with a head, which was loaded with the model: ``ModelSource.head``.

    A backend whose loaded model has one says so by ``backend.head`` in ``BackendCapabilities.provides``. The head's keys and values are
    one more layer of the KV cache, with the same block tables: it writes them with every step.
    """

    def draft(self, batch: HeadBatch) -> Int32Array:
        """Return the most likely tokens after sequences, int32 ``[num_sequences, most drafts]``; what is not asked for is -1.

        All of a sequence are -1 if its newest position was not computed by the last batch. Called where ``submit`` is, between
        batches. An executor drafts on one rank, after every batch submitted so far, and returns when done.
        """
        ...

    def rank(self, nodes: HeadNodes) -> HeadGuesses:
        """Return the most likely tokens after nodes of trees; in the first level, after the newest token of each sequence.

        A sequence that :meth:`draft` has nothing for has -1 there, and no nodes later. Called as :meth:`draft` is, for all levels of
        a tree between two batches.
        """
        ...


@runtime_checkable
class SupportsDeferredWarmUp(Protocol):
    """Prepares buckets that ``warm_up`` put off."""

    def warm_up_rest(self, *, is_idle: bool) -> tuple[Bucket, ...]:
        """Prepare a part of what ``warm_up`` put off, and return the buckets that are ready now and were not before.

        Called until as many were returned as ``WarmUpReport.num_deferred`` says: after each step, and again and again while there
        is nothing to serve. The backend sets the pace: a request that arrives meanwhile waits until this returns. An executor
        returns the buckets that are ready on all ranks; unless idle it does not wait, and a later call may return what it starts.

        Args:
            is_idle: No request is being served.
        """
        ...


@runtime_checkable
class SupportsKVPool(Protocol):
    """A backend whose KV blocks connectors can read and write."""

    def kv_cache(self) -> KVPool:
        """Return the KV cache that worker sides of KV connectors are given; what it has beside the pool is documented by each backend.

        Raises:
            BackendError: The loaded model has none.
        """
        ...


@runtime_checkable
class SupportsKVConnector(Protocol):
    """An executor that runs the worker side of a KV connector on each rank."""

    def kv_layout(self) -> KVLayout:
        """Return what the bytes of a KV block mean, on the first rank; after ``allocate``."""
        ...

    def close_connector(self) -> None:
        """Close the KV connector's worker side on every rank; returns when no transfer touches a block any more."""
        ...


@runtime_checkable
class SupportsRemoteKVConnector(Protocol):
    """An executor whose ranks, and with them the worker sides of a KV connector, are in other processes.

    ``AllocationPlan.connector`` travels to each rank, where the worker side is made; one with ``SupportsRemoteScheduler`` is then told of
    the ranks, also when these are started again.
    """

    def kv_layouts(self) -> Sequence[KVLayout]:
        """Return what the bytes of a KV block mean, on each rank; after ``allocate``."""
        ...


@runtime_checkable
class SupportsRanks(Protocol):
    """A backend that computes a share of a model; the ranks of a replica have the others.

    Every rank gets every batch, in the same order. The output rank samples; the others return a ``StepOutput`` without tokens. They
    get the tokens from it within the step, so that rows are the same everywhere; in a pipeline they need not, for
    ``Batch.start_token_ids`` brings them: a stage that waited for the last one would not compute the next batch meanwhile. Which
    collectives it computes with is ``BackendCapabilities.collectives``.
    """

    def join(self, groups: RankGroups) -> None:
        """Take a place among the ranks. Called once, before ``load``.

        Raises:
            BackendError: It has no share of that kind to compute.
        """
        ...


@runtime_checkable
class SupportsRestart(Protocol):
    """An executor whose ranks are processes that may end."""

    def restart(self) -> None:
        """Start the ranks again after a ``RanksLostError``: loaded, allocated and warmed up as before, with an empty KV cache.

        What ``warm_up`` put off is put off again: ``warm_up_rest`` begins anew.

        Raises:
            BackendError: They were lost too often within a short time, or cannot be started.
        """
        ...


@runtime_checkable
class SupportsPreload(Protocol):
    """A ``make_backend`` of ``Executor.start`` that knows what can be imported before any backend is made."""

    @property
    def preload(self) -> Callable[[], None] | None:
        """A function that imports the modules a backend needs; can be pickled. None: nothing may be imported before the fork.

        An executor that forks ranks calls it once, in a process that makes no backend.
        """
        ...
