"""Conformance suite of the noun ``sampling``.

    import numpy, torch
    from trencadis_testing.sampling import SamplingConformance

    class TestMySampler(SamplingConformance):
        def make(self):
            return MySampler()

        def tensor(self, array):
            return torch.from_numpy(array)

Statistics: distributions are tested by chi-square over 2,048 draws at alpha = 1e-4 with fixed seeds, so that a sampler that passes
once passes always. The suite needs no tensor library of its own: arrays go in through ``tensor``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from trencadis.errors import TrencadisError
from trencadis.interfaces import Sampled, Sampler, SamplingContext, legal
from trencadis.records import RowStart, SamplingParams, parameters_in

if TYPE_CHECKING:
    import torch

__all__ = ["ALPHA", "SamplingConformance", "assert_distribution"]

ALPHA = 1e-4
"""Chance that a correct sampler with seeds of its own choice would fail one statistical test."""

_NUM_ROWS = 256
_MAX_MODEL_LEN = 2048
_EOS = 3
_WITH_HISTORY: dict[str, Any] = {
    "mirostat_mode": 2,
    "repetition_penalty": 1.7,
    "frequency_penalty": 1.1,
    "presence_penalty": 1.2,
    "dry_multiplier": 1.5,
    "no_repeat_ngram_size": 2,
}
"""Parameters whose effect depends on earlier tokens."""

_LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -2.0], dtype=np.float32)


def assert_distribution(tokens: Sequence[int], distribution: np.ndarray) -> None:
    """Fail if tokens were not drawn from a distribution: an impossible one occurred, or chi-square rejects it at ``ALPHA``.

    Args:
        tokens: Independent draws; expect at least five of each possible token.
        distribution: Probability of each token, ``[V]``.

    Source: critical value after Wilson and Hilferty, "The distribution of chi-square", 1931.
    """
    counts = np.bincount(tokens, minlength=len(distribution))
    possible = distribution > 0
    assert not counts[~possible].any(), f"impossible tokens were drawn: {np.flatnonzero(counts * ~possible).tolist()}"
    expected = distribution[possible] * len(tokens)
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    if freedom:
        spread = 2 / (9 * freedom)
        critical = freedom * (1 - spread + NormalDist().inv_cdf(1 - ALPHA) * math.sqrt(spread)) ** 3
        assert statistic < critical, (
            f"chi-square {statistic:.1f} >= {critical:.1f}; drawn {counts}, distribution {distribution.round(4)}"
        )


def _softmax(logits: Sequence[float] | np.ndarray) -> np.ndarray:
    weights = np.exp(np.asarray(logits, dtype=np.float64) - np.max(logits))
    return np.asarray(weights / weights.sum())


class _Harness:
    """A sampler with its rows, and the tokens that a backend would keep for them."""

    def __init__(self, suite: SamplingConformance, vocab_size: int = len(_LOGITS)) -> None:
        self._tensor = suite.tensor
        self._sampler = suite.make()
        self._tokens = np.full((_NUM_ROWS, _MAX_MODEL_LEN + 1), vocab_size - 1, dtype=np.int32)
        device = self._tensor(np.zeros(1, dtype=np.float32)).device
        self._sampler.allocate(num_rows=_NUM_ROWS, vocab_size=vocab_size, device=device)

    def start(
        self, row: int, prompt: Sequence[int] = (1,), output: Sequence[int] = (), *, seed: int = 0, **params: Any
    ) -> None:
        tokens = np.array([*prompt, *output], dtype=np.int32)
        self._tokens[row, : len(tokens)] = tokens
        self._sampler.start_row(
            RowStart(
                row=row,
                token_ids=tokens,
                num_prompt_tokens=len(prompt),
                params=SamplingParams(**params),
                seed=seed,
                eos_token_ids=(_EOS,),
            )
        )

    def write(self, row: int, position: int, token: int) -> None:
        self._tokens[row, position] = token

    def sampled(
        self,
        logits: np.ndarray,
        rows: Sequence[int],
        positions: Sequence[int],
        *,
        histories: np.ndarray | None = None,
        branches: Sequence[int] | None = None,
    ) -> Sampled:
        """Return the sampler's answer; ``histories`` and ``branches`` as where drafts branch."""
        context = SamplingContext(
            rows=tuple(rows),
            positions=tuple(positions),
            tokens=self._tensor((self._tokens if histories is None else histories).copy()),
            branches=None if branches is None else tuple(branches),
        )
        return self._sampler.sample(self._tensor(np.array(logits, dtype=np.float32)), context)

    def supports_drafts(self, *, branching: bool, **params: Any) -> bool:
        return self._sampler.supports_drafts(SamplingParams(**params), branching=branching)

    def tokens(self, logits: np.ndarray, rows: Sequence[int], positions: Sequence[int]) -> list[int]:
        return [int(token) for token in self.sampled(logits, rows, positions).token_ids.tolist()]

    def one(self, logits: Sequence[float] | np.ndarray, row: int = 0, position: int = 0) -> int:
        return self.tokens(np.array([logits]), [row], [position])[0]

    def refusal(self, logits: Sequence[float] | np.ndarray, row: int) -> str:
        """Return the message of the refusal; empty if a token was chosen."""
        try:
            sampled = self.sampled(np.array([logits]), [row], [0])
        except (ValueError, TrencadisError) as error:
            return str(error)
        return "; ".join(error.message for error in sampled.row_errors)


class SamplingConformance:
    """What every sampler promises. Subclass it, name the class ``Test...``, and say how to make one.

    Attributes:
        honours: Which parameters have an effect, by the names of ``trencadis.records.PARAMETER_GROUPS``; tests of others are
            skipped. Empty: what the sampler itself states.
    """

    honours: frozenset[str] = frozenset()

    def make(self) -> Sampler:
        """Return a new sampler."""
        raise NotImplementedError(f"{type(self).__name__} needs a method make(self) that returns a sampler")

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        """Return an array of float32 or int32 as a tensor on the device to test."""
        raise NotImplementedError(f"{type(self).__name__} needs a method tensor(self, array)")

    def _needs(self, *parameters: str) -> None:
        honoured = parameters_in(self.honours or self.make().honours)
        missing = [name for name in parameters if not parameters_in([name]) <= honoured]
        if missing:
            pytest.skip(f"this sampler does not state in `honours` that it honours {', '.join(missing)}")

    def _draws(
        self, logits: Sequence[float], prompt: Sequence[int] = (1,), output: Sequence[int] = (), **params: Any
    ) -> list[int]:
        """Return one draw for each of 2,048 seeds, from the same logits and history."""
        harness = _Harness(self, len(logits))
        batch = np.tile(np.array(logits, dtype=np.float32), (_NUM_ROWS, 1))
        position = len(prompt) + len(output) - 1
        tokens: list[int] = []
        for part in range(8):
            for row in range(_NUM_ROWS):
                harness.start(row, prompt, output, seed=part * _NUM_ROWS + row, **params)
            tokens += harness.tokens(batch, range(_NUM_ROWS), [position] * _NUM_ROWS)
        return tokens

    # ------------------------------------------------------------------------------------------------- greedy

    def test_it_returns_one_int64_token_for_each_logits_row(self) -> None:
        """Shape, type and device of the answer."""
        harness = _Harness(self)
        for row in range(3):
            harness.start(row)
        logits = np.tile(_LOGITS, (3, 1))
        sampled = harness.sampled(logits, [0, 1, 2], [0, 0, 0])
        legal(Sampler.sample, sampled, self.tensor(logits), None)

    def test_greedy_takes_the_largest_logit_and_the_lowest_id_among_equals(self) -> None:
        """Exact, also below the temperature that counts as greedy, and beside a row that is not greedy."""
        harness = _Harness(self)
        harness.start(0, temperature=0)
        harness.start(1, temperature=1e-6, top_p=0.5, seed=5)
        harness.start(2, temperature=1.0, logit_bias={0: 1.0})
        rng = np.random.default_rng(0)
        for _ in range(50):
            logits = rng.integers(-3, 4, (3, 6)).astype(np.float32)
            assert harness.tokens(logits, [0, 1, 2], [0, 0, 0])[:2] == logits[:2].argmax(-1).tolist()

    def test_logits_that_are_not_numbers_are_refused_in_words_that_name_the_row(self) -> None:
        """NaN must not become a token, whether the row is greedy or not."""
        harness = _Harness(self)
        for row, temperature in ((6, 0.0), (7, 1.0)):
            harness.start(row, temperature=temperature)
            for place in (0, 5):
                logits = _LOGITS.copy()
                logits[place] = math.nan
                assert f"row {row} " in harness.refusal(logits, row)

    def test_a_row_without_any_possible_token_is_refused(self) -> None:
        """Nothing but -inf: there is no right answer."""
        harness = _Harness(self)
        harness.start(4, temperature=1.0)
        assert "row 4 " in harness.refusal(np.full(6, -np.inf), row=4)

    # -------------------------------------------------------------------------------------------------- distributions

    def test_draws_follow_the_softmax_of_the_logits_over_the_temperature(self) -> None:
        """Three temperatures, each against the exact distribution."""
        self._needs("temperature")
        for temperature in (0.7, 1.0, 1.5):
            assert_distribution(self._draws(_LOGITS.tolist(), temperature=temperature), _softmax(_LOGITS / temperature))

    def test_draws_of_one_seed_at_many_positions_follow_the_distribution_and_do_not_depend_on_each_other(self) -> None:
        """Marginals and pairs of neighbours; a sequence's numbers come from its positions."""
        self._needs("temperature")
        harness = _Harness(self, vocab_size=3)
        harness.start(0, seed=2**64 - 1)
        logits = np.array([1.0, 0.0, 0.5])
        tokens = harness.tokens(np.tile(logits, (2048, 1)), [0] * 2048, range(2048))
        distribution = _softmax(logits)
        assert_distribution(tokens, distribution)
        pairs = [3 * first + second for first, second in zip(tokens[::2], tokens[1::2], strict=True)]
        assert_distribution(pairs, np.outer(distribution, distribution).ravel())

    def test_top_k_keeps_the_k_most_likely_and_all_that_tie_with_the_last(self) -> None:
        """Two of four would be kept, and three are equal."""
        self._needs("temperature", "truncation")
        assert_distribution(self._draws([1.0, 1.0, 1.0, 0.0], top_k=2), np.array([1, 1, 1, 0]) / 3)
        assert_distribution(self._draws(_LOGITS.tolist(), top_k=3), np.append(_softmax(_LOGITS[:3]), [0, 0, 0]))

    def test_top_p_keeps_the_smallest_set_that_reaches_p(self) -> None:
        """Between two sums, and exactly at one: two of four equal tokens have mass one half."""
        self._needs("temperature", "truncation")
        logits = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
        assert_distribution(self._draws(logits, top_p=0.7), np.array([0.625, 0.375, 0, 0]))
        assert_distribution(self._draws(logits, top_p=0.01), np.array([1.0, 0, 0, 0]))
        tied = self._draws([0.0, 0.0, 0.0, 0.0], top_p=0.5)
        kept = sorted(set(tied))
        assert len(kept) == 2
        assert_distribution(tied, np.isin(range(4), kept) / 2)

    def test_min_p_drops_what_is_far_less_likely_than_the_most_likely(self) -> None:
        """A share of the largest probability."""
        self._needs("temperature", "truncation")
        logits = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
        assert_distribution(self._draws(logits, min_p=0.5), np.array([0.625, 0.375, 0, 0]))

    # ----------------------------------------------------------------------------------- masks, bias, penalties

    def test_masked_tokens_are_never_chosen(self) -> None:
        """Allowed and bad tokens, drawn and greedy."""
        self._needs("temperature", "masks")
        distribution = _softmax(_LOGITS[1:4])
        choices: list[dict[str, Any]] = [{"allowed_token_ids": (1, 2, 3)}, {"bad_token_ids": (0, 4, 5)}]
        for masks in choices:
            assert_distribution(self._draws(_LOGITS.tolist(), **masks), np.array([0, *distribution, 0, 0]))
            assert set(self._draws(_LOGITS.tolist(), temperature=0, **masks)) == {1}

    def test_logit_bias_is_added(self) -> None:
        """To the named tokens only, drawn and greedy."""
        self._needs("temperature", "logit_bias")
        distribution = _softmax(_LOGITS + np.array([0, 0, 0, 1.5, 0, 0]))
        assert_distribution(self._draws(_LOGITS.tolist(), logit_bias={3: 1.5}), distribution)
        assert set(self._draws(_LOGITS.tolist(), temperature=0, logit_bias={3: 2.5})) == {3}

    def test_a_sequence_does_not_end_before_min_tokens(self) -> None:
        """The end-of-sequence token is masked for exactly ``min_tokens`` output tokens."""
        self._needs("min_tokens")
        harness = _Harness(self)
        harness.start(0, prompt=[1, 1, 1], temperature=0, min_tokens=2)
        logits = np.eye(6)[_EOS] * 5 + np.eye(6)[4]
        tokens = harness.tokens(np.tile(logits, (4, 1)), [0] * 4, [2, 3, 4, 5])
        assert tokens == [4, 4, _EOS, _EOS]

    def test_penalties_count_prompt_and_output_as_documented(self) -> None:
        """Repetition: prompt and output; frequency and presence: output only, per occurrence and once."""
        self._needs("temperature", "penalties")
        penalties: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.6}
        draws = self._draws([1.0, -1.0, 0.5, 0.0], prompt=[0, 1], output=[1, 2, 1], **penalties)
        assert_distribution(draws, _softmax([1 / 1.3, -1.3 - 0.8 - 0.6, 0.5 / 1.3 - 0.4 - 0.6, 0.0]))
        greedy: dict[str, Any] = {"temperature": 0.0, "prompt": [0]}
        assert set(self._draws([1.0, 0.9], repetition_penalty=1.3, **greedy)) == {1}
        assert set(self._draws([1.0, 0.9], frequency_penalty=1.0, presence_penalty=1.0, **greedy)) == {0}

    # ------------------------------------------------------------------------------------------- independence

    def _mixed_desk(self, order: Sequence[int]) -> _Harness:
        """Return a harness where sequence i has row ``order[i]``, a history and parameters of its own."""
        choices: list[dict[str, Any]] = [
            {},
            {"temperature": 0.0},
            {"temperature": 0.5, "top_k": 7},
            {"top_p": 0.8, "frequency_penalty": 2.0},
            {"min_p": 0.05, "bad_token_ids": (0, 1, 2)},
            {"temperature": 1.7, "repetition_penalty": 1.9, "min_tokens": 6},
            {"temperature": 0.0, "logit_bias": {5: 4.0}, "presence_penalty": 2.0},
            {"top_k": 4, "top_p": 0.9, "temperature": 3.0, "allowed_token_ids": tuple(range(9, 30))},
        ]
        harness = _Harness(self, vocab_size=40)
        rng = np.random.default_rng(1)
        for number, row in enumerate(order):
            history = rng.integers(0, 40, 12).tolist()
            harness.start(row, history[:4], history[4:], seed=1000 + number, **choices[number % len(choices)])
        return harness

    def test_a_token_depends_on_nothing_else_in_the_batch(self) -> None:
        """The same from any row, in any order, alone or among others."""
        logits = np.random.default_rng(2).normal(0, 2, (24, 40)).astype(np.float32)
        rows = list(range(24))
        expected = self._mixed_desk(rows).tokens(logits, rows, [11] * 24)
        rng = np.random.default_rng(3)
        for _ in range(3):
            moved, order = rng.permutation(_NUM_ROWS)[:24], rng.permutation(24)
            tokens = self._mixed_desk(moved.tolist()).tokens(logits[order], moved[order].tolist(), [11] * 24)
            assert tokens == [expected[i] for i in order]
        harness = self._mixed_desk(rows)
        assert [harness.one(logits[i], i, 11) for i in rows] == expected

    def test_the_seed_and_the_position_decide_the_draw(self) -> None:
        """Equal for equal ones, whatever was drawn in between; different for others."""
        self._needs("temperature")
        harness = _Harness(self, vocab_size=40)
        for row, seed in enumerate((7, 8, 7 + 2**32)):
            harness.start(row, seed=seed)
        flat, places = np.zeros((64, 40)), range(64)
        first, other, high = (harness.tokens(flat, [row] * 64, places) for row in range(3))
        assert harness.tokens(flat, [0] * 64, places) == first
        assert sum(a == b for a, b in zip(first, other, strict=True)) < 16
        assert sum(a == b for a, b in zip(first, high, strict=True)) < 16
        assert len(set(first)) > 16

    def test_the_rows_of_drafts_equal_one_token_at_a_time(self) -> None:
        """Each logits row sees the history up to its own position."""
        rows, positions = list(range(64)), [7, 8, 9, 10, 11]
        logits = np.random.default_rng(4).normal(0, 1, (64, 5, 40)).astype(np.float32)
        together = self._mixed_desk(rows).tokens(logits.reshape(-1, 40), np.repeat(rows, 5).tolist(), positions * 64)
        harness = self._mixed_desk(rows)
        apart = [harness.one(logits[row, i], row, position) for row in rows for i, position in enumerate(positions)]
        assert together == apart

    def test_a_sequence_is_the_same_beside_drafts_that_branch(self) -> None:
        """Drafts of this sequence follow each other; the histories of a call in which others branch lie elsewhere, and are fewer."""
        honoured = parameters_in(self.honours or self.make().honours)
        asked = [{}, *({name: value} for name, value in _WITH_HISTORY.items() if parameters_in([name]) <= honoured)]
        for params in asked:
            harness, alone = _Harness(self, vocab_size=40), _Harness(self, vocab_size=40)
            takes = harness.supports_drafts(branching=False, **params)
            if not (takes and harness.supports_drafts(branching=True)):
                continue
            rng = np.random.default_rng(6)
            prompt, drafts = rng.integers(0, 9, 8).tolist(), rng.integers(0, 9, 3).tolist()
            logits = rng.normal(0, 2, (8, 40)).astype(np.float32)
            row, places = 200, [7, 8, 9, 10]
            for one in (harness, alone):
                one.start(row, prompt, seed=5, **params)
                one.start(3, [1, 2, 3], seed=6)
                for offset, token in enumerate(drafts):
                    one.write(row, 8 + offset, token)
            # Of row 3 the drafts 4 and 5 both follow its last token; histories are as wide as they must be.
            histories = np.full((3, 12), 39, np.int32)
            histories[0, :4], histories[1, :4] = (1, 2, 3, 4), (1, 2, 3, 5)
            histories[2, :11] = (*prompt, *drafts)
            found = harness.sampled(
                logits[:7], [3, 3, 3, *[row] * 4], [2, 3, 3, *places], histories=histories, branches=[0, 0, 1, *[2] * 4]
            )
            assert found.token_ids.tolist()[3:] == alone.tokens(logits[3:7], [row] * 4, places), params
            # And what was kept of it is the same.
            assert harness.one(logits[7], row, 11) == alone.one(logits[7], row, 11), params

    def test_a_preempted_sequence_goes_on_as_if_nothing_had_happened(self) -> None:
        """It comes back in another row with its prompt, its output so far and its seed."""
        params: dict[str, Any] = {"seed": 77, "frequency_penalty": 1.0, "repetition_penalty": 1.5, "min_tokens": 9}
        logits = np.random.default_rng(5).normal(0, 1, (12, 40)).astype(np.float32)
        outputs = []
        for preempted_after in (12, 5):
            harness, row, output = _Harness(self, vocab_size=40), 0, list[int]()
            harness.start(row, [1, 2, 3], **params)
            for i in range(12):
                if i == preempted_after:
                    row = 9
                    harness.start(row, [1, 2, 3], output, **params)
                output.append(harness.one(logits[i], row, 2 + i))
                harness.write(row, 3 + i, output[-1])
            outputs.append(output)
        assert outputs[0] == outputs[1]

    def test_a_row_forgets_the_sequence_that_held_it(self) -> None:
        """Every parameter is set, then the row is given to a sequence that asks for nothing."""
        harness, fresh = _Harness(self), _Harness(self)
        logits = np.tile(_LOGITS, (64, 1))
        every: dict[str, Any] = {
            "temperature": 5.0,
            "top_k": 2,
            "top_p": 0.3,
            "min_p": 0.5,
            "repetition_penalty": 2.0,
            "frequency_penalty": 2.0,
            "presence_penalty": 2.0,
            "logit_bias": {0: -9.0},
            "allowed_token_ids": (4, 5),
            "bad_token_ids": (0, 1),
            "min_tokens": 15,
            "logprobs": 2,
        }
        for plain in [dict[str, Any](), dict[str, Any](temperature=0.0)]:
            harness.start(0, seed=1, **every)
            for some in (harness, fresh):
                some.start(0, seed=9, **plain)
                some.start(1, seed=1, **every)  # a neighbour asks for what the row no longer does
            answer = harness.sampled(logits, [0] * 63 + [1], range(64))
            assert answer.token_ids.tolist() == fresh.tokens(logits, [0] * 63 + [1], range(64))
            assert all(entry.index == 63 for entry in answer.logprobs)

    # ----------------------------------------------------------------------------------------------- logprobs

    def test_logprobs_are_those_of_the_raw_logits(self) -> None:
        """Before temperature, masks and bias; rank counts strictly more likely tokens; only for rows that asked."""
        self._needs("logprobs")
        harness = _Harness(self)
        harness.start(0, temperature=0.0, logprobs=3)
        harness.start(1, temperature=0.0)
        harness.start(2, temperature=2.0, bad_token_ids=(0,), logit_bias={4: 3.0}, logprobs=0)
        answer = harness.sampled(np.tile(_LOGITS, (3, 1)), [0, 1, 2], [0, 0, 0])
        expected = np.log(_softmax(_LOGITS))
        greedy, drawn = answer.logprobs
        assert (greedy.index, greedy.rank, greedy.top_token_ids) == (0, 1, (0, 1, 2))
        assert greedy.top_logprobs == pytest.approx(expected[:3], abs=1e-5)
        assert (drawn.index, drawn.top_token_ids, drawn.top_logprobs) == (2, (), ())
        for entry in answer.logprobs:
            assert entry.token_id == answer.token_ids.tolist()[entry.index]
            assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-5)
            assert entry.rank == 1 + int((expected > expected[entry.token_id] + 1e-6).sum())
