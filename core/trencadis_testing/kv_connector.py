"""Conformance suite of the noun ``kv_connector``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from trencadis.interfaces import Lookup
from trencadis.records import SamplingParams
from trencadis_testing.connector_harness import ConnectorHarness, hashes_of, request_of
from trencadis_testing.kv_suite import ConnectorSuite, twice
from trencadis_testing.workloads import Arrival, Served, arrivals, wrong_texts

__all__ = ["KVConnectorConformance"]

_LONG_WAIT_S = 30.0


class KVConnectorConformance(ConnectorSuite):
    """What every KV connector must do; inherit from it, and set ``make``.

    The cache is that of a fake backend: it notices at once when a sequence reads a block with another's content. Example::

        class TestShelf(KVConnectorConformance):
            make = make_shelf          # returns a ConnectorPair with a store of its own

    Attributes:
        block_size: Tokens per block.
        loads_again: A prompt that was computed before is loaded, not computed; set it to False for a connector that only
            saves, or only loads what others saved.
        has_threads: It moves blocks on threads of its own, so that the suite waits a while for what it does.
    """

    block_size: int = 4
    loads_again: bool = True
    has_threads: bool = False

    # ------------------------------------------------------------------------------------------ call by call

    def test_what_was_saved_is_loaded_bit_for_bit(self) -> None:
        """Into other blocks, although the old ones hold something else by now; no other block is touched."""
        harness, hashes = self.harness(), hashes_of(range(5))
        saved = harness.save([9, 2, 7, 4, 11], hashes)
        found = self._found(harness, hashes)
        before = harness.contents(range(harness.num_blocks))
        if not self.loads_again and not found.num_tokens:
            return
        assert found.num_tokens == 5 * self.block_size, f"5 blocks were saved, {found.num_tokens} tokens can be loaded"
        targets = [3, 14, 0, 8, 6]
        assert harness.load(found.transfer_id, targets, hashes) == "", "the load failed"
        assert harness.contents(targets) == saved, "what was loaded is not what was saved"
        others = [block for block in range(harness.num_blocks) if block not in targets]
        assert harness.contents(others) == [before[block] for block in others], "a load wrote into other blocks"

    def test_lookup_claims_no_more_than_a_leading_run_of_what_was_saved(self) -> None:
        """In whole blocks: a block is useless without those before it."""
        harness, hashes = self.harness(), hashes_of(range(6))
        harness.save([1, 2, 3], [hashes[0], hashes[1], hashes[3]])
        num_tokens = self._found(harness, hashes, num_blocks=2).num_tokens
        assert num_tokens in {0, self.block_size, 2 * self.block_size}, f"{num_tokens} tokens of blocks 0, 1 and 3"
        assert harness.lookup(hashes[2:]).num_tokens == 0, "a block that was never saved can be loaded"

    def test_prompt_that_nobody_saved_is_a_miss(self) -> None:
        """Also a prompt without a full block; and the answer comes within a few steps."""
        harness = self.harness()
        assert harness.lookup(hashes_of([50, 51])).num_tokens == 0
        assert harness.lookup([]).num_tokens == 0

    def test_transfer_ids_are_unique(self) -> None:
        """They name loads and held blocks for the life of the engine."""
        harness, hashes = self.harness(), hashes_of(range(3))
        harness.save([1, 2, 3], hashes)
        found = [self._found(harness, hashes) for _ in range(4)]
        transfer_ids = [one.transfer_id for one in found if one.num_tokens]
        held = [harness.pair.scheduler.on_finished(request_of(hashes, i), blocks=[5 + i]) for i in range(3)]
        transfer_ids += [transfer_id for transfer_id in held if transfer_id is not None]
        assert len(set(transfer_ids)) == len(transfer_ids), f"a transfer id was given twice: {transfer_ids}"

    def test_hit_that_is_not_used_is_found_again(self) -> None:
        """There was no room for it: nothing moves, and the next look-up offers the same under another transfer id."""
        harness, hashes = self.harness(), hashes_of(range(3))
        saved = harness.save([1, 2, 3], hashes)
        found = self._found(harness, hashes)
        if not found.num_tokens:
            return
        harness.pair.scheduler.on_unused(found.transfer_id)
        reports = [harness.step() for _ in range(5)]
        named = [t for r in reports for t in (*r.loaded, *r.released, *[one.transfer_id for one in r.failed])]
        assert named == [], f"transfer ids {named} were reported, but nothing was to be loaded"
        again = self._found(harness, hashes)
        assert again.num_tokens == found.num_tokens, (
            f"{found.num_tokens} tokens at first, {again.num_tokens} after that"
        )
        assert again.transfer_id != found.transfer_id, "a transfer id was given twice"
        targets = [9, 10, 11][: again.num_tokens // self.block_size]
        cause = harness.load(again.transfer_id, targets, hashes[: len(targets)])
        num_valid = len(targets) if not cause else harness.num_valid_tokens // self.block_size
        assert harness.contents(targets[:num_valid]) == saved[:num_valid], "what was loaded is not what was saved"

    def test_message_is_taken_once(self) -> None:
        """What it asks for must not be done in the next step as well; nothing to do is an empty message."""
        harness = self.harness()
        scheduler = harness.pair.scheduler
        assert scheduler.take_message() == b"", "there is a message, but nothing to do"
        scheduler.on_computed(blocks=[1], block_hashes=hashes_of([1]))
        assert isinstance(scheduler.take_message(), bytes)
        assert scheduler.take_message() == b"", "a message was given twice"

    def test_empty_messages_are_harmless(self) -> None:
        """Most steps have nothing to load or save."""
        harness = self.harness()
        worker = harness.pair.worker
        worker.begin_step(b"")
        worker.end_step()
        report = worker.poll()
        assert (report.loaded, report.failed, report.released) == ((), (), ()), f"nothing was asked for: {report}"

    @pytest.mark.parametrize("num_steps", [0, 1, 2])
    def test_cancelled_load_is_released_and_touches_nothing_from_then_on(self, num_steps: int) -> None:
        """A transfer id that is never released keeps its blocks for good; a late write hits another sequence."""
        harness, hashes = self.harness(), hashes_of(range(3))
        harness.save([1, 2, 3], hashes)
        found = self._found(harness, hashes)
        if not found.num_tokens:
            return
        targets = [9, 10, 11][: found.num_tokens // self.block_size]
        harness.pair.scheduler.on_allocated(found.transfer_id, blocks=targets, block_hashes=hashes[: len(targets)])
        if any(found.transfer_id in harness.step().loaded for _ in range(num_steps)):
            return
        harness.pair.scheduler.on_cancelled(found.transfer_id)
        assert harness.until(lambda report: found.transfer_id in report.released), "the transfer id is never released"
        harness.scribble()
        before = harness.contents(targets)
        for _ in range(20):
            harness.step()
        assert harness.contents(targets) == before, "blocks were written to after their transfer id was released"

    def test_held_blocks_are_released(self) -> None:
        """Those of a finished sequence, if the connector keeps them."""
        harness, hashes = self.harness(), hashes_of(range(2))
        harness.pair.scheduler.on_computed(blocks=[4, 5], block_hashes=hashes)
        transfer_id = harness.pair.scheduler.on_finished(request_of(hashes), blocks=[4, 5])
        assert transfer_id is None or harness.until(lambda report: transfer_id in report.released), (
            "the transfer id is never released"
        )

    def test_what_is_lost_between_the_lookup_and_the_load_is_a_failed_load(self) -> None:
        """Or it was there all the same; what the report calls valid must be right."""
        harness, hashes = self.harness(), hashes_of(range(3))
        saved = harness.save([1, 2, 3], hashes)
        found = self._found(harness, hashes)
        self.lose(harness.pair)
        if not found.num_tokens:
            return
        targets = [9, 10, 11][: found.num_tokens // self.block_size]
        cause = harness.load(found.transfer_id, targets, hashes[: len(targets)])
        num_valid = len(targets) if not cause else harness.num_valid_tokens // self.block_size
        assert harness.contents(targets[:num_valid]) == saved[:num_valid], (
            "a load counts as valid, but its content is wrong"
        )

    @pytest.mark.parametrize("is_lost", [False, True])
    def test_layer_that_was_waited_for_is_there_or_its_load_is_not_loaded(self, *, is_lost: bool) -> None:
        """If its look-ups say ``layerwise``. Attention reads a layer right after ``wait_layer``: what comes later comes too late."""
        harness, hashes = self.harness(), hashes_of(range(3))
        saved = harness.save([1, 2, 3], hashes)
        found = self._found(harness, hashes)
        if is_lost:
            self.lose(harness.pair)
        if not found.num_tokens or not found.layerwise:
            return
        targets = [9, 10, 11][: found.num_tokens // self.block_size]
        missed, report = harness.load_by_layer(
            found.transfer_id, targets, hashes[: len(targets)], budget_s=_LONG_WAIT_S
        )
        for layer, contents in harness.as_waited.items():
            expected = [block[layer] for block in saved[: len(targets)]]
            assert layer in missed or contents == expected, f"layer {layer} was vouched for, and is not there"
        assert not missed or found.transfer_id not in report.loaded, "a load that missed a layer is reported as loaded"
        if not missed:
            assert found.transfer_id in report.loaded, "every layer came, and the report of that step does not say so"

    def test_layers_that_may_not_be_waited_for_are_given_up(self) -> None:
        """With no time at all a step does not wait; it is not told that a load came after all."""
        harness, hashes = self.harness(), hashes_of(range(3))
        harness.save([1, 2, 3], hashes)
        found = self._found(harness, hashes)
        if not found.num_tokens or not found.layerwise:
            return
        targets = [9, 10, 11][: found.num_tokens // self.block_size]
        missed, report = harness.load_by_layer(found.transfer_id, targets, hashes[: len(targets)], budget_s=0.0)
        reports = [report] if not missed else [report, *(harness.step() for _ in range(20))]
        assert not missed or all(found.transfer_id not in one.loaded for one in reports), (
            "it was given up, and then loaded"
        )

    def test_layer_of_a_save_is_copied_before_it_is_overwritten(self) -> None:
        """A worker side that is told to expect layers may copy late, but not too late; one that does not care copies at once."""
        harness, hashes = self.harness(), hashes_of(range(3))
        saved = harness.save_by_layer([1, 2, 3], hashes)
        found = self._found(harness, hashes)
        targets = [9, 10, 11][: found.num_tokens // self.block_size]
        if targets and not harness.load(found.transfer_id, targets, hashes[: len(targets)]):
            assert harness.contents(targets) == saved[: len(targets)], "what was saved is what the next step wrote"

    def test_closed_worker_touches_nothing(self) -> None:
        """Also with a load under way; close may be called twice."""
        harness, hashes = self.harness(), hashes_of(range(3))
        harness.save([1, 2, 3], hashes)
        found = self._found(harness, hashes)
        targets = [9, 10, 11][: found.num_tokens // self.block_size]
        harness.pair.scheduler.on_allocated(found.transfer_id, blocks=targets, block_hashes=hashes[: len(targets)])
        harness.pair.worker.begin_step(harness.pair.scheduler.take_message())
        harness.pair.worker.close()
        before = harness.contents(targets)
        self.settle(harness.pair)
        harness.pair.worker.close()
        assert harness.contents(targets) == before, "a block was written to after close()"

    # ----------------------------------------------------------------------------------------- whole engines

    @pytest.mark.parametrize("prefix_caching", [True, False])
    def test_texts_are_those_without_a_connector(self, *, prefix_caching: bool) -> None:
        """Shared prefixes, prompts that come back, sequences that come and go."""
        for seed in range(2):
            todo = twice(arrivals(seed, num_requests=16))
            assert wrong_texts(self._serve(todo, prefix_caching=prefix_caching), todo) == []

    def test_prompt_that_comes_back_is_loaded(self) -> None:
        """With the engine's own prefix cache off, only the connector can have it."""
        todo = twice(arrivals(1, num_requests=6))
        served = self._serve(todo, prefix_caching=False)
        cached = sum(end.num_cached_tokens for end in served.ends.values())
        assert cached > 0 or not self.loads_again, "nothing that was computed was ever loaded"

    def test_preempted_sequences_come_back(self) -> None:
        """Long outputs in a tiny cache: blocks change hands while they are saved."""
        todo = [
            Arrival(0, attrs.evolve(a.request, params=SamplingParams(max_tokens=30, ignore_eos=True)))
            for a in arrivals(3, num_requests=6, longest=8)
        ]
        todo = twice(todo)
        served = self._serve(todo, num_blocks=18, eos=-1, prefix_caching=False)
        assert wrong_texts(served, todo, eos=-1) == []

    def test_aborts_at_any_step_leave_nothing_behind(self) -> None:
        """Also while a load is under way: its blocks come back, and serve others unharmed."""
        todo = twice(arrivals(5, num_requests=16))
        served = self._serve(todo, prefix_caching=False, abort_every=2)
        assert served.num_aborted
        assert wrong_texts(served, todo) == []

    def test_loads_that_take_too_long_are_given_up(self) -> None:
        """At a deadline of nothing at all every load is cancelled, and its tokens are computed."""
        todo = twice(arrivals(2, num_requests=12))
        assert wrong_texts(self._serve(todo, prefix_caching=False, load_timeout_s=1e-6), todo) == []

    # ----------------------------------------------------------------------------------------------- helpers

    def _found(self, harness: ConnectorHarness, hashes: Sequence[bytes], *, num_blocks: int = -1) -> Lookup:
        """Look up what was saved; all of it, if nothing else is said."""
        expected = len(hashes) if num_blocks < 0 else num_blocks
        return harness.lookup(hashes, num_blocks=expected if self.loads_again else 0)

    def _serve(
        self, todo: Sequence[Arrival], *, num_blocks: int = 60, eos: int = 0, abort_every: int = 0, **options: Any
    ) -> Served:
        with self.engine(num_blocks=num_blocks, eos=eos, **options) as under_test:
            return under_test.serve(todo, abort_every=abort_every)
