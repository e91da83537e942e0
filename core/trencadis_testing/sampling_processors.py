"""Conformance suite of logits processors, the steps of a sampler's chain.

    import torch
    from trencadis_testing.sampling_processors import LogitsProcessorConformance

    class TestMyProcessor(LogitsProcessorConformance):
        asking = ({"logits_processors": {"mine": {"strength": 2}}},)

        def make(self):
            return MyProcessor()

        def tensor(self, array):
            return torch.from_numpy(array)

Everything is compared bit by bit, on logits with ties and masked tokens. Each row of a call is at another position of another history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from trencadis.interfaces import LogitsProcessor, SamplingContext
from trencadis.records import RowStart, SamplingParams

if TYPE_CHECKING:
    import torch

__all__ = ["LogitsProcessorConformance"]

_VOCAB_SIZE = 40
_NUM_ROWS = 16
_MAX_MODEL_LEN = 64
_NUM_PROMPT_TOKENS = 4
_FIRST = 11
"""Position of the first logits row of a test; the history is random tokens up to there."""

_Logits = npt.NDArray[np.float32]


class _Bench:
    """A processor with its rows, and the tokens that a backend would keep for them."""

    def __init__(self, suite: LogitsProcessorConformance, *, seed: int = 0) -> None:
        self.processor = suite.make()
        self._tensor = suite.tensor
        # Few different tokens: so runs repeat.
        self.tokens = np.random.default_rng(seed).integers(0, 5, (_NUM_ROWS, _MAX_MODEL_LEN + 1)).astype(np.int32)
        device = suite.tensor(np.zeros(1, np.float32)).device
        self.processor.allocate(num_rows=_NUM_ROWS, vocab_size=_VOCAB_SIZE, device=device)

    def start(
        self, row: int, params: Mapping[str, Any], *, like: int | None = None, num_tokens: int = _FIRST + 1
    ) -> RowStart:
        """Give a row to a sequence whose tokens and seed belong to number ``like``."""
        number = row if like is None else like
        self.tokens[row] = np.random.default_rng(100 + number).integers(0, 5, _MAX_MODEL_LEN + 1)
        start = RowStart(
            row=row,
            token_ids=self.tokens[row, :num_tokens].copy(),
            num_prompt_tokens=_NUM_PROMPT_TOKENS,
            params=SamplingParams(**params),
            seed=1000 + number,
            eos_token_ids=(3,),
        )
        self.processor.start_row(start)
        return start

    def apply(
        self,
        logits: _Logits,
        rows: Sequence[int],
        positions: Sequence[int],
        *,
        chosen: Sequence[int] | None = None,
    ) -> _Logits:
        """Return changed logits; with ``chosen``, the processor is told of these tokens."""
        context = SamplingContext(rows=tuple(rows), positions=tuple(positions), tokens=self._tensor(self.tokens.copy()))
        changed = self.processor.apply(self._tensor(logits.copy()), context)
        found = np.array(changed.tolist(), np.float32)
        if chosen is not None and self.processor.has_state:
            self.processor.commit(self._tensor(np.array(chosen, np.int32)).long(), context)
        return found


def _logits(num_rows: int, *, seed: int = 0) -> _Logits:
    """Return random logits, half of them with ties, all with some masked tokens."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (num_rows, _VOCAB_SIZE))
    logits[::2] = np.round(logits[::2])
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    return logits.astype(np.float32)


class LogitsProcessorConformance:
    """What every logits processor promises. Subclass it, name the class ``Test...``, and say how to make one.

    Attributes:
        asking: Fields of ``SamplingParams`` of requests that ask for it, one mapping a request.
    """

    asking: Sequence[Mapping[str, Any]] = ({},)

    def make(self) -> LogitsProcessor:
        """Return a new processor."""
        raise NotImplementedError(f"{type(self).__name__} needs a method make(self) that returns a logits processor")

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        """Return an array of float32 or int32 as a tensor on the device to test."""
        raise NotImplementedError(f"{type(self).__name__} needs a method tensor(self, array)")

    def _params(self, number: int) -> Mapping[str, Any]:
        return self.asking[number % len(self.asking)]

    def _bench(self, rows: Sequence[int]) -> _Bench:
        """Return a bench where sequence i, with parameters of its own, has row ``rows[i]``."""
        bench = _Bench(self)
        for number, row in enumerate(rows):
            bench.start(row, self._params(number), like=number)
        return bench

    # ------------------------------------------------------------------------------------------------- rows

    def test_its_requests_ask_for_it_and_are_changed(self) -> None:
        """Some logits of each request of ``asking`` are changed: the other tests would say nothing otherwise."""
        for number, params in enumerate(self.asking):
            bench = _Bench(self)
            assert bench.processor.applies_to(bench.start(0, params)), params
            logits = _logits(32, seed=number)
            places = list(range(_FIRST, _FIRST + 32))
            if bench.processor.speculation_safe:
                changed = bench.apply(logits, [0] * 32, places)
            else:
                changed = np.concatenate([bench.apply(logits[i : i + 1], [0], [places[i]]) for i in range(32)])
            assert not np.array_equal(changed, logits), params

    def test_rows_that_do_not_ask_stay_bit_equal(self) -> None:
        """Beside rows that do."""
        bench = _Bench(self)
        if bench.processor.applies_to(bench.start(0, {})):
            pytest.skip("every request asks for this processor")
        for row in range(1, 8):
            bench.start(row, self._params(row) if row % 2 else {})
        logits = _logits(8)
        assert np.array_equal(bench.apply(logits, range(8), [_FIRST] * 8)[::2], logits[::2])

    def test_a_row_depends_on_nothing_else_in_the_batch(self) -> None:
        """The same from any row, in any order, alone or among others."""
        logits, positions = _logits(12), list(range(_FIRST, _FIRST + 12))
        expected = self._bench(range(12)).apply(logits, range(12), positions)
        rng = np.random.default_rng(3)
        for _ in range(3):
            moved, order = rng.permutation(_NUM_ROWS)[:12], rng.permutation(12)
            changed = self._bench(moved.tolist()).apply(
                logits[order], moved[order].tolist(), [positions[i] for i in order]
            )
            assert np.array_equal(changed, expected[order])
        bench = self._bench(range(12))
        for i in range(12):
            assert np.array_equal(bench.apply(logits[i : i + 1], [i], [positions[i]])[0], expected[i])

    def test_a_row_forgets_the_sequence_that_held_it(self) -> None:
        """Whatever ran before: the same as from a new processor."""
        logits = _logits(6)
        for number in range(len(self.asking)):
            used, fresh = self._bench(range(6)), _Bench(self)
            used.apply(logits, range(6), [_FIRST] * 6, chosen=[7] * 6)
            for bench in (used, fresh):
                for row in range(6):
                    bench.start(row, self._params(number + row + 1) if row % 2 else {}, like=row + 3)
            rows, places = range(6), [_FIRST] * 6
            assert np.array_equal(used.apply(logits, rows, places), fresh.apply(logits, rows, places))

    # ------------------------------------------------------------------------------------------------- values

    def test_what_it_returns_are_logits(self) -> None:
        """No NaN and no +inf, and a masked token stays masked."""
        logits = _logits(12)
        changed = self._bench(range(12)).apply(logits, range(12), [_FIRST] * 12)
        assert changed.shape == logits.shape
        assert not np.isnan(changed).any()
        assert not np.isposinf(changed).any()
        assert np.isneginf(changed[np.isneginf(logits)]).all()

    def test_an_argmax_invariant_processor_leaves_the_maximum_where_it_is(self) -> None:
        """The lowest id among the largest logits, also on flat and on steep rows."""
        bench = self._bench(range(12))
        if not bench.processor.argmax_invariant:
            pytest.skip("this processor may move the maximum")
        for seed, scale in ((0, 1.0), (1, 0.01), (2, 30.0), (3, 0.0)):
            logits = np.nan_to_num(_logits(12, seed=seed), neginf=-5.0) * np.float32(scale)
            changed = bench.apply(logits, range(12), [_FIRST + seed] * 12, chosen=logits.argmax(-1).tolist())
            assert changed.argmax(-1).tolist() == logits.argmax(-1).tolist()

    def test_a_processor_that_needs_no_history_does_not_depend_on_it(self) -> None:
        """Other tokens, the same logits."""
        bench = self._bench(range(12))
        if bench.processor.needs_history:
            pytest.skip("this processor needs the history")
        logits = _logits(12)
        expected = bench.apply(logits, range(12), [_FIRST] * 12)
        bench.tokens[:] = 6
        assert np.array_equal(bench.apply(logits, range(12), [_FIRST] * 12), expected)

    def test_tokens_behind_a_rows_position_do_not_matter(self) -> None:
        """They are drafts, or what an earlier sequence left."""
        bench = self._bench(range(12))
        logits = _logits(12)
        expected = bench.apply(logits, range(12), [_FIRST] * 12)
        bench.tokens[:, _FIRST + 1 :] = 6
        assert np.array_equal(bench.apply(logits, range(12), [_FIRST] * 12), expected)

    def test_the_same_call_gives_the_same_logits(self) -> None:
        """Random numbers come from seed and position, not from a stream; a state moves when tokens are committed only."""
        rows, bench, other = range(12), self._bench(range(12)), self._bench(range(12))
        for place in range(_FIRST, _FIRST + 12):
            logits, places = _logits(12, seed=place), [place] * 12
            expected = bench.apply(logits, rows, places)
            assert np.array_equal(bench.apply(logits, rows, places), expected)
            assert np.array_equal(other.apply(logits, rows, places), expected)

    # ------------------------------------------------------------------------------------------------- drafts

    def _step_by_step(self, bench: _Bench, logits: _Logits, chosen: Sequence[int], *, first: int = _FIRST) -> _Logits:
        """Return what row 0 sees one token at a time; the tokens are written and committed."""
        found = []
        for i, token in enumerate(chosen):
            found.append(bench.apply(logits[i : i + 1], [0], [first + i], chosen=[token])[0])
            bench.tokens[0, first + i + 1] = token
        return np.array(found)

    def test_the_rows_of_drafts_equal_one_token_at_a_time(self) -> None:
        """Also after a draft that was refused: what came after it is as if it had never been."""
        logits = _logits(8) * np.float32(0.3)  # flat: where a tail is cut depends on little
        likely = logits.argmax(-1).tolist()
        for params in self.asking:
            expected_bench, bench = _Bench(self), _Bench(self)
            for one in (expected_bench, bench):
                one.start(0, params)
            if not bench.processor.speculation_safe:
                pytest.skip("this processor is not safe with speculation")
            expected = self._step_by_step(expected_bench, logits, likely)
            # Drafts 0 and 1 are right, draft 2 is not, and draft 3 was made in vain.
            drafts = [*likely[:2], 39, 38]
            bench.tokens[0, _FIRST + 1 : _FIRST + 5] = drafts
            places = list(range(_FIRST, _FIRST + 5))
            together = bench.apply(logits[:5], [0] * 5, places, chosen=[*likely[:3], 37, 36])
            assert np.array_equal(together[:3], expected[:3])
            bench.tokens[0, _FIRST + 3] = likely[2]
            rest = self._step_by_step(bench, logits[3:], likely[3:], first=_FIRST + 3)
            assert np.array_equal(rest, expected[3:])

    def test_drafts_that_branch_are_read_by_their_histories(self) -> None:
        """A processor that supports branches treats each of two drafts after one token as if it were the only one."""
        logits = _logits(3, seed=7)
        for params in self.asking:
            bench = _Bench(self)
            bench.start(1, params)
            processor = bench.processor
            if processor.has_state or not (processor.needs_history and processor.supports_branches):
                pytest.skip("this processor reads no histories of drafts that branch")
            histories = np.stack([bench.tokens[1]] * 2)
            histories[:, _FIRST + 1] = 1, 4
            expected = []
            for draft, place, number in ((1, _FIRST, 0), (1, _FIRST + 1, 1), (4, _FIRST + 1, 2)):
                bench.tokens[1, _FIRST + 1] = draft
                expected.append(bench.apply(logits[number : number + 1], [1], [place])[0])
            context = SamplingContext(
                rows=(1, 1, 1),
                positions=(_FIRST, _FIRST + 1, _FIRST + 1),
                tokens=self.tensor(histories),
                branches=(0, 0, 1),
            )
            found = np.array(processor.apply(self.tensor(logits.copy()), context).tolist(), np.float32)
            assert np.array_equal(found, np.array(expected)), params

    def test_a_state_goes_on_in_another_row_from_a_snapshot(self) -> None:
        """And the snapshot is a copy: what the row did later, and whom it was given to, is not in it."""
        logits = _logits(8) * np.float32(0.3)  # flat: where a tail is cut depends on little
        likely = logits.argmax(-1).tolist()
        for params in self.asking:
            bench = _Bench(self)
            bench.start(0, params)
            if not bench.processor.has_state:
                pytest.skip("this processor has no state")
            self._step_by_step(bench, logits[:4], likely[:4])
            state = bench.processor.snapshot(0)
            expected = self._step_by_step(bench, logits[4:], likely[4:], first=_FIRST + 4)
            bench.start(9, params, like=0)
            bench.tokens[9] = bench.tokens[0]
            bench.start(0, params, like=5)
            bench.processor.restore(9, state)
            for i in range(4):
                place = _FIRST + 4 + i
                found = bench.apply(logits[4 + i : 5 + i], [9], [place], chosen=[likely[4 + i]])
                assert np.array_equal(found[0], expected[i])
