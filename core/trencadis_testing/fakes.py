"""Deterministic stand-ins: a "model" in plain arithmetic whose next token depends on the whole KV cache.

The fake KV entry of position p is a number chained from the entry of position p - 1 and the token at p, read through the block
table as a real device would. So a wrong block, a lost write, or a block given to two sequences changes the text; and in strict mode
it is reported at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from trencadis.errors import BackendError, StepFailedError
from trencadis.interfaces import (
    AllocationPlan,
    Backend,
    BackendCapabilities,
    BlockCopies,
    LayerGate,
    PendingStep,
    Sampler,
)
from trencadis.records import (
    Batch,
    Bucket,
    Float32Array,
    Int32Array,
    Int64Array,
    MemoryReport,
    ModelFacts,
    ModelSource,
    Pass,
    StepOutput,
    TokenLogprobs,
)
from trencadis_testing.fake_drafts import DraftTree, accepted_path
from trencadis_testing.fake_model import (
    MULTIPLIER,
    START,
    chain,
    fake_embedding,
    fake_logprob,
    fake_next_token,
    fake_text,
)
from trencadis_testing.fake_pool import FakeKVCache
from trencadis_testing.fake_step import FakeStep
from trencadis_testing.shapes import why_too_small

__all__ = ["FakeBackend", "fake_embedding", "fake_next_token", "fake_text"]


class FakeBackend(Backend):
    """A backend without a device: milliseconds per run, text that proves the KV cache.

    A batch is not run before its ``wait`` or that of a later one is called, so an engine that peeks is caught; only one whose layers wait
    for KV loads is run at once. What is read then of a load that did not come is garbage, as on a device, and no error.

    Args:
        layout: ``ragged``, ``padded`` or ``unified``.
        vocab_size: Number of tokens.
        num_words: Limit of the tokens that its texts are made of; 0: the vocabulary.
        eos: End-of-sequence token; -1 for none.
        max_model_len: The "model's" own limit.
        max_prefill_batch_size: For the padded layout.
        contiguous: For the padded layout.
        merges_prefills: For the padded layout.
        strict: Check every KV entry a sequence reads, not only the last, and the bucket of each pass; O(context) a step. An entry
            that a rejected draft left, or another sequence, is none of it.
        fails: Called with each pass before it runs; what it raises fails the step.
        block_size: Default block size.
        embedding_size: Length of the vectors that texts are embedded as; 0: it cannot embed.
        generates: False makes it an encoder: it embeds, and needs no cache.
        fails_to_embed: Called with the texts before they are embedded; what it raises fails the call.
        swaps_blocks: Whether it copies blocks to host memory.
        fails_to_swap: Called before blocks are swapped; what it raises fails the call.
        layerwise_kv: Whether its steps wait for layer-wise KV loads; each array of its cache is a layer.
    """

    def __init__(
        self,
        *,
        layout: str = "ragged",
        vocab_size: int = 97,
        num_words: int = 0,
        eos: int = 0,
        max_model_len: int = 4096,
        max_prefill_batch_size: int = 1,
        contiguous: bool = False,
        merges_prefills: bool = False,
        strict: bool = True,
        fails: Callable[[Batch, Pass], None] | None = None,
        block_size: int = 4,
        embedding_size: int = 8,
        generates: bool = True,
        fails_to_embed: Callable[[Sequence[Int32Array]], None] | None = None,
        swaps_blocks: bool = True,
        fails_to_swap: Callable[[], None] | None = None,
        layerwise_kv: bool = True,
    ) -> None:
        self._capabilities = BackendCapabilities(
            layout=layout,
            default_block_size=block_size,
            max_prefill_batch_size=max_prefill_batch_size,
            contiguous=contiguous,
            merges_prefills=merges_prefills,
            swaps_blocks=swaps_blocks,
            layerwise_kv=layerwise_kv,
            provides=frozenset({"backend.tree_attention"} if layout == "ragged" else ()),
        )
        self._vocab_size = vocab_size
        self._num_words = num_words or vocab_size
        self._eos = eos
        self._max_model_len = max_model_len
        self._strict = strict
        self._fails = fails
        self._embedding_size = embedding_size
        self._generates = generates
        self._fails_to_embed = fails_to_embed
        self._fails_to_swap = fails_to_swap
        self._queue: deque[FakeStep] = deque()
        self._layer_gate: LayerGate | None = None
        self._doubtful: set[int] = set()  # rows that read what did not come
        self.num_batches = 0
        self.prepared: list[Bucket] = []
        self.embedded: list[list[int]] = []
        self.is_closed = False

    @property
    def capabilities(self) -> BackendCapabilities:
        """The capabilities that it was constructed with."""
        return self._capabilities

    def load(self, source: ModelSource, *, sampler: Sampler) -> ModelFacts:
        """Return facts about a model that needs no files."""
        return ModelFacts(
            architecture="Fake",
            dtype="float32",
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            eos_token_ids=() if self._eos < 0 else (self._eos,),
            num_parameters=0,
            weights_bytes=0,
            kv_bytes_per_token=16 if self._generates else 0,
            generates=self._generates,
            embedding_size=self._embedding_size,
        )

    def memory(self, *, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryReport:
        """Return a fixed report."""
        return MemoryReport(total_bytes=1 << 20, free_bytes=1 << 20, activation_bytes=0)

    def allocate(self, plan: AllocationPlan) -> None:
        """Make the arrays."""
        size = plan.num_blocks * plan.block_size
        self._plan, self._block_size = plan, plan.block_size
        self._tokens: Int32Array = np.zeros((plan.num_rows, plan.max_model_len + 64), np.int32)
        self._tables: Int32Array = np.full(
            (plan.num_rows, -(-plan.max_model_len // plan.block_size) + 16), -1, np.int32
        )
        self._states = np.zeros(size, np.uint64)
        self._kv_tokens = np.full(size, -1, np.int64)
        self._kv_positions = np.full(size, -1, np.int64)
        shape = (3, plan.num_host_blocks, plan.block_size)
        self._host: Int64Array = np.full(shape, -1, np.int64)
        self._logprobs: dict[int, int] = {}

    def prepare(self, bucket: Bucket) -> None:
        """Note the bucket."""
        self.prepared.append(bucket)

    def submit(self, batch: Batch) -> PendingStep:
        """Queue the batch; it runs when it is waited for for it or for a later one."""
        self.num_batches += 1
        gate, connector = None, self._plan.connector
        if connector is not None and self._capabilities.layerwise_kv:
            gate = LayerGate.of(connector, budget_s=self._plan.layer_wait_s)
        step = FakeStep(batch, gate, self.run_queued)
        self._queue.append(step)
        if gate is not None:
            self.run_queued(step)
        return step

    def embed(self, token_ids: Sequence[Int32Array]) -> Float32Array:
        """Return :func:`fake_embedding` of each text, after all queued batches."""
        if not self._embedding_size:
            raise BackendError(f"{type(self).__name__} does not embed.")
        self.run_queued()
        self.embedded.append([len(text) for text in token_ids])
        if self._fails_to_embed is not None:
            self._fails_to_embed(token_ids)
        vectors = [fake_embedding(text.tolist(), self._embedding_size) for text in token_ids]
        return np.array(vectors, np.float32)

    def copy_blocks(self, *, sources: Int32Array, targets: Int32Array) -> None:
        """Copy entries after all queued batches."""
        self.run_queued()
        size = self._block_size
        offsets = np.arange(size)
        old = (sources[:, None] * size + offsets).ravel().tolist()
        new = (targets[:, None] * size + offsets).ravel().tolist()
        for array in (self._states, self._kv_tokens, self._kv_positions):
            contents = [array[slot] for slot in old]
            for slot, content in zip(new, contents, strict=True):
                array[slot] = content

    def swap_blocks(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
        """Copy entries to the host's arrays and back, after all queued batches."""
        if not self._capabilities.swaps_blocks:
            raise BackendError(f"{type(self).__name__} does not swap blocks.")
        self.run_queued()
        if self._fails_to_swap is not None:
            self._fails_to_swap()
        device = [array.view(np.int64).reshape(-1, self._block_size) for array in self.kv_cache()]
        for array, host in zip(device, self._host, strict=True):
            host[outs.targets] = array[outs.sources]
        for array, host in zip(device, self._host, strict=True):
            array[ins.targets] = host[ins.sources]

    def forget(self, rows: Int32Array, positions: Int32Array) -> None:
        """Lose tokens, as a stage of a pipeline lacks those that it has not sampled; no text goes on from what is in their place."""
        self._tokens[rows, positions] = -2

    def close(self) -> None:
        """Note that it was closed."""
        self.is_closed = True

    def kv_cache(self) -> FakeKVCache:
        """Return the three arrays of the fake cache, as a pool: states, tokens, positions; by slot."""
        arrays = (self._states, self._kv_tokens, self._kv_positions)
        return FakeKVCache(arrays, block_size=self._block_size)

    # ------------------------------------------------------------------------------------------------- innards

    def run_queued(self, until: FakeStep | None = None) -> None:
        """Run queued batches in order, up to and with ``until``."""
        while self._queue:
            step = self._queue.popleft()
            self._layer_gate = step.gate
            try:
                step.output = self._run(step.batch)
            except Exception as error:
                step.error = error
            if step is until:
                return

    def _run(self, batch: Batch) -> StepOutput:
        for start in batch.row_starts:
            self._tokens[start.row, : len(start.token_ids)] = start.token_ids
            self._tables[start.row] = -1
            self._doubtful.discard(start.row)
            asked = start.params.logprobs
            self._logprobs[start.row] = -1 if asked is None else asked
        writes = batch.table_writes
        self._tables[writes.rows, writes.columns] = writes.block_ids
        for one in batch.passes if len(batch.start_token_ids) else ():
            self._tokens[one.rows, one.starts] = batch.start_token_ids[one.indices]
        emitted: dict[int, list[int]] = {}
        logprobs: list[TokenLogprobs] = []
        prompt_logprobs: list[TokenLogprobs] = []
        num_padded = 0
        for one in batch.passes:
            if self._fails is not None:
                self._fails(batch, one)
            self._check_bucket(one)
            if self._layer_gate is not None:
                for layer in range(3):
                    self._layer_gate.wait(layer)
            num_padded += one.bucket.batch_size * one.bucket.query_len
            if self._capabilities.layout == "ragged":
                num_padded += int(one.query_lens.sum()) - one.bucket.batch_size * one.bucket.query_len
            if not self._strict and batch.drafts is None and int(one.query_lens.max()) == 1:
                emitted.update(self._decode(one))
                continue
            self._run_pass(batch, one, emitted, logprobs, prompt_logprobs)
        counts = np.zeros(batch.num_sequences, np.int32)
        for index, tokens in emitted.items():
            counts[index] = len(tokens)
        flat = [token for index in sorted(emitted) for token in emitted[index]]
        return StepOutput(
            token_ids=np.array(flat, np.int32),
            num_emitted=counts,
            logprobs=tuple(sorted(logprobs, key=lambda entry: (entry.index, entry.position))),
            prompt_logprobs=tuple(prompt_logprobs),
            num_padded_tokens=num_padded,
            missed_layers=self._layer_gate is not None and not self._layer_gate.is_whole,
            step=batch.step,
        )

    def _check_bucket(self, one: Pass) -> None:
        if self._strict and self._capabilities.layout != "ragged":
            tables = self._tables[one.rows].tolist()
            fault = why_too_small(one, tables, self._capabilities, block_size=self._block_size)
            if fault:
                raise StepFailedError(
                    f"{fault}.", hint="A bucketing strategy must return a bucket that covers the pass."
                )

    def _decode(self, one: Pass) -> dict[int, list[int]]:
        """Run one token per sequence as array operations: for benchmarks."""
        size, rows, positions = self._block_size, one.rows, one.starts
        slots = self._tables[rows, positions // size] * size + positions % size
        before = positions - 1
        previous = self._states[self._tables[rows, before // size] * size + before % size]
        tokens = self._tokens[rows, positions].astype(np.uint64)
        states = (previous ^ (tokens + np.uint64(1))) * np.uint64(MULTIPLIER) + positions.astype(np.uint64)
        self._states[slots] = states
        following = ((states >> np.uint64(33)) % np.uint64(self._num_words)).astype(np.int32)
        self._tokens[rows, positions + 1] = following
        wanted = one.num_logits > 0
        return {
            index: [token]
            for index, token in zip(one.indices[wanted].tolist(), following[wanted].tolist(), strict=True)
        }

    def _run_pass(
        self,
        batch: Batch,
        one: Pass,
        emitted: dict[int, list[int]],
        logprobs: list[TokenLogprobs],
        prompt_logprobs: list[TokenLogprobs],
    ) -> None:
        for i, index in enumerate(one.indices.tolist()):
            row, start, length = int(one.rows[i]), int(one.starts[i]), int(one.query_lens[i])
            tree = DraftTree(batch.drafts, index, branching=self._capabilities.layout == "ragged")
            root = start + length - 1 - len(tree)
            self._tokens[row, root + 1 : root + 1 + len(tree)] = tree.tokens
            following = self._forward(row, start, length, tree)
            for j in range(int(one.num_prompt_logits[i])):
                token = int(self._tokens[row, start + j + 1])
                prompt_logprobs.append(fake_logprob(index, start + j + 1, token, 0))
            if not one.num_logits[i]:
                continue
            sampled = following[length - int(one.num_logits[i]) :]
            path = accepted_path(tree, sampled)
            run = [sampled[node + 1] for node in (-1, *path)]
            self._close_up(row, root, path)
            end = start + length - int(one.num_logits[i]) + 1
            self._tokens[row, end : end + len(run)] = run
            emitted[index] = run
            asked = self._logprobs[row]
            if asked >= 0:
                logprobs.extend(fake_logprob(index, end + j, token, asked) for j, token in enumerate(run))

    def _forward(self, row: int, start: int, length: int, tree: DraftTree) -> list[int]:
        """Write KV of ``length`` tokens from ``start``, the last ones drafts, and return the token that follows each."""
        slots = self._slots(row, start + length)
        tokens = self._tokens[row, : start + length]
        if self._strict and start:
            self._check_context(row, slots[:start], tokens[:start])
        root = start + length - 1 - len(tree)
        before = int(self._states[slots[start - 1]]) if start else START
        # Of each new token: the entry before it, as an index into the new ones, and its position.
        links = [(index - 1, start + index) for index in range(root - start + 1)]
        links += [
            (root - start + 1 + parent, root + depth) for parent, depth in zip(tree.parents, tree.depths, strict=True)
        ]
        states: list[int] = []
        for index, (link, position) in enumerate(links):
            states.append(chain(states[link] if link >= 0 else before, int(tokens[start + index]), position))
        self._states[slots[start:]] = np.array(states, np.uint64)
        self._kv_tokens[slots[start:]] = tokens[start:]
        self._kv_positions[slots[start:]] = [position for _, position in links]
        return [fake_next_token(state, self._num_words) for state in states]

    def _slots(self, row: int, num_tokens: int) -> Int64Array:
        positions = np.arange(num_tokens)
        blocks = self._tables[row, positions // self._block_size]
        if (blocks < 0).any():
            raise StepFailedError(f"row {row}: position {int(positions[blocks < 0][0])} has no block")
        slots: Int64Array = blocks * np.int64(self._block_size) + positions % self._block_size
        return slots

    def _check_context(self, row: int, slots: Int64Array, tokens: Int32Array) -> None:
        """Raise unless every entry is that of its token at its place after the entry before it."""
        states, positions = self._states[slots], np.arange(len(slots))
        before = np.append(np.uint64(START), states[:-1])
        chained = (before ^ (tokens.astype(np.uint64) + np.uint64(1))) * np.uint64(MULTIPLIER)
        good = (self._kv_tokens[slots] == tokens) & (self._kv_positions[slots] == positions)
        good &= states == chained + positions.astype(np.uint64)
        if not good.all() and self._layer_gate is not None and not self._layer_gate.is_whole:
            self._doubtful.add(row)
        if not good.all() and row not in self._doubtful:
            raise StepFailedError(f"row {row}: the KV entry of position {int(np.argmin(good))} is not its own")

    def _close_up(self, row: int, root: int, path: list[int]) -> None:
        """Move the entries of accepted drafts after each other."""
        slots = self._slots(row, root + 2 + max(path, default=-1))[root + 1 :]
        for array in (self._states, self._kv_tokens, self._kv_positions):
            array[slots[: len(path)]] = array[slots[path]]
