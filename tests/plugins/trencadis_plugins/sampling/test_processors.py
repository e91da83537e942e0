"""Each processor of the chain by itself, against its definition or transformers; temperature, top-k, top-p and min-p: ``test_chain.py``."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest
import torch

from trencadis_plugins.sampling import typical_p as module
from trencadis_plugins.sampling.cutoffs import EpsilonCutoff, EtaCutoff
from trencadis_plugins.sampling.dry import MAX_RUN, Dry, repeats
from trencadis_plugins.sampling.logit_bias import LogitBias
from trencadis_plugins.sampling.min_tokens import MinTokens
from trencadis_plugins.sampling.penalties import Penalties
from trencadis_plugins.sampling.philox import Purpose, uniforms
from trencadis_plugins.sampling.temperature import Temperature
from trencadis_plugins.sampling.token_masks import AllowedTokens, BadTokens
from trencadis_plugins.sampling.token_runs import BadWords, NoRepeatNgram
from trencadis_plugins.sampling.top_n_sigma import TopNSigma
from trencadis_plugins.sampling.typical_p import TypicalP
from trencadis_plugins.sampling.xtc import Xtc

OUT = -math.inf
FOUR = [1.0, 2.0, 3.0, 4.0]


def kept(row):
    return np.flatnonzero(np.isfinite(np.asarray(row))).tolist()


def logits_of(seed, num_rows, vocab_size):
    return torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.representatives(100)
@pytest.mark.parametrize(
    ("processor", "params", "expected"),
    [
        (LogitBias(), {"logit_bias": {1: 2.5, 3: -100}}, [1, 4.5, 3, -96]),
        (AllowedTokens(), {"allowed_token_ids": (3, 1, 3)}, [OUT, 2, OUT, 4]),
        (BadTokens(), {"bad_token_ids": (0, 3)}, [OUT, 2, 3, OUT]),
        (Temperature(), {"temperature": 0.5}, [2, 4, 6, 8]),
        (Temperature(), {"temperature": 100.0}, [0.01, 0.02, 0.03, 0.04]),
        (Temperature(), {"temperature": 0.0}, FOUR),
        (EpsilonCutoff(), {"epsilon_cutoff": 0.9}, [OUT, OUT, OUT, 4]),  # the most likely stays whatever is asked for
        (EtaCutoff(), {"eta_cutoff": 0.9}, [OUT, OUT, OUT, 4]),
        (MinTokens(), {"min_tokens": 2, "eos": (9,)}, FOUR),  # an end outside the vocabulary
        (MinTokens(), {"min_tokens": 2, "eos": (9, 0)}, [OUT, 2, 3, 4]),
    ],
)
def test_processor_changes_rows_that_ask_and_no_other(processor, params, expected, process, start):
    changed = process(processor, [FOUR, FOUR], [start(0, **params), start(1)])
    assert torch.allclose(changed, torch.tensor([expected, FOUR], dtype=torch.float32))
    assert torch.equal(changed[1], torch.tensor(FOUR))


# ------------------------------------------------------------------------------------------------------ transformers


def warped(name, arguments, histories, logits):
    from transformers.generation import logits_process

    make = getattr(logits_process, name)
    return torch.cat(
        [
            make(*arguments(row))(torch.tensor([history]), one[None].clone())
            for row, (history, one) in enumerate(zip(histories, logits, strict=True))
        ]
    )


WORDS = ((1,), (2, 3), (0, 1, 2), (4, 4, 4, 5), (3, 0), (5, 3), (2,))
AS_IN_TRANSFORMERS = {
    **{
        f"runs of {size}": (
            NoRepeatNgram(),
            {"no_repeat_ngram_size": size},
            "NoRepeatNGramLogitsProcessor",
            lambda row, size=size: (size,),
        )
        for size in (1, 2, 3, 5)
    },
    "bad words": (
        BadWords(),
        {"bad_words_ids": WORDS},
        "NoBadWordsLogitsProcessor",
        lambda row: ([list(word) for word in WORDS], [7]),
    ),
    **{
        f"repetition {penalty}": (
            Penalties(),
            {"repetition_penalty": penalty},
            "RepetitionPenaltyLogitsProcessor",
            lambda row, penalty=penalty: (penalty,),
        )
        for penalty in (0.5, 1.3, 2.0)
    },
    "ends": (
        MinTokens(),
        {"min_tokens": 4, "eos": (2, 6)},
        "MinNewTokensLengthLogitsProcessor",
        lambda row: (1 + row % 5, 4, [2, 6]),
    ),
}


@pytest.mark.representatives(100)
@pytest.mark.parametrize("name", AS_IN_TRANSFORMERS)
def test_logits_equal_those_of_transformers(name, process, start):
    processor, params, theirs, arguments = AS_IN_TRANSFORMERS[name]
    rng, logits = np.random.default_rng(9), logits_of(0, 250, 8)
    prompts = [rng.integers(0, 6, 1 + row % 5).tolist() for row in range(250)]
    outputs = [rng.integers(0, 6, rng.integers(0, 40)).tolist() for _ in range(250)]
    rows = zip(prompts, outputs, strict=True)
    starts = [start(row, prompt, output, **params) for row, (prompt, output) in enumerate(rows)]
    histories = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    assert torch.allclose(process(processor, logits, starts), warped(theirs, arguments, histories, logits), rtol=1e-6)


def near_epsilon(logits, cutoff):
    return (logits.softmax(-1) - cutoff).abs() < 1e-12


def near_eta(logits, cutoff):
    distribution = logits.softmax(-1)
    eta = torch.special.entr(distribution).sum(-1, keepdim=True).neg().exp().mul(cutoff**0.5).clamp(max=cutoff)
    return (distribution / eta - 1).abs() < 1e-6  # transformers holds epsilon as float32


def near_typical(logits, mass):
    """Where a mass, or a tie in distance that rounding makes, decides what stays."""
    distribution = logits.log_softmax(-1)
    values, order = (distribution + torch.special.entr(distribution.exp()).sum(-1, keepdim=True)).abs().sort()
    cumulative = distribution.exp().gather(1, order).cumsum(-1)
    gaps = values.diff(append=values[:, -1:] + 1).nan_to_num(nan=1.0)
    return ((cumulative - mass).abs() < 1e-9) | ((gaps > 0) & (gaps < 1e-12))


CUTS = {
    "epsilon_cutoff": (EpsilonCutoff, "EpsilonLogitsWarper", near_epsilon, [1e-4, 3e-3, 0.05, 0.4, 0.99]),
    "eta_cutoff": (EtaCutoff, "EtaLogitsWarper", near_eta, [1e-4, 3e-3, 0.05, 0.4, 0.99]),
    "typical_p": (TypicalP, "TypicalLogitsWarper", near_typical, [0.05, 0.2, 0.5, 0.9, 0.99]),
}


@pytest.mark.representatives(9)
@pytest.mark.parametrize("vocab_size", [8, 100, 2000])
@pytest.mark.parametrize("name", CUTS)
def test_cuts_keep_what_transformers_keeps(
    name, vocab_size, process, start, random_rows, assert_same_distribution, monkeypatch
):
    monkeypatch.setattr(module, "_WIDTHS", (16, 512))
    make, theirs, is_near, values = CUTS[name]
    for value in values:
        logits = torch.from_numpy(random_rows(np.random.default_rng(vocab_size + 1), vocab_size, 140))
        changed = process(make(), logits, [start(row, **{name: value}) for row in range(140)])
        expected = warped(theirs, lambda row, value=value: (value,), [[0]] * 140, logits.double())
        assert_same_distribution(changed, expected, is_near(logits.double(), value).any(-1))


def test_the_most_likely_token_is_dropped_if_it_surprises_too_little_and_greedy_rows_do_not_ask(process, start):
    logits = np.log([0.4, 0.15, 0.15, 0.15, 0.15]).tolist()
    assert kept(process(TypicalP(), [logits], [start(0, typical_p=0.3)])[0]) == [1, 2, 3, 4]
    assert not TypicalP().applies_to(start(0, typical_p=0.3, temperature=0))


@pytest.mark.parametrize("num_sigmas", [0.01, 0.5, 1.0, 2.5, 100.0])
def test_top_n_sigma_keeps_what_the_definition_keeps_whatever_the_temperature(num_sigmas, process, start, random_rows):
    logits = random_rows(np.random.default_rng(4), 300, 100)
    starts = [start(row, top_n_sigma=num_sigmas, temperature=0.3 + row / 50) for row in range(100)]
    changed = process(TopNSigma(), logits, starts).numpy()
    for row, result in zip(logits.astype(np.float64), changed, strict=True):
        known = row[np.isfinite(row)]
        expected = row >= known.max() - num_sigmas * known.std()
        assert np.array_equal(np.isfinite(result), expected & np.isfinite(row))


# ------------------------------------------------------------------------------------------------ histories of tokens


def test_min_tokens_judges_rows_of_one_sequence_by_their_own_positions(process, start, context_of):
    processor, row = MinTokens(), start(0, prompt=[5, 5], min_tokens=2, eos=(0,))
    process(processor, [[1, 2]], [row])
    context = attrs.evolve(context_of([row]), rows=(0, 0, 0), positions=(1, 2, 3))
    assert processor.apply(torch.zeros((3, 2)), context)[:, 0].tolist() == [OUT, OUT, 0]


def test_first_token_of_another_engine_completes_no_bad_word_and_repeats_no_n_gram(start):
    """The prompt may have begun what is ruled out."""
    words = start(0, [7, 5, 6], bad_words_ids=((5, 6, 9), (1, 2, 3, 4, 8), (4,)))
    assert [token for token in range(10) if not BadWords().can_start_with(words, token)] == [4, 9]
    grams = start(0, [1, 2, 3, 1, 2], no_repeat_ngram_size=3)
    assert [token for token in range(10) if not NoRepeatNgram().can_start_with(grams, token)] == [3]


def penalised(logits, prompt, output, params):
    result = logits.astype(np.float64)
    for token in range(len(result)):
        if token in (*prompt, *output):
            r = params["repetition_penalty"]
            result[token] = result[token] / r if result[token] > 0 else result[token] * r
        count = output.count(token)
        result[token] -= params["frequency_penalty"] * count + params["presence_penalty"] * (count > 0)
    return result


def test_penalties_of_random_histories_equal_the_definition(process, start):
    rng = np.random.default_rng(0)
    for _ in range(60):
        num_rows, vocab_size = int(rng.integers(1, 5)), int(rng.integers(1, 30))
        logits = rng.normal(0, 3, (num_rows, vocab_size)).astype(np.float32)
        logits[rng.random(logits.shape) < 0.1] = -np.inf
        starts, expected = [], []
        for row in range(num_rows):
            prompt, output = (rng.integers(0, vocab_size, rng.integers(low, 20)).tolist() for low in (1, 0))
            bounds = {"repetition_penalty": (0.5, 2), "frequency_penalty": (-2, 2), "presence_penalty": (-2, 2)}
            params = {name: float(rng.uniform(*between)) for name, between in bounds.items()}
            starts.append(start(row, prompt, output, **params))
            expected.append(penalised(logits[row], prompt, output, params))
        processed = process(Penalties(), logits, starts).numpy()
        np.testing.assert_allclose(processed, np.array(expected), atol=2e-5)


def test_rows_of_drafts_are_penalised_as_one_token_at_a_time(process, start, context_of):
    params = {"repetition_penalty": 1.7, "frequency_penalty": 0.3, "presence_penalty": 0.2}
    tokens, logits, processor = [3, 1, 4, 1, 5, 1, 2], logits_of(0, 4, 6), Penalties()
    whole = start(0, tokens[:2], tokens[2:], **params)
    process(processor, logits[:1], [whole])
    context = attrs.evolve(context_of([whole]), rows=(0,) * 4, positions=(3, 4, 5, 6))
    together = processor.apply(logits.clone(), context)
    for i, position in enumerate(context.positions):
        apart = process(Penalties(), logits[i : i + 1], [start(0, tokens[:2], tokens[2 : position + 1], **params)])
        assert torch.equal(together[i], apart[0])


def longest_runs(history, breakers):
    """From the definition of DRY, one token and one length at a time."""
    found = {}
    for token in set(history) - set(breakers):
        for place in range(1, len(history)):
            if history[place] != token:
                continue
            run = 0
            while run < place and history[place - 1 - run] == history[-1 - run] and history[-1 - run] not in breakers:
                run += 1
            found[token] = max(found.get(token, 0), run)
    return {token: run for token, run in found.items() if run}


@pytest.mark.parametrize("breakers", [(), (2,), (0, 3)])
def test_runs_equal_the_definition(breakers):
    rng = np.random.default_rng(6)
    for _ in range(250):
        history = rng.integers(0, 4, rng.integers(1, 30))
        tokens, runs = repeats(history.astype(np.int32), breakers)
        assert dict(zip(tokens.tolist(), runs.tolist(), strict=True)) == longest_runs(history.tolist(), breakers)


@pytest.mark.representatives(100)
@pytest.mark.parametrize(
    ("history", "params", "expected"),
    [
        ([5, 1, 2, 3, 4, 5, 0, 2, 3], {}, {4: -0.8}),
        # the penalty grows with the run beyond the allowed length
        ([1, 2, 3, 4, 5, 0, 1, 2, 3, 4], {}, {5: -0.8 * 1.5**2}),
        ([1, 2, 3, 4, 5, 0, 1, 2, 3, 4], {"dry_allowed_length": 5}, {}),
        # only the last tokens are looked at
        ([1, 2, 0, 0, 3, 1], {"dry_allowed_length": 1, "dry_range": 5}, {}),
        ([1, 2, 0, 0, 3, 1], {"dry_allowed_length": 1, "dry_range": 6}, {2: -0.8}),
        ([1, 2, 0, 0, 3, 1], {"dry_allowed_length": 1}, {2: -0.8}),
    ],
)
def test_dry_penalises_what_would_go_on_with_a_run(history, params, expected, process, start):
    params = {"dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 2, **params}
    changed = process(Dry(), [[0.0] * 6], [start(0, history[:2], history[2:], **params)])
    assert changed[0].tolist() == pytest.approx([expected.get(token, 0.0) for token in range(6)])


def test_a_history_of_one_token_has_a_longest_run_and_a_finite_penalty(process, start):
    tokens, runs = repeats(np.zeros(4 * MAX_RUN, np.int32), ())
    assert (tokens.tolist(), runs.tolist()) == ([0], [MAX_RUN])
    changed = process(Dry(), [[1.0, 0.0]], [start(0, [0] * 60, dry_multiplier=100.0, dry_base=100.0)])
    assert torch.isfinite(changed).all()
    assert changed[0, 0] < -1e29


# ------------------------------------------------------------------------------------------------------------- xtc

LIKELY = np.log([0.4, 0.05, 0.3, 0.15, 0.1]).tolist()


@pytest.mark.representatives(100)
@pytest.mark.parametrize(
    ("logits", "threshold", "expected"),
    [
        (LIKELY, 0.09, [1, 4]),
        (LIKELY, 0.2, [1, 2, 3, 4]),
        (LIKELY, 0.35, [0, 1, 2, 3, 4]),
        (LIKELY, 0.01, [1]),
        ([1.0, 1.0, 1.0, -9.0], 0.1, [2, 3]),  # of equal ones the highest id
    ],
)
def test_all_but_the_least_likely_of_the_likely_ones_are_dropped(logits, threshold, expected, process, start):
    changed = process(Xtc(), [logits], [start(0, xtc_probability=1.0, xtc_threshold=threshold)])
    assert kept(changed[0]) == expected


def test_xtc_happens_as_often_as_asked_and_when_the_seed_and_position_say(process, start):
    starts = [start(row, [0], [0] * (row % 7), row_seed=row, xtc_probability=0.3) for row in range(600)]
    happened = [not np.isfinite(row[0]) for row in process(Xtc(), [LIKELY] * 600, starts).tolist()]
    keys = torch.tensor([[row, 0] for row in range(600)])
    positions = torch.tensor([1 + row % 7 for row in range(600)])
    numbers, drawn = (
        uniforms(keys, positions, purpose=one, count=1)[:, 0] for one in (Purpose.EXCLUDE, Purpose.SAMPLE)
    )
    assert happened == (numbers < 0.3).tolist() != (drawn < 0.3).tolist()
    assert 140 < sum(happened) < 220


def test_rows_that_cannot_lose_a_token_to_xtc_do_not_ask(start):
    for params in ({"xtc_threshold": 0.51}, {"temperature": 0}, {"xtc_probability": 0.0}):
        assert not Xtc().applies_to(start(0, **{"xtc_probability": 1.0, **params}))
