"""Conformance suite of the noun ``backend``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest

from trencadis.errors import BackendError
from trencadis.interfaces import Backend, Sampled, Sampler, SamplingContext, SupportsEmbedding
from trencadis.records import (
    Batch,
    Bucket,
    ModelSource,
    Phase,
    RowStart,
    SamplingParams,
    Shape,
    TableWrites,
    TokenLogprobs,
    UnifiedBucket,
    UnifiedShape,
)
from trencadis_testing.backend_layers import LayerTests
from trencadis_testing.backend_pool import PoolTests
from trencadis_testing.backend_swaps import SwapTests
from trencadis_testing.driver import Work

if TYPE_CHECKING:
    import torch

__all__ = ["ArgmaxSampler", "BackendConformance"]


class ArgmaxSampler(Sampler):
    """Always the most likely token, on whatever device the logits are."""

    honours = frozenset({"greedy"})

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Keep nothing."""

    def start_row(self, start: RowStart) -> None:
        """Keep nothing."""

    def sample(self, logits: torch.Tensor, context: SamplingContext) -> Sampled:
        """Return the index of the largest logit of each row."""
        return Sampled(token_ids=logits.argmax(-1))


class BackendConformance(SwapTests, PoolTests, LayerTests):
    """What every backend must do; inherit from it, set ``make`` and ``source``.

    Greedy tokens are the oracle: they depend on every token, position and KV entry of a sequence. Example::

        class TestMine(BackendConformance):
            source = ModelSource(path="tests/tiny")

            def make(self):
                return MyBackend(MyConfig())

    Attributes:
        source: A small model without near ties between tokens, of at least 96 tokens and 32 token ids.
        block_size: Tokens per block.
        num_tokens: Tokens to generate in each test.
        embedding_tolerance: Largest difference between two vectors of one text, per element.
    """

    source: ModelSource = ModelSource(path="")
    block_size: int = 4
    num_tokens: int = 8
    embedding_tolerance: float = 1e-5

    def make(self) -> Backend:
        """Return a new backend, not loaded."""
        raise NotImplementedError(f"{type(self).__name__} needs a method make(self) that returns a backend")

    def reference(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return the greedy tokens that follow a prompt.

        Override it with an independent implementation of the model. By default the backend itself, with nothing else to do.
        """
        driver = self._driver(self._loaded()[0])
        return driver.generate({0: prompt}, num_tokens)[0]

    def padding(self, shape: Shape) -> Bucket:
        """Return the bucket of a padded or unified pass; by default one that is larger in every dimension."""
        if isinstance(shape, UnifiedShape):
            return UnifiedBucket(
                shape.query_len + 5, shape.num_blocks + 2, shape.num_unique_blocks + 3, is_causal=shape.is_causal
            )
        extra = 0 if shape.phase is Phase.PREFILL and shape.num_blocks == 0 else 3
        query_len = shape.query_len if shape.phase is Phase.DECODE else shape.query_len + 5
        batch_size = shape.batch_size + (not self._merged or shape.phase is Phase.DECODE)
        return Bucket(batch_size, query_len, shape.num_blocks + extra, shape.phase)

    # --------------------------------------------------------------------------------------------------- tests

    def test_tokens_are_those_of_the_reference(self) -> None:
        """One sequence at a time, prompts shorter and longer than a block."""
        backend, prompts = self._loaded()
        for prompt in prompts:
            driver = self._driver(backend)
            assert driver.generate({0: prompt}, self.num_tokens)[0] == self.reference(prompt, self.num_tokens)

    @pytest.mark.parametrize("chunk", [1, 3, 7])
    def test_chunked_prefill_gives_the_same_tokens(self, chunk: int) -> None:
        """Computing a prompt in pieces changes nothing."""
        backend, prompts = self._loaded()
        driver = self._driver(backend)
        self._expect(driver.generate(dict(enumerate(prompts)), self.num_tokens, chunk=chunk), prompts)

    def test_tokens_do_not_depend_on_what_shares_the_batch(self) -> None:
        """Sequences that start and end at different times, prefills beside decodes."""
        backend, prompts = self._loaded()
        driver = self._driver(backend)
        driver.start(0, prompts[0])
        driver.step([Work(0)])
        driver.start(1, prompts[1])
        driver.step([Work(0), Work(1, 3)])
        driver.start(2, prompts[2])
        driver.step([Work(2, 10), Work(0), Work(1)])
        while min(len(driver.output(row)) for row in range(3)) < self.num_tokens:
            driver.step([Work(row) for row in range(3) if len(driver.output(row)) < self.num_tokens])
        self._expect({row: driver.output(row) for row in range(3)}, prompts)

    def test_rows_may_come_in_any_order(self) -> None:
        """Rows are names, not an order; tokens come back in the order of the plan."""
        backend, prompts = self._loaded()
        driver = self._driver(backend)
        rows = (3, 0, 2)
        for row, prompt in zip(rows, prompts, strict=True):
            driver.start(row, prompt)
        for step in range(self.num_tokens):
            driver.step([Work(row) for row in (rows if step % 2 else rows[::-1])])
        self._expect({i: driver.output(row) for i, row in enumerate(rows)}, prompts)

    def test_row_forgets_the_sequence_before(self) -> None:
        """A row that starts again knows nothing of what it held."""
        backend, prompts = self._loaded()
        driver = self._driver(backend)
        driver.generate({0: prompts[2], 1: prompts[1]}, self.num_tokens)
        again = {0: prompts[0], 1: prompts[2]}
        found = driver.generate(again, self.num_tokens)
        self._expect({0: found[0], 2: found[1]}, prompts)

    @pytest.mark.parametrize("seed", [1, 2])
    def test_physical_blocks_do_not_matter(self, seed: int) -> None:
        """Only the block table says where a block is."""
        backend, prompts = self._loaded()
        driver = self._driver(backend, seed=seed)
        self._expect(driver.generate(dict(enumerate(prompts)), self.num_tokens), prompts)

    def test_resumed_sequence_goes_on_where_it_was(self) -> None:
        """A preempted sequence starts again with its output after its prompt."""
        backend, prompts = self._loaded()
        driver = self._driver(backend)
        for row, prompt in enumerate(prompts):
            expected = self.reference(prompt, self.num_tokens)
            driver.start(row, prompt + expected[:4], num_prompt_tokens=len(prompt))
        while min(len(driver.output(row)) for row in range(3)) < self.num_tokens:
            driver.step([Work(row) for row in range(3)])
        self._expect({row: driver.output(row)[: self.num_tokens] for row in range(3)}, prompts)

    def test_copied_blocks_read_as_the_originals(self) -> None:
        """Sequences go on from copies while others overwrite the originals; of two table writes the later counts."""
        backend, prompts = self._loaded()
        driver = self._driver(backend)
        driver.start(1, prompts[1])
        driver.start(2, prompts[2])
        driver.step([Work(1), Work(2, 9)])
        driver.move(1)
        driver.move(1)
        driver.move(2)
        driver.start(0, prompts[0])
        while min(len(driver.output(row)) for row in range(3)) < self.num_tokens:
            driver.step([Work(row) for row in range(3)])
        self._expect({row: driver.output(row)[: self.num_tokens] for row in range(3)}, prompts)

    def test_blocks_can_change_places(self) -> None:
        """Every source is read before any target is written."""
        backend, prompts = self._loaded()
        driver = self._driver(backend)
        for row, prompt in enumerate(prompts):
            driver.start(row, prompt)
        driver.step([Work(row) for row in range(3)])
        driver.swap(0, 1)
        driver.swap(1, 2)
        while min(len(driver.output(row)) for row in range(3)) < self.num_tokens:
            driver.step([Work(row) for row in range(3)])
        self._expect({row: driver.output(row)[: self.num_tokens] for row in range(3)}, prompts)

    def test_step_may_be_submitted_before_the_last_one_is_known(self) -> None:
        """Sampled tokens are the device's own input for the row's next step."""
        backend, prompts = self._loaded()
        driver = self._driver(backend)
        for row, prompt in enumerate(prompts):
            driver.start(row, prompt)
        works = [Work(row) for row in range(3)]
        driver.submit(works)
        for _ in range(self.num_tokens - 1):
            driver.submit(works)
            driver.wait()
        driver.wait()
        self._expect({row: driver.output(row) for row in range(3)}, prompts)

    def test_right_drafts_are_accepted(self) -> None:
        """All drafts stand and one token more is emitted; a sequence without drafts emits one."""
        backend, prompts = self._loaded()
        driver = self._driver(backend)
        expected = [self.reference(prompt, self.num_tokens) for prompt in prompts]
        for row, prompt in enumerate(prompts):
            driver.start(row, prompt)
        driver.step([Work(row) for row in range(3)])
        works = [Work(0, 0, tuple(expected[0][1:4])), Work(1), Work(2, 0, tuple(expected[2][1:2]))]
        assert driver.step(works).num_emitted.tolist() == [4, 1, 2]
        self._finish(driver, prompts)

    def test_wrong_drafts_are_not(self) -> None:
        """Tokens up to the first wrong draft stand, with the model's own in its place; the text is the same."""
        backend, prompts = self._loaded()
        vocab_size = self._facts.vocab_size
        driver = self._driver(backend)
        expected = [self.reference(prompt, self.num_tokens) for prompt in prompts]
        for row, prompt in enumerate(prompts):
            driver.start(row, prompt)
        driver.step([Work(row) for row in range(3)])
        wrong = [(tokens[3] + 1) % vocab_size for tokens in expected]
        works = [
            Work(0, 0, ((expected[0][1] + 1) % vocab_size, expected[0][2])),
            Work(1, 0, (*expected[1][1:3], wrong[1], expected[1][4])),
            Work(2, 0, (expected[2][1], (expected[2][2] + 1) % vocab_size)),
        ]
        assert driver.step(works).num_emitted.tolist() == [1, 3, 2]
        self._finish(driver, prompts)

    def test_right_path_of_a_tree_is_accepted_and_nothing_else(self) -> None:
        """If the backend provides trees: right drafts after wrong ones, and beside linear drafts and none."""
        backend, prompts = self._loaded()
        if "backend.tree_attention" not in backend.capabilities.provides:
            return
        driver = self._driver(backend)
        expected = [self.reference(prompt, self.num_tokens) for prompt in prompts]
        wrong = [[(token + 1) % self._facts.vocab_size for token in tokens] for tokens in expected]
        for row, prompt in enumerate(prompts):
            driver.start(row, prompt)
        driver.step([Work(row) for row in range(3)])
        first, last = expected[0], expected[2]
        works = [
            Work(0, 0, (wrong[0][1], first[1], first[2], wrong[0][2], first[2]), (-1, -1, 0, 1, 1)),
            Work(1),
            Work(2, 0, (wrong[2][1], last[1], wrong[2][2], last[2], wrong[2][3], last[3]), (-1, -1, 1, 1, 3, 3)),
        ]
        assert driver.step(works).num_emitted.tolist() == [3, 1, 4]
        works = [Work(0), Work(1, 0, (expected[1][2], wrong[1][3])), Work(2, 0, (1, 1), (-1, -1))]
        assert driver.step(works).num_emitted.tolist()[:2] == [1, 2]
        self._finish(driver, prompts)

    def test_chunk_that_is_not_the_last_emits_nothing(self) -> None:
        """The sequence has a count of 0 in the order of the plan."""
        backend, prompts = self._loaded()
        driver = self._driver(backend)
        for row, prompt in enumerate(prompts):
            driver.start(row, prompt)
        output = driver.step([Work(2, 6), Work(0), Work(1, 2)])
        assert output.num_emitted.tolist() == [0, 1, 0]
        assert output.token_ids.tolist() == self.reference(prompts[0], 1)
        assert output.num_padded_tokens >= 6 + len(prompts[0]) + 2

    def test_prompt_logprobs_cover_every_prompt_token_but_the_first(self) -> None:
        """Once each, whatever the chunks; a sequence that did not ask gets none."""
        backend, prompts = self._loaded()
        driver = self._driver(backend)
        driver.start(0, prompts[0])
        driver.start(1, prompts[2], params=SamplingParams(temperature=0.0, prompt_logprobs=0))
        found: list[TokenLogprobs] = []
        for work in ([Work(0), Work(1, 7)], [Work(0), Work(1, 5)], [Work(1)], [Work(0), Work(1)]):
            found.extend(driver.step(work).prompt_logprobs)
        assert [(entry.position, entry.token_id) for entry in found] == list(enumerate(prompts[2]))[1:]
        assert all(entry.logprob <= 0 and entry.rank >= 1 for entry in found)

    def test_step_without_passes_is_empty(self) -> None:
        """A step may carry nothing but a connector's message."""
        backend, _ = self._loaded()
        self._driver(backend)
        none = np.empty(0, np.int32)
        writes = TableWrites(rows=none, columns=none, block_ids=none)
        batch = Batch(step=0, num_sequences=0, row_starts=(), table_writes=writes, passes=())
        output = backend.submit(batch).wait()
        assert output.token_ids.tolist() == []
        assert output.num_emitted.tolist() == []

    def test_prepare_leaves_no_trace(self) -> None:
        """Buckets may be prepared between steps."""
        backend, prompts = self._loaded()
        driver = self._driver(backend)
        for row, prompt in enumerate(prompts):
            driver.start(row, prompt)
        driver.step([Work(row) for row in range(3)])
        for bucket in _buckets(backend):
            backend.prepare(bucket)
        self._finish(driver, prompts)

    def test_warm_up_says_what_it_prepared_and_leaves_no_trace(self) -> None:
        """Sequences that come afterwards give the same tokens; progress reaches all that was prepared."""
        backend, prompts = self._loaded()
        driver = self._driver(backend)
        buckets = _buckets(backend)
        seen: list[tuple[int, int]] = []
        report = backend.warm_up(buckets, progress=lambda done, total: seen.append((done, total)))
        assert set(report.prepared) <= set(buckets)
        assert seen == [(done, len(seen)) for done in range(1, len(seen) + 1)]
        assert len(seen) >= len(report.prepared)
        self._expect(driver.generate(dict(enumerate(prompts)), self.num_tokens), prompts)

    def test_text_has_one_vector_whatever_else_is_in_the_call(self) -> None:
        """Alone, beside others, in another order; a backend that cannot embed says so."""
        backend, prompts = self._loaded()
        texts = [np.array(prompt, np.int32) for prompt in (*prompts, prompts[1][:1])]
        if not self._facts.embedding_size:
            if not isinstance(backend, SupportsEmbedding):
                return
            try:
                backend.embed(texts)
            except BackendError:
                return
            raise AssertionError("embedding_size is 0, but embed() returned")
        together, backwards = backend.embed(texts), backend.embed(texts[::-1])
        assert together.dtype == np.float32
        assert together.shape == (len(texts), self._facts.embedding_size)
        for index, text in enumerate(texts):
            alone = backend.embed([text])[0]
            np.testing.assert_allclose(together[index], alone, atol=self.embedding_tolerance)
            np.testing.assert_allclose(backwards[-1 - index], alone, atol=self.embedding_tolerance)
        assert np.abs(together[0] - together[1]).max() > self.embedding_tolerance

    def test_embedding_leaves_no_trace_in_running_sequences(self) -> None:
        """Texts may be embedded between batches, also while a batch is in flight."""
        backend, prompts = self._loaded()
        if not self._facts.embedding_size:
            return
        driver = self._driver(backend)
        for row, prompt in enumerate(prompts):
            driver.start(row, prompt)
        works = [Work(row) for row in range(3)]
        texts = [np.array(prompt, np.int32) for prompt in prompts]
        driver.step([Work(0), Work(1, 3), Work(2, 10)])
        driver.submit(works)
        found = backend.embed(texts)
        driver.wait()
        self._finish(driver, prompts)
        np.testing.assert_allclose(backend.embed(texts), found, atol=self.embedding_tolerance)

    def test_memory_report_adds_up(self) -> None:
        """What is free is at most the total, and the cost of a step is no negative number."""
        backend, _ = self._loaded()
        report = backend.memory(max_num_batched_tokens=32, max_num_seqs=4)
        assert 0 < report.free_bytes <= report.total_bytes
        assert report.activation_bytes >= 0

    def test_facts_are_plausible(self) -> None:
        """The engine sizes its cache and checks requests with them."""
        self._loaded()
        facts = self._facts
        assert facts.vocab_size >= 32
        assert facts.max_model_len >= 96
        assert facts.kv_bytes_per_token > 0
        assert all(0 <= token < facts.vocab_size for token in facts.eos_token_ids)

    def test_close_may_be_called_twice(self) -> None:
        """Also right after loading."""
        backend, _ = self._loaded()
        self._driver(backend)
        backend.close()
        backend.close()

    def _sampler(self) -> Sampler:
        return ArgmaxSampler()


def _buckets(backend: Backend) -> tuple[Bucket, ...]:
    """Return a few buckets of the backend's layout."""
    if backend.capabilities.layout == "unified":
        return UnifiedBucket(16, 4, 24, is_causal=True), UnifiedBucket(4, 0, 24, is_causal=False)
    rows = 1 if backend.capabilities.merges_prefills else 2
    return Bucket(1, 16, 4), Bucket(rows, 16, 0), Bucket(4, 1, 24, Phase.DECODE)
