"""Conformance suite of the noun ``speculation``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from trencadis.clock import SimulatedClock
from trencadis.interfaces import DraftView, Speculator
from trencadis.records import Drafts, FinishReason, Int32Array, Request, SamplingParams
from trencadis_testing.draft_checks import broken_distributions, broken_shapes, broken_trees
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend
from trencadis_testing.hash_seeds import same_under_other_hashes
from trencadis_testing.resources import ends_its_threads
from trencadis_testing.workloads import Arrival, Served, arrivals, serve, wrong_texts

__all__ = ["SpeculationConformance", "draft_view"]


def draft_view(
    histories: Sequence[Sequence[int]],
    *,
    most: Sequence[int] | int = 4,
    slots: Sequence[int] = (),
    epochs: Sequence[int] = (),
    requests: Sequence[Request] = (),
    seeds: Sequence[int] = (),
    linear_only: bool = False,
) -> DraftView:
    """Return a view of sequences with these tokens. Pure.

    Args:
        histories: All known tokens of each sequence.
        most: The most drafts for each, or for all.
        slots: Slot of each; 0, 1, 2 … if empty.
        epochs: Epoch of each; 1 if empty.
        requests: Request of each; the history as a prompt, and nothing else, if empty.
        seeds: Seed of each; 0, 1, 2 … if empty.
        linear_only: No sequence may get two drafts after one token.
    """
    count = len(histories)
    return DraftView(
        slots=np.array(slots or range(count), np.int32),
        epochs=np.array(epochs or [1] * count, np.int64),
        token_ids=tuple(np.array(tokens, np.int32) for tokens in histories),
        max_draft_tokens=np.array([most] * count if isinstance(most, int) else most, np.int32),
        requests=tuple(requests)
        or tuple(
            Request(request_id=f"request-{i}", prompt_token_ids=tuple(tokens), params=SamplingParams())
            for i, tokens in enumerate(histories)
        ),
        seeds=tuple(seeds) or tuple(range(count)),
        linear_only=np.full(count, linear_only, np.bool_),
    )


class SpeculationConformance:
    """What every speculator must do; inherit from it, and set ``make``.

    Which tokens it drafts, and how often they are right, is its own affair: text never depends on it. Example::

        class TestNgram(SpeculationConformance):
            make = Ngram

    Attributes:
        vocab_size: Token ids in the suite are below this, and so must the drafts be.
    """

    vocab_size: int = 97

    def make(self) -> Speculator:
        """Return a new speculator that has seen nothing."""
        raise NotImplementedError(f"{type(self).__name__} needs make = YourSpeculator, or a method make(self)")

    # ---------------------------------------------------------------------------------------- call by call

    def test_number_of_drafts_is_positive_and_constant(self) -> None:
        """The engine reads ``max_draft_tokens`` once, and makes room for it."""
        speculator = self.make()
        before = speculator.max_draft_tokens
        assert type(before) is int, f"max_draft_tokens is {before!r}, no int"
        assert before >= 1, f"max_draft_tokens is {before}"
        for seed in range(3):
            speculator.propose(draft_view(self._histories(seed)))
        assert speculator.max_draft_tokens == before, "max_draft_tokens changed"

    def test_bytes_it_keeps_for_each_token_are_a_whole_number(self) -> None:
        """The engine leaves them room on the device."""
        kept = self.make().kv_bytes_per_token
        assert type(kept) is int, f"kv_bytes_per_token is {kept!r}, no int"
        assert kept >= 0, f"kv_bytes_per_token is {kept}"

    def test_close_may_come_twice_and_without_a_call(self) -> None:
        """An engine that fails to start closes what it has, and the end of the process once more."""
        unused, used = self.make(), self.make()
        used.propose(draft_view(self._histories(1)))
        for speculator in (unused, used):
            speculator.close()
            speculator.close()

    @pytest.mark.parametrize("seed", range(4))
    def test_drafts_are_no_more_than_allowed_and_in_one_flat_array(self, seed: int) -> None:
        """One count for each sequence, each within its limit; 0 is a limit too."""
        speculator = self.make()
        histories = self._histories(seed)
        for most in ([0] * 6, [1] * 6, [0, 1, 2, 3, 4, 5], [9] * 6):
            allowed = np.minimum(most, speculator.max_draft_tokens)
            view = draft_view(histories, most=allowed.tolist())
            assert self._faults(speculator, view) == []

    @pytest.mark.parametrize("seed", range(4))
    def test_drafts_are_int32_token_ids_of_the_vocabulary(self, seed: int) -> None:
        """The device reads the embedding of every draft."""
        speculator = self.make()
        view = draft_view(self._histories(seed), most=speculator.max_draft_tokens)
        assert self._faults(speculator, view) == []

    @pytest.mark.parametrize("seed", range(4))
    def test_drafts_branch_only_where_they_may_and_parents_come_first(self, seed: int) -> None:
        """Only with ``drafts_trees``, and not for the sequences that may not; what branches differs."""
        speculator, histories = self.make(), self._histories(seed)
        for linear_only in (False, True):
            view = draft_view(histories, most=speculator.max_draft_tokens, linear_only=linear_only)
            drafts = speculator.propose(view)
            assert broken_trees(drafts, view, drafts_trees=speculator.drafts_trees) == []

    @pytest.mark.parametrize("seed", range(4))
    def test_distributions_say_how_each_draft_was_drawn(self, seed: int) -> None:
        """A lossless rule divides by them: a row for each drawn draft, which sums to 1 and makes the draft possible."""
        speculator = self.make()
        view = draft_view(self._histories(seed), most=speculator.max_draft_tokens)
        assert broken_distributions(speculator.propose(view)) == []

    def test_drafts_come_in_the_order_of_the_view(self) -> None:
        """Slots are names, not an order. The sequences share no token, so that none can teach another."""
        histories = [[base + i % 3 for i in range(24)] for base in (10, 20, 30, 40)]
        straight = _runs(self.make().propose(draft_view(histories, slots=[3, 0, 7, 1])))
        order = [2, 0, 3, 1]
        moved = _runs(self.make().propose(draft_view([histories[i] for i in order], slots=[7, 3, 1, 0], seeds=order)))
        assert moved == [straight[i] for i in order], f"{moved} for the order {order} of {straight}"

    def test_the_view_is_not_changed(self) -> None:
        """The arrays are the engine's own."""
        view = draft_view(self._histories(1))
        before = [array.copy() for array in _arrays(view)]
        self.make().propose(view)
        changed = [i for i, array in enumerate(_arrays(view)) if not np.array_equal(array, before[i])]
        assert not changed, f"propose() changed arrays of its view: {changed}"

    def test_same_calls_give_the_same_drafts(self) -> None:
        """Replay and ranks must agree: no wall clock, no global random source."""
        first, second = self.make(), self.make()
        for seed in range(4):
            view = draft_view(self._histories(seed), epochs=[seed + 1] * 6)
            one, other = _runs(first.propose(view)), _runs(second.propose(view))
            assert one == other, f"two speculators, one history: {one} and {other}"

    def test_same_drafts_in_a_process_that_hashes_differently(self) -> None:
        """Ranks and replays are other processes: no order of a set of tenants, salts or request ids."""
        same_under_other_hashes(self, "_drafts")

    def _drafts(self) -> list[list[list[int]]]:
        """Return drafts for sequences of four tenants that come, are verified and end."""
        speculator, found = self.make(), []
        for seed in range(8):
            histories = self._histories(seed % 4)
            tenants = [f"tenant {(seed + i) % 4}" for i in range(6)]
            requests = [_request(tenant, tokens, tenant) for tenant, tokens in zip(tenants, histories, strict=True)]
            for length in range(1, 31, 4):
                known = [tokens[:length] for tokens in histories]
                drafts = speculator.propose(draft_view(known, epochs=[seed + 1] * 6, requests=requests))
                counts = drafts.num_drafts
                speculator.on_verified(
                    slots=np.arange(6, dtype=np.int32), num_drafts=counts, num_accepted=(counts + 1) // 2
                )
                found.append(_runs(drafts))
            for slot, tokens in enumerate(histories):
                speculator.on_finished(slot=slot, token_ids=np.array(tokens, np.int32))
        return found

    @pytest.mark.parametrize("told", [True, False])
    @pytest.mark.parametrize("last", [12, 13])
    def test_a_slot_forgets_the_sequence_that_held_it(self, told: bool, last: int) -> None:
        """After ``on_finished``, and after a preemption, which only the epoch shows; the new sequence may be shorter.

        Both hold the same tokens, with others after them; what follows a 13 only the old one shows.
        """
        old, new = [13 - i % 4 for i in range(40)], [*([10, 11, 12] * 4)[:-1], last]
        requests = [_request(asker, [1], asker) for asker in ("old", "new")]
        used, fresh = self.make(), self.make()
        used.propose(draft_view([old], slots=[2], epochs=[1], requests=requests[:1]))
        if told:
            used.on_finished(slot=2, token_ids=np.array(old, np.int32))
        view = draft_view([new], slots=[2], epochs=[2], requests=requests[1:])
        found, expected = _runs(used.propose(view)), _runs(fresh.propose(view))
        assert found == expected, f"slot 2 drafts {found} after another sequence, {expected} for itself"

    def test_verdicts_and_ends_may_concern_sequences_without_drafts(self) -> None:
        """A step may hold prefills, and a sequence may end before it was ever drafted for."""
        speculator = self.make()
        nothing = np.zeros(2, np.int32)
        speculator.on_verified(slots=np.array([4, 5], np.int32), num_drafts=nothing, num_accepted=nothing)
        speculator.on_finished(slot=4, token_ids=np.array([1, 2, 1], np.int32))
        speculator.propose(draft_view([[1, 2, 1, 2, 1]], slots=[4]))
        one = np.ones(1, np.int32)
        speculator.on_verified(slots=np.array([4], np.int32), num_drafts=one, num_accepted=one)
        speculator.on_finished(slot=4, token_ids=np.array([1, 2, 1], np.int32))

    def test_sequences_left_out_of_calls_come_back(self) -> None:
        """Others have the room of a step, or a preemption took theirs: many tokens later they are drafted for again."""
        speculator = self.make()
        rng = random.Random(8)
        texts = [[rng.randrange(self.vocab_size) for _ in range(4)] * 15 for _ in range(3)]
        requests = draft_view(texts).requests
        for present, ends, epochs in (
            ((0, 1, 2), (8, 9, 10), (1, 1, 1)),
            ((1,), (8, 12, 10), (1, 1, 1)),
            ((2, 0), (40, 12, 11), (3, 1, 1)),
            ((0, 1, 2), (40, 60, 31), (3, 1, 6)),
        ):
            view = draft_view(
                [texts[i][: ends[i]] for i in present],
                most=speculator.max_draft_tokens,
                slots=present,
                epochs=[epochs[i] for i in present],
                requests=[requests[i] for i in present],
            )
            assert self._faults(speculator, view) == []

    def test_no_thread_outlives_close(self) -> None:
        """Engines come and go in one process."""
        with ends_its_threads("the speculator"):
            speculator = self.make()
            speculator.propose(draft_view(self._histories(1)))
            speculator.close()

    @pytest.mark.parametrize("other", [("green", "green"), ("blue", "salt of another")])
    def test_nobody_is_drafted_another_tenant_s_text(self, other: tuple[str, str]) -> None:
        """Nor is faster or slower for it: what is guessed for a request depends on no other cache salt, also of the same tenant."""
        secret = self._histories(7)[0]
        blue, stranger = (_request(tenant, secret, salt) for tenant, salt in (("blue", "blue"), other))
        used, fresh = self.make(), self.make()
        told = np.array(secret, np.int32)
        for epoch in range(1, 4):
            view = draft_view([secret[:15]], slots=[2], epochs=[epoch], requests=[blue])
            counts = used.propose(view).num_drafts
            used.on_verified(slots=view.slots, num_drafts=counts, num_accepted=counts)
            used.on_finished(slot=2, token_ids=told)
        used.propose(draft_view([secret], slots=[3], epochs=[4], requests=[blue]))
        view = draft_view([secret[:10]], slots=[2], epochs=[5], requests=[stranger])
        found, expected = _runs(used.propose(view)), _runs(fresh.propose(view))
        assert found == expected, f"drafts {found} after another's text, {expected} without it"

    # --------------------------------------------------------------------------------------- whole engines

    @pytest.mark.parametrize("seed", range(3))
    def test_text_is_that_of_no_speculation(self, seed: int) -> None:
        """Prefills beside decodes, sequences that come and go; drafts cost time, never a token."""
        todo = arrivals(seed)
        assert wrong_texts(self._serve(todo), todo) == []

    def test_text_that_repeats_itself_is_that_of_no_speculation(self) -> None:
        """Texts of two words: many drafts are right, and what follows an accepted one is drafted too."""
        todo = [
            Arrival(a.step, attrs.evolve(a.request, prompt_token_ids=tuple(t % 2 for t in a.request.prompt_token_ids)))
            for a in arrivals(4)
        ]
        served = self._serve(todo, num_words=2, eos=-1)
        lengths = {a.request.request_id: a.request.params.max_tokens for a in todo}
        plain = _serve(None, todo, num_words=2, eos=-1)
        for name, end in served.ends.items():
            assert end.finish_reason is not FinishReason.ERROR, end.error
            assert end.token_ids.tolist() == plain.ends[name].token_ids.tolist(), name
            assert len(end.token_ids) == lengths[name]

    def test_preempted_sequences_go_on_as_if_nothing_had_happened(self) -> None:
        """Long outputs in a tiny cache: slots change hands, rows change, drafts go on."""
        todo = [
            Arrival(0, attrs.evolve(a.request, params=SamplingParams(max_tokens=30, ignore_eos=True)))
            for a in arrivals(3, num_requests=6, longest=8)
        ]
        served = self._serve(todo, num_blocks=18, eos=-1)
        assert any(end.num_preemptions for end in served.ends.values()), "the cache was too large to preempt"
        assert wrong_texts(served, todo, eos=-1) == []

    def test_aborts_at_any_step_leave_nothing_behind(self) -> None:
        """Drafts of an aborted sequence hold no block, and its slot serves the next one."""
        todo = arrivals(5)
        served = self._serve(todo, abort_every=3)
        assert served.num_aborted
        assert wrong_texts(served, todo) == []

    # --------------------------------------------------------------------------------------------- helpers

    def _serve(self, todo: Sequence[Arrival], **options: Any) -> Served:
        return _serve(self.make(), todo, **options)

    def _faults(self, speculator: Speculator, view: DraftView) -> list[str]:
        return broken_shapes(speculator.propose(view), view, vocab_size=self.vocab_size)

    def _histories(self, seed: int) -> list[list[int]]:
        """Return six token lists: random, repeating, and as short as one token."""
        rng = random.Random(seed)
        pattern = [rng.randrange(self.vocab_size) for _ in range(5)]
        return [
            [rng.randrange(self.vocab_size) for _ in range(30)],
            pattern * 6,
            [rng.randrange(self.vocab_size)],
            [*pattern, rng.randrange(self.vocab_size), *pattern[:3]],
            [self.vocab_size - 1] * 20,
            [rng.randrange(self.vocab_size), 1],
        ]


def _serve(
    speculator: Speculator | None,
    todo: Sequence[Arrival],
    *,
    num_blocks: int = 60,
    num_words: int = 0,
    eos: int = 0,
    abort_every: int = 0,
) -> Served:
    clock = SimulatedClock()
    engine = make_engine(
        speculator=speculator,
        backend=FakeBackend(num_words=num_words, eos=eos, max_model_len=num_blocks * 4),
        clock=clock,
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        warmup=False,
    )
    served = serve(engine, clock, todo, abort_every=abort_every)
    fault = engine.inspect().stages.get("speculation")
    assert not fault, f"the engine switched speculation off: {fault}"
    return served


def _request(tenant: str, prompt: Sequence[int], salt: str) -> Request:
    return Request(request_id=f"of {tenant}, {salt}", prompt_token_ids=prompt, tenant=tenant, cache_salt=salt)


def _arrays(view: DraftView) -> list[Any]:
    return [view.slots, view.epochs, view.max_draft_tokens, *view.token_ids]


def _runs(drafts: Drafts) -> list[list[int]]:
    ends: Int32Array = np.cumsum(drafts.num_drafts)
    return [
        drafts.token_ids[end - count : end].tolist()
        for end, count in zip(ends.tolist(), drafts.num_drafts.tolist(), strict=True)
    ]
