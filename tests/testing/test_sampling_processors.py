"""The suite passes the built-in processors and notices broken ones: each is a built-in one with one planted fault."""

from __future__ import annotations

from functools import cache

import attrs
import numpy as np
import pytest
import torch

from trencadis.interfaces import Vocabulary
from trencadis_plugins.sampling.chain import build_chain
from trencadis_plugins.sampling.dry import Dry
from trencadis_plugins.sampling.logit_bias import LogitBias
from trencadis_plugins.sampling.min_p import MinP
from trencadis_plugins.sampling.mirostat import Mirostat
from trencadis_plugins.sampling.temperature import Temperature
from trencadis_plugins.sampling.token_runs import NoRepeatNgram
from trencadis_plugins.sampling.top_k import TopK
from trencadis_plugins.sampling.typical_p import TypicalP
from trencadis_plugins.sampling.xtc import Xtc
from trencadis_testing.sampling_processors import LogitsProcessorConformance

ASKING = {
    "structured": [
        {"structured": {"kind": "regex", "text": "[a-z]*"}},
        {"structured": {"kind": "regex", "text": "([a-c]|[d-z]{1,3})*"}},
    ],
    "allowed_tokens": [{"allowed_token_ids": (1, 2, 9)}, {"allowed_token_ids": tuple(range(30))}],
    "bad_tokens": [{"bad_token_ids": (1, 2)}],
    "bad_words": [
        {"bad_words_ids": ((1,), (2, 3), (4, 0, 1))},
        {"bad_words_ids": ((0, 0), (1, 0), (2, 0), (3, 0), (4, 0))},
    ],
    "no_repeat_ngram": [{"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 2}],
    "min_tokens": [{"min_tokens": 16}, {"min_tokens": 12}],
    "logit_bias": [{"logit_bias": {3: 2.0, 4: -9.0}}],
    "penalties": [{"repetition_penalty": 1.4}, {"frequency_penalty": 0.5, "presence_penalty": -0.5}],
    "dry": [{"dry_multiplier": 0.8, "dry_allowed_length": 1}, {"dry_multiplier": 2.0, "dry_breaker_token_ids": (1,)}],
    "temperature": [{"temperature": 0.7}, {"temperature": 1.9}],
    "top_n_sigma": [{"top_n_sigma": 1.0}, {"top_n_sigma": 0.5}],
    "min_p": [{"min_p": 0.1}, {"min_p": 1.0}],
    "top_k": [{"top_k": 3}, {"top_k": 7}],
    "top_p": [{"top_p": 0.5}, {"top_p": 0.9}],
    "typical_p": [{"typical_p": 0.5}, {"typical_p": 0.2}],
    "epsilon_cutoff": [{"epsilon_cutoff": 0.05}],
    "eta_cutoff": [{"eta_cutoff": 0.05}, {"eta_cutoff": 0.9}],
    "xtc": [{"xtc_probability": 1.0}, {"xtc_probability": 0.5, "xtc_threshold": 0.05}],
    "mirostat": [
        {"mirostat_mode": 2, "mirostat_tau": 2.5, "mirostat_eta": 1.0},
        {"mirostat_mode": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.5},
    ],
}


@cache
def _letters():
    """Tokens of one letter or sign each, and one that ends."""
    tokens = tuple(bytes([97 + i if i < 26 else 22 + i]) for i in range(40))
    return Vocabulary(
        tokens=tokens,
        special_token_ids=frozenset({3}),
        eos_token_id=3,
        encode=lambda text: tuple(map(tokens.index, (bytes([one]) for one in text.encode()))),
    )


TESTS = sorted(name for name in vars(LogitsProcessorConformance) if name.startswith("test_"))


class _Suite(LogitsProcessorConformance):
    def __init__(self, name, mutant=None):
        self.asking, self._name, self._mutant = ASKING[name], name, mutant

    def make(self):
        return (
            build_chain("vllm", chain=[self._name], vocabulary=_letters)[0] if self._mutant is None else self._mutant()
        )

    def tensor(self, array):
        return torch.from_numpy(array)


@pytest.mark.parametrize("name", ASKING)
def test_every_built_in_processor_passes(name):
    num_passed = 0
    for test in TESTS:
        try:
            getattr(_Suite(name), test)()
        except pytest.skip.Exception:
            continue
        num_passed += 1
    assert num_passed >= len(TESTS) - 5


class _ReadsTheNeighbour(MinP):
    def _change(self, logits, context):
        return logits.masked_fill_(logits < logits.amax() - 1, -torch.inf)


class _ChangesEveryRow(LogitBias):
    def apply(self, logits, context):
        return super().apply(logits, context) + 1e-6


class _KeepsTheBias(LogitBias):
    def start_row(self, start):
        if self.applies_to(start):
            super().start_row(start)


class _DropsTheMaximum(TopK):
    def _change(self, logits, context):
        logits.scatter_(1, logits.argmax(-1, keepdim=True), -torch.inf)
        return logits


class _SaysItIsInvariant(TypicalP):
    argmax_invariant = True


class _SaysItNeedsNoHistory(Dry):
    needs_history = False


class _RaisesMaskedTokens(MinP):
    def _change(self, logits, context):
        return logits.nan_to_num(neginf=-3.0)


class _ReturnsNan(Temperature):
    def _change(self, logits, context):
        return logits - logits.amin(-1, keepdim=True)


class _Stream(Xtc):
    """Draws from a generator that moves on."""

    def _change(self, logits, context):
        self._keys = self._keys + 1
        return super()._change(logits, context)


class _ReadsAhead(NoRepeatNgram):
    def _change(self, logits, context):
        for row_logits, row in zip(logits, context.rows, strict=True):
            row_logits[context.tokens[row, :40].long()] = -torch.inf
        return logits


class _LastHistoryForAll(Dry):
    """All rows of a sequence see the history of its first."""

    def _change(self, logits, context):
        first = dict(zip(context.rows[::-1], context.positions[::-1], strict=True))
        positions = tuple(first[row] for row in context.rows)
        return super()._change(logits, type(context)(rows=context.rows, positions=positions, tokens=context.tokens))


class _ReadsDraftsByRow(Dry):
    """Drafts that branch are read as if they followed each other."""

    def _change(self, logits, context):
        return super()._change(logits, attrs.evolve(context, branches=None))


class _OneMuForAll(Mirostat):
    """The state is not kept by position: a refused draft stays in it."""

    def _current(self, context):
        slots = np.argmax(self._held[list(context.rows)], 1)
        rows = list(context.rows)
        return np.where(self._held[rows].max(1) >= 0, self._mu[rows, slots], 2 * self._tau[rows])


class _IgnoresWhatWasChosen(Mirostat):
    def commit(self, token_ids, context):
        del self._last


class _SharesItsSnapshot(Mirostat):
    def snapshot(self, row):
        return self._held[row], self._mu[row]


class _ForgetsOnRestore(Mirostat):
    def restore(self, row, state):
        """Do nothing."""


class _AsksForNothing(MinP):
    def applies_to(self, start):
        return False


_TESTS_THAT_NOTICE = {
    _ReadsTheNeighbour: ("min_p", "a_row_depends_on_nothing_else_in_the_batch"),
    _ChangesEveryRow: ("logit_bias", "rows_that_do_not_ask_stay_bit_equal"),
    _KeepsTheBias: ("logit_bias", "a_row_forgets_the_sequence_that_held_it"),
    _DropsTheMaximum: ("top_k", "an_argmax_invariant_processor_leaves_the_maximum_where_it_is"),
    _SaysItIsInvariant: ("typical_p", "an_argmax_invariant_processor_leaves_the_maximum_where_it_is"),
    _SaysItNeedsNoHistory: ("dry", "a_processor_that_needs_no_history_does_not_depend_on_it"),
    _RaisesMaskedTokens: ("min_p", "what_it_returns_are_logits"),
    _ReturnsNan: ("temperature", "what_it_returns_are_logits"),
    _Stream: ("xtc", "the_same_call_gives_the_same_logits"),
    _ReadsAhead: ("no_repeat_ngram", "tokens_behind_a_rows_position_do_not_matter"),
    _LastHistoryForAll: ("dry", "the_rows_of_drafts_equal_one_token_at_a_time"),
    _ReadsDraftsByRow: ("dry", "drafts_that_branch_are_read_by_their_histories"),
    _OneMuForAll: ("mirostat", "the_rows_of_drafts_equal_one_token_at_a_time"),
    _IgnoresWhatWasChosen: ("mirostat", "the_rows_of_drafts_equal_one_token_at_a_time"),
    _SharesItsSnapshot: ("mirostat", "a_state_goes_on_in_another_row_from_a_snapshot"),
    _ForgetsOnRestore: ("mirostat", "a_state_goes_on_in_another_row_from_a_snapshot"),
    _AsksForNothing: ("min_p", "its_requests_ask_for_it_and_are_changed"),
}


@pytest.mark.parametrize(
    "mutant", _TESTS_THAT_NOTICE, ids=[mutant.__name__.strip("_") for mutant in _TESTS_THAT_NOTICE]
)
def test_a_planted_fault_is_noticed(mutant):
    name, test = _TESTS_THAT_NOTICE[mutant]
    with pytest.raises(AssertionError):
        getattr(_Suite(name, mutant), f"test_{test}")()
