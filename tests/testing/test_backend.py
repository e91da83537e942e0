"""The backend suite passes a correct fake in both layouts and fails every broken one, each for the right reason."""

from __future__ import annotations

import threading

import attrs
import msgspec
import numpy as np
import pytest

from trencadis.records import Bucket, Drafts, MemoryReport, TableWrites
from trencadis_testing.backend import BackendConformance
from trencadis_testing.fake_pool import FakeKVCache
from trencadis_testing.fakes import FakeBackend, fake_text


class TestRaggedFake(BackendConformance):
    make = FakeBackend

    def reference(self, prompt, num_tokens):
        return fake_text(prompt, num_tokens, eos=-1)


class TestPaddedFake(TestRaggedFake):
    def make(self):
        return FakeBackend(layout="padded", max_prefill_batch_size=2)


class TestMergedFake(TestRaggedFake):
    def make(self):
        return FakeBackend(layout="padded", max_prefill_batch_size=2, merges_prefills=True)


class TestUnifiedFake(TestRaggedFake):
    def make(self):
        return FakeBackend(layout="unified")


class TestFakeAgainstItself(BackendConformance):
    make = FakeBackend


class TestFakeThatCannotEmbed(BackendConformance):
    def make(self):
        return FakeBackend(embedding_size=0)


class TestFakeWhoseStepsDoNotWait(BackendConformance):
    def make(self):
        return FakeBackend(layerwise_kv=False)


class TestFakeThatDoesNotSwap(BackendConformance):
    def make(self):
        return FakeBackend(swaps_blocks=False)


class ForgetsTableWrites(FakeBackend):
    """Every sequence lives in the same blocks."""

    def submit(self, batch):
        writes = attrs.evolve(batch.table_writes, block_ids=batch.table_writes.columns)
        return super().submit(attrs.evolve(batch, table_writes=writes))


class TakesTheFirstOfTwoTableWrites(FakeBackend):
    def submit(self, batch):
        writes = batch.table_writes
        backwards = TableWrites(
            rows=writes.rows[::-1].copy(), columns=writes.columns[::-1].copy(), block_ids=writes.block_ids[::-1].copy()
        )
        return super().submit(attrs.evolve(batch, table_writes=backwards))


class SortsRows(FakeBackend):
    """Rows in ascending order, results in the order of the plan."""

    def submit(self, batch):
        passes = [attrs.evolve(one, rows=np.sort(one.rows)) for one in batch.passes]
        return super().submit(attrs.evolve(batch, passes=tuple(passes)))


class KeepsOldRows(FakeBackend):
    """A row that was used before keeps its first token."""

    def submit(self, batch):
        starts = []
        for start in batch.row_starts:
            tokens = start.token_ids.copy()
            if self._tokens[start.row, 0]:
                tokens[0] = self._tokens[start.row, 0]
            starts.append(attrs.evolve(start, token_ids=tokens))
        return super().submit(attrs.evolve(batch, row_starts=tuple(starts)))


class EmitsAtEveryChunk(FakeBackend):
    def submit(self, batch):
        passes = [attrs.evolve(one, num_logits=np.maximum(one.num_logits, 1)) for one in batch.passes]
        return super().submit(attrs.evolve(batch, passes=tuple(passes)))


class IgnoresDrafts(FakeBackend):
    """Right text, no speed-up."""

    def submit(self, batch):
        if batch.drafts is None:
            return super().submit(batch)
        none = Drafts(num_drafts=0 * batch.drafts.num_drafts, token_ids=np.empty(0, np.int32))
        lengths = [one.query_lens - np.maximum(one.num_logits - 1, 0) for one in batch.passes]
        passes = [
            attrs.evolve(one, query_lens=length, num_logits=np.minimum(one.num_logits, 1))
            for one, length in zip(batch.passes, lengths, strict=True)
        ]
        return super().submit(attrs.evolve(batch, drafts=none, passes=tuple(passes)))


class AcceptsEveryDraft(FakeBackend):
    def _run_pass(self, batch, one, emitted, *rest):
        super()._run_pass(batch, one, emitted, *rest)
        for i, index in enumerate(one.indices.tolist()):
            if one.num_logits[i] > 1:
                end = int(batch.drafts.num_drafts[: index + 1].sum())
                drafts = batch.drafts.token_ids[end - int(batch.drafts.num_drafts[index]) : end].tolist()
                emitted[index] = [*drafts, emitted[index][-1]]


class ForgetsSampledTokens(FakeBackend):
    """The engine's next batch would have to bring them."""

    def _run(self, batch):
        output = super()._run(batch)
        for one in batch.passes:
            self._tokens[one.rows, one.starts + one.query_lens] = 0
        return output


class CopiesNothing(FakeBackend):
    def copy_blocks(self, *, sources, targets):
        pass


class CopiesOneAfterTheOther(FakeBackend):
    """What is written first is read as the source of a later pair."""

    def copy_blocks(self, *, sources, targets):
        for pair in zip(sources[:, None], targets[:, None], strict=True):
            super().copy_blocks(sources=pair[0], targets=pair[1])


class SwapsNothingIn(FakeBackend):
    def swap_blocks(self, *, outs, ins):
        super().swap_blocks(outs=outs, ins=attrs.evolve(ins, sources=ins.sources[:0], targets=ins.targets[:0]))


class SwapsBeforeTheBatchInFlight(FakeBackend):
    """Reads the cache as it is when it is called."""

    def swap_blocks(self, *, outs, ins):
        queue, self._queue = self._queue, type(self._queue)()
        super().swap_blocks(outs=outs, ins=ins)
        self._queue = queue


class SwapsInFirst(FakeBackend):
    def swap_blocks(self, *, outs, ins):
        none = attrs.evolve(outs, sources=outs.sources[:0], targets=outs.targets[:0])
        super().swap_blocks(outs=none, ins=ins)
        super().swap_blocks(outs=outs, ins=none)


class SwapsTheFirstBlockOnly(FakeBackend):
    def swap_blocks(self, *, outs, ins):
        super().swap_blocks(outs=attrs.evolve(outs, sources=outs.sources[:1], targets=outs.targets[:1]), ins=ins)


class CannotSwapNothing(FakeBackend):
    def swap_blocks(self, *, outs, ins):
        outs.sources.max(initial=ins.sources[0] if len(ins) else outs.sources[0])
        super().swap_blocks(outs=outs, ins=ins)


class SwapsAlthoughItSaysNo(FakeBackend):
    def __init__(self):
        super().__init__(swaps_blocks=False)

    def swap_blocks(self, *, outs, ins):
        pass


class ShowsACopyOfItsCache(FakeBackend):
    """What is written to it is nowhere."""

    def kv_cache(self):
        copies = tuple(array.copy() for array in super().kv_cache())
        return FakeKVCache(copies, block_size=self._block_size)


class ShowsHalfItsCache(FakeBackend):
    def kv_cache(self):
        return FakeKVCache(tuple(super().kv_cache())[:2], block_size=self._block_size)


class _BelongsToOneThread(FakeKVCache):
    """And does not say so."""

    def __init__(self, arrays, *, block_size):
        super().__init__(arrays, block_size=block_size)
        self._thread = threading.get_ident()

    def write_blocks(self, blocks, data):
        if threading.get_ident() == self._thread:
            super().write_blocks(blocks, data)


class ShowsACacheOfOneThread(FakeBackend):
    def kv_cache(self):
        return _BelongsToOneThread(tuple(super().kv_cache()), block_size=self._block_size)


class _Overreaching(FakeKVCache):
    def read_blocks(self, blocks, out):
        super().read_blocks(blocks, out)
        out.base[:, -8:] = 7


class ReadsTooMuch(FakeBackend):
    def kv_cache(self):
        return _Overreaching(tuple(super().kv_cache()), block_size=self._block_size)


class PreparesInTheCache(FakeBackend):
    def prepare(self, bucket):
        self.run_queued()
        self._states[:] = 0


class PreparesMoreThanItWasAsked(FakeBackend):
    def warm_up(self, buckets, *, progress=None):
        report = super().warm_up(buckets, progress=progress)
        return attrs.evolve(report, prepared=(*report.prepared, Bucket(9, 9, 9)))


class CountsItsWarmUpBackwards(FakeBackend):
    def warm_up(self, buckets, *, progress=None):
        return super().warm_up(buckets, progress=lambda done, total: progress(total - done, total))


class ScoresTheWrongPosition(FakeBackend):
    def _run(self, batch):
        output = super()._run(batch)
        shifted = [msgspec.structs.replace(entry, position=entry.position - 1) for entry in output.prompt_logprobs]
        return attrs.evolve(output, prompt_logprobs=tuple(shifted))


class NeedsPasses(FakeBackend):
    def submit(self, batch):
        batch.passes[0]
        return super().submit(batch)


class ClosesOnce(FakeBackend):
    def close(self):
        if self.is_closed:
            raise RuntimeError("closed")
        super().close()


class ReportsMoreThanThereIs(FakeBackend):
    def memory(self, **sizes):
        return MemoryReport(total_bytes=1, free_bytes=2, activation_bytes=0)


class EmbedsBesideTheOthers(FakeBackend):
    """The other texts of the call shine through."""

    def embed(self, token_ids):
        vectors = super().embed(token_ids)
        return vectors + vectors.mean(axis=0, keepdims=True) / 100


class EmbedsSorted(FakeBackend):
    def embed(self, token_ids):
        return super().embed(sorted(token_ids, key=len))


class EmbedsEverythingAlike(FakeBackend):
    def embed(self, token_ids):
        return np.ones((len(token_ids), 8), np.float32)


class EmbedsInDoubles(FakeBackend):
    def embed(self, token_ids):
        return super().embed(token_ids).astype(np.float64)


class EmbedsAlthoughItCannot(FakeBackend):
    def __init__(self):
        super().__init__(embedding_size=0)

    def embed(self, token_ids):
        return np.zeros((len(token_ids), 8), np.float32)


class EmbedsInTheCache(FakeBackend):
    def embed(self, token_ids):
        vectors = super().embed(token_ids)
        if hasattr(self, "_states"):
            self._states[:] = 0
        return vectors


class WaitsForNoLayer(FakeBackend):
    def allocate(self, plan):
        super().allocate(attrs.evolve(plan, connector=None))


class WaitsInEveryStep(FakeBackend):
    def submit(self, batch):
        if self._plan.connector is not None:
            self._plan.connector.wait_layer(0, budget_s=0.0)
        return super().submit(batch)


class WaitsWhenItHasWritten(FakeBackend):
    def _run(self, batch):
        gate, self._layer_gate = self._layer_gate, None
        output = super()._run(batch)
        for layer in range(3) if gate is not None else ():
            gate.wait(layer)
        return output


class HidesMissedLayers(FakeBackend):
    def _run(self, batch):
        return attrs.evolve(super()._run(batch), missed_layers=False)


class MixesLayersUp(FakeBackend):
    def kv_cache(self):
        pool = super().kv_cache()
        write = pool.write_layer
        pool.write_layer = lambda layer, blocks, data: write((layer + 1) % 3, blocks, data)
        return pool


class HasNoLength(FakeBackend):
    def __init__(self):
        super().__init__(max_model_len=0)


@pytest.mark.parametrize(
    ("mutant", "noticed_by"),
    [
        (ForgetsTableWrites, "test_tokens_do_not_depend_on_what_shares_the_batch"),
        (TakesTheFirstOfTwoTableWrites, "test_copied_blocks_read_as_the_originals"),
        (SortsRows, "test_rows_may_come_in_any_order"),
        (KeepsOldRows, "test_row_forgets_the_sequence_before"),
        (EmitsAtEveryChunk, "test_chunk_that_is_not_the_last_emits_nothing"),
        (IgnoresDrafts, "test_right_drafts_are_accepted"),
        (AcceptsEveryDraft, "test_wrong_drafts_are_not"),
        (ForgetsSampledTokens, "test_step_may_be_submitted_before_the_last_one_is_known"),
        (CopiesNothing, "test_copied_blocks_read_as_the_originals"),
        (CopiesOneAfterTheOther, "test_blocks_can_change_places"),
        (SwapsNothingIn, "test_swapped_blocks_come_back_as_they_were"),
        (SwapsTheFirstBlockOnly, "test_swapped_blocks_come_back_as_they_were"),
        (SwapsBeforeTheBatchInFlight, "test_swap_is_in_order_with_batches"),
        (SwapsInFirst, "test_blocks_go_out_before_others_come_in"),
        (CannotSwapNothing, "test_nothing_to_swap_changes_nothing"),
        (SwapsAlthoughItSaysNo, "test_nothing_to_swap_changes_nothing"),
        (ShowsACopyOfItsCache, "test_bytes_of_blocks_brought_to_others_give_the_same_tokens"),
        (ShowsHalfItsCache, "test_bytes_of_blocks_brought_to_others_give_the_same_tokens"),
        (ShowsACacheOfOneThread, "test_pool_of_any_thread_is_one"),
        (ReadsTooMuch, "test_layout_says_how_many_bytes_a_block_has"),
        (PreparesInTheCache, "test_prepare_leaves_no_trace"),
        (PreparesMoreThanItWasAsked, "test_warm_up_says_what_it_prepared_and_leaves_no_trace"),
        (CountsItsWarmUpBackwards, "test_warm_up_says_what_it_prepared_and_leaves_no_trace"),
        (ScoresTheWrongPosition, "test_prompt_logprobs_cover_every_prompt_token_but_the_first"),
        (NeedsPasses, "test_step_without_passes_is_empty"),
        (ClosesOnce, "test_close_may_be_called_twice"),
        (EmbedsBesideTheOthers, "test_text_has_one_vector_whatever_else_is_in_the_call"),
        (EmbedsSorted, "test_text_has_one_vector_whatever_else_is_in_the_call"),
        (EmbedsEverythingAlike, "test_text_has_one_vector_whatever_else_is_in_the_call"),
        (EmbedsInDoubles, "test_text_has_one_vector_whatever_else_is_in_the_call"),
        (EmbedsAlthoughItCannot, "test_text_has_one_vector_whatever_else_is_in_the_call"),
        (EmbedsInTheCache, "test_embedding_leaves_no_trace_in_running_sequences"),
        (ReportsMoreThanThereIs, "test_memory_report_adds_up"),
        (WaitsForNoLayer, "test_layer_is_not_read_before_it_was_waited_for"),
        (WaitsInEveryStep, "test_layer_is_not_read_before_it_was_waited_for"),
        (WaitsWhenItHasWritten, "test_layer_is_not_written_before_it_was_waited_for"),
        (HidesMissedLayers, "test_step_that_missed_a_layer_says_so"),
        (MixesLayersUp, "test_layers_of_a_block_are_its_bytes"),
        (HasNoLength, "test_facts_are_plausible"),
    ],
)
def test_suite_notices_a_broken_backend(failures_of, mutant, noticed_by):
    assert failures_of(TestRaggedFake, lambda: mutant(), only=noticed_by)
