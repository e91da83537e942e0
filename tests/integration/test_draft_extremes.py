"""Drafters that are always right, never right, and anything between: how many steps, and ever the same text."""

from __future__ import annotations

import random

import pytest

from trencadis.records import Request, SamplingParams
from trencadis_testing.doubles import ScriptedSpeculator
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

PROMPT = (5, 6, 7, 8, 9)
NUM_TOKENS = 41


def true_drafts(k):
    return lambda tokens: fake_text(tokens.tolist(), k, eos=-1)


def false_drafts(k):
    return lambda tokens: [(token + 1) % 97 for token in fake_text(tokens.tolist(), k, eos=-1)]


def guessed_drafts(k):
    """Right so far and then wrong, a random number of them, none at times."""

    def draft(tokens):
        rng = random.Random(len(tokens))
        right = rng.randrange(k + 1)
        return [*fake_text(tokens.tolist(), right, eos=-1), *(rng.randrange(97) for _ in range(k - right))]

    return draft


DRAFTERS = {"oracle": true_drafts, "anti-oracle": false_drafts, "guesses": guessed_drafts}


def run(drafter, k, *, num_sequences=1, layout="ragged", **options):
    """Return the texts, and the decode steps that they took."""
    engine = make_engine(
        backend=FakeBackend(eos=-1, layout=layout),
        speculator=ScriptedSpeculator(DRAFTERS[drafter](k), max_draft_tokens=k),
        num_blocks=128,
        **options,
    )
    params = SamplingParams(max_tokens=NUM_TOKENS)
    for i in range(num_sequences):
        engine.add(Request(request_id=str(i), prompt_token_ids=(*PROMPT, i), params=params))
    ends = drain(engine)
    num_steps, num_accepted = engine.totals.num_steps, engine.totals.num_accepted_tokens
    engine.close()
    assert not [end.error for end in ends.values() if end.error]
    return [ends[str(i)].token_ids.tolist() for i in range(num_sequences)], num_steps - 1, num_accepted


@pytest.mark.parametrize("k", [1, 2, 3, 7, 16, 39])
def test_an_oracle_takes_one_step_for_each_k_and_one_tokens(k):
    """The prefill yields the first token; a decode yields its drafts and one more."""
    texts, num_steps, num_accepted = run("oracle", k)
    assert texts == [fake_text([*PROMPT, 0], NUM_TOKENS, eos=-1)]
    assert num_steps == -(-(NUM_TOKENS - 1) // (k + 1))
    assert num_accepted == NUM_TOKENS - 1 - num_steps


@pytest.mark.parametrize("k", [1, 3, 16])
def test_an_anti_oracle_takes_exactly_one_step_for_each_token(k):
    texts, num_steps, num_accepted = run("anti-oracle", k)
    assert texts == [fake_text([*PROMPT, 0], NUM_TOKENS, eos=-1)]
    assert (num_steps, num_accepted) == (NUM_TOKENS - 1, 0)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("layout", ["ragged", "padded", "unified"])
@pytest.mark.parametrize("budget", [8, 64])
def test_text_is_the_model_s_whoever_drafts(drafter, k, layout, budget):
    """Chunked prefills beside decodes with drafts, in every batch layout."""
    texts, _, _ = run(drafter, k, num_sequences=3, layout=layout, max_num_batched_tokens=budget, max_num_seqs=4)
    assert texts == [fake_text([*PROMPT, i], NUM_TOKENS, eos=-1) for i in range(3)]
