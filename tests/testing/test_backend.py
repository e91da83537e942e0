"""The backend suite passes a correct fake in both layouts and fails every broken one, each for the right reason."""

from __future__ import annotations

import threading

import attrs
import msgspec
import numpy as np

from support.mutants import broken, proofs
from trencadis.records import Bucket, Drafts, MemoryReport
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


class CopiesOneAfterTheOther(FakeBackend):
    """What is written first is read as the source of a later pair."""

    def copy_blocks(self, *, sources, targets):
        for pair in zip(sources[:, None], targets[:, None], strict=True):
            super().copy_blocks(sources=pair[0], targets=pair[1])


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


class CannotSwapNothing(FakeBackend):
    def swap_blocks(self, *, outs, ins):
        outs.sources.max(initial=ins.sources[0] if len(ins) else outs.sources[0])
        super().swap_blocks(outs=outs, ins=ins)


class ShowsACopyOfItsCache(FakeBackend):
    """What is written to it is nowhere."""

    def kv_cache(self):
        copies = tuple(array.copy() for array in super().kv_cache())
        return FakeKVCache(copies, block_size=self._block_size)


class _BelongsToOneThread(FakeKVCache):
    """And does not say so."""

    def __init__(self, arrays, *, block_size):
        super().__init__(arrays, block_size=block_size)
        self._thread = threading.get_ident()

    def write_blocks(self, blocks, data):
        if threading.get_ident() == self._thread:
            super().write_blocks(blocks, data)


class _Overreaching(FakeKVCache):
    def read_blocks(self, blocks, out):
        super().read_blocks(blocks, out)
        out.base[:, -8:] = 7


class PreparesInTheCache(FakeBackend):
    def prepare(self, bucket):
        self.run_queued()
        self._states[:] = 0


class PreparesMoreThanItWasAsked(FakeBackend):
    def warm_up(self, buckets, *, progress=None):
        report = super().warm_up(buckets, progress=progress)
        return attrs.evolve(report, prepared=(*report.prepared, Bucket(9, 9, 9)))


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


class EmbedsBesideTheOthers(FakeBackend):
    """The other texts of the call shine through."""

    def embed(self, token_ids):
        vectors = super().embed(token_ids)
        return vectors + vectors.mean(axis=0, keepdims=True) / 100


class EmbedsInTheCache(FakeBackend):
    def embed(self, token_ids):
        vectors = super().embed(token_ids)
        if hasattr(self, "_states"):
            self._states[:] = 0
        return vectors


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


class MixesLayersUp(FakeBackend):
    def kv_cache(self):
        pool = super().kv_cache()
        write = pool.write_layer
        pool.write_layer = lambda layer, blocks, data: write((layer + 1) % 3, blocks, data)
        return pool


MUTANTS = {
    "test_tokens_do_not_depend_on_what_shares_the_batch": [ForgetsTableWrites],
    "test_rows_may_come_in_any_order": [SortsRows],
    "test_row_forgets_the_sequence_before": [KeepsOldRows],
    "test_chunk_that_is_not_the_last_emits_nothing": [EmitsAtEveryChunk],
    "test_right_drafts_are_accepted": [IgnoresDrafts],
    "test_wrong_drafts_are_not": [AcceptsEveryDraft],
    "test_step_may_be_submitted_before_the_last_one_is_known": [ForgetsSampledTokens],
    "test_copied_blocks_read_as_the_originals": [
        broken("CopiesNothing", FakeBackend, copy_blocks=lambda self, *, sources, targets: None)
    ],
    "test_blocks_can_change_places": [CopiesOneAfterTheOther],
    "test_swapped_blocks_come_back_as_they_were": [
        broken(
            "SwapsTheFirstBlockOnly",
            FakeBackend,
            swap_blocks=lambda self, *, outs, ins: FakeBackend.swap_blocks(
                self, outs=attrs.evolve(outs, sources=outs.sources[:1], targets=outs.targets[:1]), ins=ins
            ),
        )
    ],
    "test_swap_is_in_order_with_batches": [SwapsBeforeTheBatchInFlight],
    "test_blocks_go_out_before_others_come_in": [SwapsInFirst],
    "test_nothing_to_swap_changes_nothing": [
        CannotSwapNothing,
        broken(
            "SwapsAlthoughItSaysNo",
            FakeBackend,
            __init__=lambda self: FakeBackend.__init__(self, swaps_blocks=False),
            swap_blocks=lambda self, *, outs, ins: None,
        ),
    ],
    "test_bytes_of_blocks_brought_to_others_give_the_same_tokens": [ShowsACopyOfItsCache],
    "test_pool_of_any_thread_is_one": [
        broken(
            "ShowsACacheOfOneThread",
            FakeBackend,
            kv_cache=lambda self: _BelongsToOneThread(tuple(FakeBackend.kv_cache(self)), block_size=self._block_size),
        )
    ],
    "test_layout_says_how_many_bytes_a_block_has": [
        broken(
            "ReadsTooMuch",
            FakeBackend,
            kv_cache=lambda self: _Overreaching(tuple(FakeBackend.kv_cache(self)), block_size=self._block_size),
        )
    ],
    "test_prepare_leaves_no_trace": [PreparesInTheCache],
    "test_warm_up_says_what_it_prepared_and_leaves_no_trace": [
        PreparesMoreThanItWasAsked,
        broken(
            "CountsItsWarmUpBackwards",
            FakeBackend,
            warm_up=lambda self, buckets, *, progress=None: FakeBackend.warm_up(
                self, buckets, progress=lambda done, total: progress(total - done, total)
            ),
        ),
    ],
    "test_prompt_logprobs_cover_every_prompt_token_but_the_first": [ScoresTheWrongPosition],
    "test_step_without_passes_is_empty": [NeedsPasses],
    "test_close_may_be_called_twice": [ClosesOnce],
    "test_text_has_one_vector_whatever_else_is_in_the_call": [
        EmbedsBesideTheOthers,
        broken(
            "EmbedsEverythingAlike", FakeBackend, embed=lambda self, token_ids: np.ones((len(token_ids), 8), np.float32)
        ),
        broken(
            "EmbedsInDoubles",
            FakeBackend,
            embed=lambda self, token_ids: FakeBackend.embed(self, token_ids).astype(np.float64),
        ),
        broken(
            "EmbedsAlthoughItCannot",
            FakeBackend,
            __init__=lambda self: FakeBackend.__init__(self, embedding_size=0),
            embed=lambda self, token_ids: np.zeros((len(token_ids), 8), np.float32),
        ),
    ],
    "test_embedding_leaves_no_trace_in_running_sequences": [EmbedsInTheCache],
    "test_memory_report_adds_up": [
        broken(
            "ReportsMoreThanThereIs",
            FakeBackend,
            memory=lambda self, **sizes: MemoryReport(total_bytes=1, free_bytes=2, activation_bytes=0),
        )
    ],
    "test_layer_is_not_read_before_it_was_waited_for": [
        broken(
            "WaitsForNoLayer",
            FakeBackend,
            allocate=lambda self, plan: FakeBackend.allocate(self, attrs.evolve(plan, connector=None)),
        ),
        WaitsInEveryStep,
    ],
    "test_layer_is_not_written_before_it_was_waited_for": [WaitsWhenItHasWritten],
    "test_step_that_missed_a_layer_says_so": [
        broken(
            "HidesMissedLayers",
            FakeBackend,
            _run=lambda self, batch: attrs.evolve(FakeBackend._run(self, batch), missed_layers=False),
        )
    ],
    "test_layers_of_a_block_are_its_bytes": [MixesLayersUp],
    "test_facts_are_plausible": [
        broken("HasNoLength", FakeBackend, __init__=lambda self: FakeBackend.__init__(self, max_model_len=0))
    ],
}

test_suite_fails_what_is_broken, _ = proofs(TestRaggedFake, MUTANTS)
