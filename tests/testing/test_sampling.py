"""The suite notices broken samplers: each is the standard one with one planted fault."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
import pytest
import torch

from trencadis_plugins.sampling.chain import standard_chain
from trencadis_plugins.sampling.drawing import draw
from trencadis_plugins.sampling.logit_bias import LogitBias
from trencadis_plugins.sampling.min_p import MinP
from trencadis_plugins.sampling.min_tokens import MinTokens
from trencadis_plugins.sampling.penalties import Penalties
from trencadis_plugins.sampling.standard import StandardSampler
from trencadis_plugins.sampling.temperature import Temperature
from trencadis_plugins.sampling.token_masks import BadTokens
from trencadis_plugins.sampling.top_k import TopK
from trencadis_plugins.sampling.top_p import TopP
from trencadis_testing.sampling import SamplingConformance, assert_distribution


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def _with(replacement):
    """A standard sampler whose processor of the replacement's base class is replaced."""
    chain = standard_chain("vllm")
    return StandardSampler([replacement() if isinstance(p, replacement.__mro__[1]) else p for p in chain])


class _LastOfEqualTokens(StandardSampler):
    def sample(self, logits, context):
        if self._is_greedy[list(context.rows)].all():
            sampled = super().sample(logits.clone(), context)
            last = logits.shape[1] - 1 - logits.flip(-1).argmax(-1)
            return attrs.evolve(sampled, token_ids=last)
        answer = super().sample(logits.clone(), context)
        greedy = torch.from_numpy(self._is_greedy[list(context.rows)])
        last = logits.shape[1] - 1 - logits.flip(-1).argmax(-1)
        return attrs.evolve(answer, token_ids=torch.where(greedy, last, answer.token_ids))


class _NoiseByPlaceInTheBatch(StandardSampler):
    def sample(self, logits, context):
        keys = self._keys.copy()
        self._keys[list(context.rows), 0] += np.arange(len(context.rows)) * 7
        answer = super().sample(logits, context)
        self._keys = keys
        return answer


class _NoiseFromOneStream(StandardSampler):
    """Like a generator that moves on with every call."""

    num_calls = 0

    def sample(self, logits, context):
        self.num_calls += 1
        self._keys += self.num_calls
        answer = super().sample(logits, context)
        self._keys -= self.num_calls
        return answer


class _NoiseWithoutPosition(StandardSampler):
    def _draw(self, logits, context):
        return super()._draw(logits, attrs.evolve(context, positions=(0,) * len(context.positions)))


class _HalfOfTheSeed(StandardSampler):
    def start_row(self, start):
        super().start_row(attrs.evolve(start, seed=start.seed % 2**32))


class _NanIsTokenZero(StandardSampler):
    def sample(self, logits, context):
        return super().sample(logits.nan_to_num(0.0), context)


class _NoTokenIsTokenZero(StandardSampler):
    def sample(self, logits, context):
        logits[(logits == -torch.inf).all(-1), 0] = 0.0
        return super().sample(logits, context)


class _LogprobsAfterTheChain(StandardSampler):
    def sample(self, logits, context):
        for processor in self._chain:
            logits = processor.apply(logits, context)
        return super().sample(logits, context)


class _GreedyRowsRuleTheBatch(StandardSampler):
    """One greedy row makes its neighbours greedy."""

    def _choose(self, logits, context, rows):
        if self._is_greedy[rows].any():
            return self._maximize(logits, context)
        return super()._choose(logits, context, rows)


class _SharpDraw(StandardSampler):
    """The race is run with squared weights."""

    def _draw(self, logits, context):
        for processor in self._chain:
            logits = processor.apply(logits, context)
        return draw(logits * 2, logits.amax(-1) * 2, self._times(logits, context))


class _RepetitionIgnoresThePrompt(Penalties):
    def _history(self, context, length):
        tokens, _, is_output = super()._history(context, length)
        return tokens, is_output, is_output


class _FrequencyCountsThePrompt(Penalties):
    def _history(self, context, length):
        tokens, is_known, _ = super()._history(context, length)
        return tokens, is_known, is_known


class _HistoryUpToTheLastPosition(Penalties):
    """All rows of a sequence see the tokens of its last one."""

    def _history(self, context, length):
        last = dict(zip(context.rows, context.positions, strict=True))
        positions = tuple(max(p, last[row]) for row, p in zip(context.rows, context.positions, strict=True))
        return super()._history(attrs.evolve(context, positions=positions), length)


class _DropsOneAtTheBoundaryTooFew(TopP):
    def _take(self, start):
        super()._take(start)
        self._p[start.row] += 1e-9


class _TiesBeyondKAreDropped(TopK):
    def _change(self, logits, context):
        return super()._change(logits - torch.arange(logits.shape[1]) * 1e-6, context)


class _MinPOfAllMass(MinP):
    """A share of one instead of a share of the largest probability."""

    def _change(self, logits, context):
        return logits.masked_fill_(logits.softmax(-1) < self._column(np.exp(self._log_share), context), -torch.inf)


class _StaleBan(BadTokens):
    def start_row(self, start):
        if self.applies_to(start):
            super().start_row(start)


class _StaleBias(LogitBias):
    def start_row(self, start):
        if self.applies_to(start):
            super().start_row(start)


class _NeighboursTemperature(Temperature):
    def _change(self, logits, context):
        return logits.div_(float(self._temperature[list(context.rows)].max()))


class _OneTokenTooFew(MinTokens):
    def _take(self, start):
        super()._take(start)
        self._first_free_position[start.row] -= 1


class _SoftBan(BadTokens):
    def _change(self, logits, context):
        for row_logits, row in zip(logits, context.rows, strict=True):
            row_logits[self._ids[row]] -= 2.0
        return logits


_TESTS_THAT_NOTICE = {
    _LastOfEqualTokens: "greedy_takes_the_largest_logit_and_the_lowest_id_among_equals",
    _NoiseByPlaceInTheBatch: "a_token_depends_on_nothing_else_in_the_batch",
    _NoiseFromOneStream: "the_seed_and_the_position_decide_the_draw",
    _NoiseWithoutPosition: "draws_of_one_seed_at_many_positions_follow_the_distribution_and_do_not_depend_on_each_other",
    _HalfOfTheSeed: "the_seed_and_the_position_decide_the_draw",
    _NanIsTokenZero: "logits_that_are_not_numbers_are_refused_in_words_that_name_the_row",
    _NoTokenIsTokenZero: "a_row_without_any_possible_token_is_refused",
    _LogprobsAfterTheChain: "logprobs_are_those_of_the_raw_logits",
    _GreedyRowsRuleTheBatch: "a_token_depends_on_nothing_else_in_the_batch",
    _SharpDraw: "draws_follow_the_softmax_of_the_logits_over_the_temperature",
    _RepetitionIgnoresThePrompt: "penalties_count_prompt_and_output_as_documented",
    _FrequencyCountsThePrompt: "penalties_count_prompt_and_output_as_documented",
    _HistoryUpToTheLastPosition: "the_rows_of_drafts_equal_one_token_at_a_time",
    _DropsOneAtTheBoundaryTooFew: "top_p_keeps_the_smallest_set_that_reaches_p",
    _TiesBeyondKAreDropped: "top_k_keeps_the_k_most_likely_and_all_that_tie_with_the_last",
    _MinPOfAllMass: "min_p_drops_what_is_far_less_likely_than_the_most_likely",
    _StaleBan: "a_row_forgets_the_sequence_that_held_it",
    _StaleBias: "a_row_forgets_the_sequence_that_held_it",
    _NeighboursTemperature: "a_token_depends_on_nothing_else_in_the_batch",
    _OneTokenTooFew: "a_sequence_does_not_end_before_min_tokens",
    _SoftBan: "masked_tokens_are_never_chosen",
}


class _Suite(SamplingConformance):
    def __init__(self, mutant):
        self._mutant = mutant

    def make(self):
        if issubclass(self._mutant, StandardSampler):
            return self._mutant(standard_chain("vllm"))
        return _with(self._mutant)

    def tensor(self, array):
        return torch.from_numpy(array)


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("mutant", "test"), _TESTS_THAT_NOTICE.items(), ids=[mutant.__name__.strip("_") for mutant in _TESTS_THAT_NOTICE]
)
def test_a_planted_fault_is_noticed(mutant, test):
    with pytest.raises(AssertionError):
        getattr(_Suite(mutant), f"test_{test}")()


@pytest.mark.slow
def test_every_test_of_the_suite_is_passed_by_the_faultless_sampler():
    suite = _Suite(StandardSampler)
    for test in sorted(set(_TESTS_THAT_NOTICE.values())):
        getattr(suite, f"test_{test}")()


def test_an_incorrect_distribution_and_an_impossible_token_are_told_from_a_correct_distribution():
    tokens = np.random.default_rng(0).choice(4, 2048, p=[0.4, 0.3, 0.2, 0.1]).tolist()
    assert_distribution(tokens, np.array([0.4, 0.3, 0.2, 0.1]))
    with pytest.raises(AssertionError, match="chi-square"):
        assert_distribution(tokens, np.array([0.3, 0.4, 0.2, 0.1]))
    with pytest.raises(AssertionError, match="impossible tokens were drawn"):
        assert_distribution(tokens, np.array([0.5, 0.3, 0.2, 0.0]))


def test_the_suite_skips_what_a_sampler_says_it_does_not_honour():
    suite = _Suite(StandardSampler)
    suite.honours = frozenset({"temperature"})
    with pytest.raises(pytest.skip.Exception, match="that it honours penalties"):
        suite.test_penalties_count_prompt_and_output_as_documented()
