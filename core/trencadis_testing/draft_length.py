"""Conformance suite of the noun ``draft_length``."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from trencadis.clock import SimulatedClock
from trencadis.interfaces import DraftLength, LengthView, VerifiedStep, legal
from trencadis.records import Int32Array, SamplingParams
from trencadis_testing.doubles import ScriptedSpeculator
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend, fake_text
from trencadis_testing.resources import ends_its_threads, growth_bytes
from trencadis_testing.workloads import Arrival, Served, arrivals, serve, wrong_texts

__all__ = ["DraftLengthConformance", "length_view", "verified_step"]

_COST_RATIO = 24
"""Eight times as many sequences may take so many times as long: linear is 8, quadratic 64, and clocks are noisy."""

_MAX_GROWTH_BYTES = 32.0
"""For each sequence that ended: an entry of a dictionary takes more than 60."""

_MAX_CALL_S = 50 * (20e-6 + 64 * 1e-6)
"""For 64 sequences: fifty times what the contract says, for the same reason."""


def length_view(
    most: Sequence[int],
    *,
    slots: Sequence[int] = (),
    epochs: Sequence[int] = (),
    num_running: int = 0,
    num_waiting: int = 0,
    pads: bool = False,
) -> LengthView:
    """Return a view of sequences with these limits. Pure.

    Args:
        most: The most drafts of each.
        slots: Slot of each; 0, 1, 2 … if empty.
        epochs: Epoch of each; 1 if empty.
        num_running: Decoding sequences, at least those of the view; as many as those if 0.
        num_waiting: Sequences that wait.
        pads: Passes are padded, to powers of two.
    """
    count = len(most)
    return LengthView(
        slots=np.array(slots or range(count), np.int32),
        epochs=np.array(epochs or [1] * count, np.int64),
        max_draft_tokens=np.array(most, np.int32),
        num_running=num_running or count,
        num_waiting=num_waiting,
        padded_tokens=_padded if pads else _product,
        pads=pads,
    )


def verified_step(
    view: LengthView,
    num_drafts: Sequence[int] | Int32Array,
    num_accepted: Sequence[int] | Int32Array,
    *,
    num_prefill_tokens: int = 0,
    draft_s: float = 1e-4,
    step_s: float = 1e-2,
) -> VerifiedStep:
    """Return what became of drafts for the sequences of a view. Pure.

    Args:
        view: Whose they were.
        num_drafts: Drafts of each.
        num_accepted: Those that stood.
        num_prefill_tokens: Tokens of prefills in the same step.
        draft_s: Time to make the drafts, seconds.
        step_s: Time of the step, seconds.
    """
    drafts = np.array(num_drafts, np.int32)
    positions = view.num_running + int(drafts.sum())
    if view.pads:
        positions = view.padded_tokens(view.num_running, 1 + int(drafts.max()))
    return VerifiedStep(
        slots=view.slots,
        epochs=view.epochs,
        num_drafts=drafts,
        num_accepted=np.array(num_accepted, np.int32),
        num_tokens=positions + num_prefill_tokens,
        num_prefill_tokens=num_prefill_tokens,
        draft_s=draft_s,
        step_s=step_s,
    )


class DraftLengthConformance:
    """What every draft length must do; inherit from it, and set ``make``.

    How well it chooses is its own affair: text never depends on it. Example::

        class TestFixed(DraftLengthConformance):
            make = Fixed
    """

    def make(self) -> DraftLength:
        """Return a new draft length that has seen nothing."""
        raise NotImplementedError(f"{type(self).__name__} needs make = YourDraftLength, or a method make(self)")

    # ---------------------------------------------------------------------------------------- call by call

    @pytest.mark.parametrize("pads", [False, True])
    @pytest.mark.parametrize("seed", range(4))
    def test_lengths_are_whole_numbers_from_0_to_the_limits(self, seed: int, pads: bool) -> None:
        """One for each sequence, in the view's order; a limit may be one draft, and as many as never are made."""
        length, rng = self.make(), random.Random(seed)
        for step in range(80):
            view = _some_view(rng, pads=pads)
            chosen = length.choose(view)
            _check(chosen, view)
            length.on_verified(_some_verdict(rng, view, chosen, right=step % 40 < 20))

    @pytest.mark.parametrize("pads", [False, True])
    def test_the_view_is_not_changed(self, pads: bool) -> None:
        """The arrays are the engine's own; those of a verdict, too."""
        length, rng = self.make(), random.Random(7)
        for _ in range(12):
            view = _some_view(rng, pads=pads)
            shown: list[Any] = [view.slots, view.epochs, view.max_draft_tokens]
            before = [array.copy() for array in shown]
            step = _some_verdict(rng, view, length.choose(view).copy(), right=True)
            told = [step.num_drafts, step.num_accepted]
            shown, before = shown + told, before + [array.copy() for array in told]
            length.on_verified(step)
            changed = [i for i, (old, new) in enumerate(zip(before, shown, strict=True)) if (old != new).any()]
            assert not changed, f"arrays were changed: {changed}"

    @pytest.mark.parametrize("pads", [False, True])
    def test_same_calls_give_the_same_lengths(self, pads: bool) -> None:
        """Replay and simulation must agree: no wall clock, no global random source."""
        first, second = self.make(), self.make()
        one, other = random.Random(3), random.Random(3)
        for step in range(100):
            mine, theirs = _some_view(one, pads=pads), _some_view(other, pads=pads)
            chosen, again = first.choose(mine), second.choose(theirs)
            assert chosen.tolist() == again.tolist(), f"step {step}: {chosen} and {again} for the same past"
            first.on_verified(_some_verdict(one, mine, chosen, right=step % 30 < 20))
            second.on_verified(_some_verdict(other, theirs, again, right=step % 30 < 20))

    @pytest.mark.parametrize("told", [True, False])
    @pytest.mark.parametrize("right", [True, False])
    def test_a_slot_forgets_the_sequence_that_held_it(self, told: bool, right: bool) -> None:
        """Slots are names: a sequence in a used one gets what it would get in another, if only its epoch is new."""
        used, other = self.make(), self.make()
        for length in (used, other):
            for _ in range(30):
                view = length_view([4, 4], slots=[2, 3], epochs=[1, 1])
                chosen = length.choose(view)
                length.on_verified(verified_step(view, chosen, chosen if right else np.zeros(2, np.int32)))
            if told:
                length.on_finished(slot=2)
                length.on_finished(slot=3)
        again = used.choose(length_view([4, 4], slots=[2, 3], epochs=[2, 5]))
        fresh = other.choose(length_view([4, 4], slots=[6, 7], epochs=[2, 5]))
        assert again.tolist() == fresh.tolist(), f"{again} in slots that others had, {fresh} in new ones"

    def test_verdicts_and_ends_may_concern_anybody(self) -> None:
        """Sequences that were never drafted for, steps without drafts, beside prefills, and of a clock that stands still."""
        length = self.make()
        length.on_finished(slot=9)
        view = length_view([4, 2], slots=[5, 1])
        length.on_verified(verified_step(view, [0, 0], [0, 0]))
        length.on_verified(verified_step(view, [4, 2], [4, 0], num_prefill_tokens=100))
        length.on_verified(verified_step(view, [1, 2], [0, 1], draft_s=0.0, step_s=0.0))
        _check(length.choose(view), view)
        length.on_finished(slot=5)
        length.on_finished(slot=5)
        view = length_view([256], slots=[5], epochs=[2])
        _check(length.choose(view), view)

    def test_nothing_is_kept_of_sequences_that_ended(self) -> None:
        """An engine runs for months; epochs never end, slots come again."""
        length = self.make()

        def live(number: int) -> None:
            view = length_view([4, 4], slots=[number % 8, number % 8 + 8], epochs=[number + 1, number + 2])
            length.on_verified(verified_step(view, length.choose(view), [1, 0]))
            length.on_finished(slot=number % 8)

        growth = growth_bytes(live)
        assert growth < _MAX_GROWTH_BYTES, f"it grows by {growth:.0f} bytes with each sequence that ended"

    def test_no_thread_is_left(self) -> None:
        """A draft length has no ``close``: it starts none."""
        with ends_its_threads("the draft length"):
            self.make().choose(length_view([4, 4]))

    def test_a_choice_takes_microseconds(self) -> None:
        """The engine thread waits for it."""
        took_s = _seconds(self.make(), 64)
        assert took_s < _MAX_CALL_S, f"a choice for 64 sequences takes {took_s * 1e3:.1f} ms"

    def test_cost_grows_no_faster_than_the_number_of_sequences(self) -> None:
        """It is asked before every step."""
        length = self.make()
        few, many = _seconds(length, 64), _seconds(length, 512)
        assert many < _COST_RATIO * few, f"64 sequences take {few * 1e6:.0f} µs, 512 take {many * 1e6:.0f} µs"

    # --------------------------------------------------------------------------------------- whole engines

    @pytest.mark.parametrize("layout", ["ragged", "padded"])
    @pytest.mark.parametrize("seed", range(2))
    def test_text_is_that_of_no_speculation(self, seed: int, layout: str) -> None:
        """Prefills beside decodes, sequences that come and go, drafts that are right two times of three."""
        todo = arrivals(seed)
        assert wrong_texts(self._serve(todo, layout=layout), todo) == []

    def test_preempted_sequences_go_on_as_if_nothing_had_happened(self) -> None:
        """Long outputs in a tiny cache: slots change hands, epochs change, drafts go on."""
        todo = [
            Arrival(0, attrs.evolve(a.request, params=SamplingParams(max_tokens=30, ignore_eos=True)))
            for a in arrivals(3, num_requests=6, longest=8)
        ]
        served = self._serve(todo, num_blocks=18, eos=-1)
        assert any(end.num_preemptions for end in served.ends.values()), "the cache was too large to preempt"
        assert wrong_texts(served, todo, eos=-1) == []

    def test_aborts_at_any_step_leave_nothing_behind(self) -> None:
        """The slot of an aborted sequence serves the next one."""
        todo = arrivals(5)
        served = self._serve(todo, abort_every=3)
        assert served.num_aborted
        assert wrong_texts(served, todo) == []

    def _serve(
        self,
        todo: Sequence[Arrival],
        *,
        num_blocks: int = 60,
        layout: str = "ragged",
        eos: int = 0,
        abort_every: int = 0,
    ) -> Served:
        clock = SimulatedClock()
        length = self.make()
        engine = make_engine(
            speculator=ScriptedSpeculator(_mostly_right),
            draft_length=length,
            backend=FakeBackend(layout=layout, eos=eos, max_model_len=num_blocks * 4),
            clock=clock,
            num_blocks=num_blocks,
            max_num_seqs=4,
            max_num_batched_tokens=24,
            warmup=False,
        )
        served = serve(engine, clock, todo, abort_every=abort_every)
        fault = engine.inspect().stages["speculation"]
        assert not fault, f"the engine switched speculation off: {fault}"
        return served


def _mostly_right(tokens: Int32Array) -> list[int]:
    drafts = fake_text(tokens.tolist(), 3, eos=-1)
    return drafts if len(tokens) % 3 else [drafts[0], 96 - drafts[1], drafts[2]]


def _product(num_sequences: int, query_len: int) -> int:
    return num_sequences * query_len


def _padded(num_sequences: int, query_len: int) -> int:
    return (1 << (num_sequences - 1).bit_length()) * (1 << (query_len - 1).bit_length())


def _some_view(rng: random.Random, *, pads: bool) -> LengthView:
    count = rng.choice([1, 1, 2, 5, 9])
    slots = rng.sample(range(12), count)
    return length_view(
        [rng.randrange(1, 7) for _ in range(count)],
        slots=slots,
        epochs=[1 + (slot + rng.randrange(8) // 7) % 3 for slot in slots],
        num_running=count + rng.randrange(3),
        num_waiting=rng.randrange(3),
        pads=pads,
    )


def _some_verdict(rng: random.Random, view: LengthView, chosen: Int32Array, *, right: bool) -> VerifiedStep:
    """Return a verdict on at most the drafts that were asked for."""
    drafts = [rng.randrange(int(most) + 1) if rng.random() < 0.2 else int(most) for most in chosen]
    accepted = [rng.randrange(most // 2 if right else 0, most + 1) if right else 0 for most in drafts]
    return verified_step(view, drafts, accepted, step_s=1e-3 * (5 + sum(drafts)) * rng.uniform(0.9, 1.1))


def _check(chosen: Any, view: LengthView) -> None:
    legal(DraftLength.choose, chosen, view)
    assert chosen.dtype == np.int32, f"lengths are {chosen.dtype}, not int32"


def _seconds(length: DraftLength, count: int) -> float:
    """Return what a call for so many sequences takes, the fastest of some."""
    view = length_view([4] * count)
    taken = []
    for _ in range(8):
        start = time.perf_counter()
        for _ in range(4):
            length.choose(view)
        taken.append(time.perf_counter() - start)
        length.on_verified(verified_step(view, [4] * count, [2] * count))
    return min(taken) / 4
