from __future__ import annotations

import numpy as np
import pytest
import torch

from trencadis.clock import SimulatedClock
from trencadis.errors import InvalidRequestError
from trencadis.interfaces import ComponentContext, LogitsProcessor, SamplingContext
from trencadis.records import SamplingParams
from trencadis_plugins.sampling import trencadis_samplers
from trencadis_plugins.sampling.chain import standard_chain
from trencadis_plugins.sampling.config import ORDERS
from trencadis_plugins.sampling.drawing import BLOCK_SIZE
from trencadis_plugins.sampling.greedy import GreedySampler
from trencadis_plugins.sampling.philox import Purpose
from trencadis_plugins.sampling.standard import StandardSampler
from trencadis_testing.sampling import SamplingConformance


class TestStandardSampler(SamplingConformance):
    def make(self) -> StandardSampler:
        return StandardSampler(standard_chain("vllm"))

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array)


def _sampler(starts, vocab_size, chain):
    sampler = StandardSampler(chain)
    sampler.allocate(num_rows=8, vocab_size=vocab_size, device=torch.device("cpu"))
    for start in starts:
        sampler.start_row(start)
    return sampler


@pytest.mark.parametrize("order", ORDERS)
def test_a_token_is_the_race_over_the_chains_distribution_with_the_rows_seed_and_next_position(
    order, start, context_of, process, reference_draw
):
    logits = torch.randn((2, 700), generator=torch.Generator().manual_seed(0)) * 2
    params = {"temperature": 0.8, "top_k": 60, "top_p": 0.9, "min_p": 0.01, "frequency_penalty": 0.5}
    starts = [
        start(1, [3, 4], [5], row_seed=2**64 - 9, **params),
        start(6, [7], row_seed=12, temperature=1.3),
    ]
    distribution = process(standard_chain(order), logits, starts).numpy()
    expected = [
        reference_draw(distribution[0], 2**64 - 9, 3, int(Purpose.SAMPLE), BLOCK_SIZE),
        reference_draw(distribution[1], 12, 1, int(Purpose.SAMPLE), BLOCK_SIZE),
    ]
    sampler = _sampler(starts, 700, standard_chain(order))
    assert sampler.sample(logits.clone(), context_of(starts)).token_ids.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_of_every_dtype_give_the_token_of_their_float32_values(dtype, start, context_of):
    starts = [start(row, row_seed=row, temperature=0.5 * row, top_k=9 * row) for row in range(4)]
    logits = torch.randn((4, 300), generator=torch.Generator().manual_seed(1)).to(dtype)
    sampler = _sampler(starts, 300, standard_chain("vllm"))
    expected = sampler.sample(logits.float(), context_of(starts)).token_ids
    assert torch.equal(sampler.sample(logits, context_of(starts)).token_ids, expected)


class _Recorder(LogitsProcessor):
    """Changes nothing; remembers the rows it was shown."""

    def __init__(self, argmax_invariant: bool) -> None:
        self.argmax_invariant = argmax_invariant
        self.rows: list[int] = []

    def allocate(self, *, num_rows, vocab_size, device):
        pass

    def start_row(self, start):
        pass

    def apply(self, logits, context):
        assert len(logits) == len(context.rows) == len(context.positions)
        self.rows += context.rows
        return logits


def test_greedy_rows_skip_the_processors_that_cannot_change_their_token(start, context_of):
    invariant, mover = _Recorder(argmax_invariant=True), _Recorder(argmax_invariant=False)
    starts = [start(0, temperature=0), start(3), start(5, temperature=0), start(2, temperature=0.5)]
    sampler = _sampler(starts, 4, (invariant, mover))
    sampler.sample(torch.zeros((4, 4)), context_of(starts))
    assert sorted(mover.rows) == [0, 2, 3, 5]
    assert invariant.rows == [3, 2]


def test_a_call_of_plain_greedy_rows_takes_the_maximum_and_nothing_else(start, context_of, monkeypatch):
    starts = [start(row, temperature=0, top_k=3, top_p=0.5) for row in range(3)]
    sampler = _sampler(starts, 4, standard_chain("vllm"))
    monkeypatch.setattr(StandardSampler, "_choose", None)
    logits = torch.tensor([[0.0, 2, 2, 1], [3, 0, 0, 0], [0, 0, 0, 1]], dtype=torch.bfloat16)
    assert sampler.sample(logits, context_of(starts)).token_ids.tolist() == [1, 0, 3]


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("temperature", [0, 1])
def test_parameters_that_leave_no_token_are_an_error_of_their_row_that_names_them(
    start, context_of, temperature, is_static
):
    starts = [
        start(0, logit_bias={1: 5.0}, temperature=0),
        start(4, temperature=temperature, allowed_token_ids=(2,), min_tokens=5, eos=(2,)),
        start(5, temperature=0.8, row_seed=9),
    ]
    sampler = StandardSampler(standard_chain("vllm"))
    if is_static:
        assert sampler.use_static_shapes()
    sampler.allocate(num_rows=8, vocab_size=4, device=torch.device("cpu"))
    for one in starts:
        sampler.start_row(one)
    sampled = sampler.sample(torch.zeros((3, 4)), context_of(starts))
    (error,) = sampled.row_errors
    assert error.is_invalid
    assert error.index == 1
    assert "allowed_token_ids and min_tokens of this request leave row 4 at position 0 no token" in error.message
    alone = _sampler(starts[2:], 4, standard_chain("vllm")).sample(torch.zeros((1, 4)), context_of(starts[2:]))
    assert sampled.token_ids.tolist()[::2] == [1, int(alone.token_ids[0])]


class Moody(LogitsProcessor):
    """Fails for rows whose seed is odd, in the way that it is made with."""

    name = "moody"
    has_state = rebuilds_state = True

    def __init__(self, way: str) -> None:
        self.way = way
        self.seeds: dict[int, int] = {}

    def fails(self, rows, way):
        if way == self.way and any(self.seeds[row] % 2 for row in rows):
            raise ValueError("out of sorts")

    def allocate(self, *, num_rows, vocab_size, device):
        pass

    def start_row(self, start):
        self.seeds[start.row] = start.seed
        self.fails([start.row], "start")

    def apply(self, logits, context):
        self.fails(context.rows, "apply")
        return logits - 1

    def commit(self, token_ids, context):
        self.fails(context.rows, "commit")


@pytest.mark.parametrize("way", ["start", "apply", "commit"])
def test_what_a_processor_raises_for_one_row_is_an_error_of_that_row(way, start, context_of):
    starts = [
        start(row, [1], [2, 3], row_seed=seed, logits_processors={"moody": {}}, logit_bias={row: 9.0}, temperature=0)
        for row, seed in ((2, 4), (3, 5), (6, 6))
    ]
    sampler = _sampler(starts, 8, [Moody(way), *standard_chain("vllm")])
    for _ in range(2):
        sampled = sampler.sample(torch.zeros((3, 8)), context_of(starts))
    assert not any(error.is_invalid for error in sampled.row_errors)
    assert [(error.index, error.message) for error in sampled.row_errors if way != "commit"] == (
        [] if way == "commit" else [(1, "out of sorts")]
    )
    if way == "commit":  # whose state is lost is not known: all that asked
        assert [error.message for error in sampled.row_errors] == ["out of sorts"] * 3
    assert sampled.token_ids.tolist()[::2] == [2, 6]
    sampler.start_row(start(3, row_seed=8, temperature=0))
    assert sampler.sample(torch.zeros((1, 8)), context_of([start(3)])).row_errors == ()


class _Named(_Recorder):
    """Asked for by name only; takes one argument."""

    name = "named"

    def check(self, arguments):
        if set(arguments) - {"strength"}:
            raise InvalidRequestError("named takes a strength.")


def test_a_processor_with_a_name_runs_only_in_calls_that_name_it(start, context_of):
    named = _Named(argmax_invariant=False)
    starts = [start(0), start(1, temperature=0)]
    sampler = _sampler(starts, 4, (named,))
    sampler.sample(torch.zeros((2, 4)), context_of(starts))
    assert named.rows == []
    starts = [start(0), start(1, temperature=0, logits_processors={"named": {"strength": 3}})]
    for one in starts:
        sampler.start_row(one)
    sampler.sample(torch.zeros((2, 4)), context_of(starts))
    assert named.rows == [1]


def test_only_processors_that_are_enabled_may_be_named_and_check_their_arguments():
    sampler = StandardSampler([*standard_chain("vllm"), _Named(argmax_invariant=True)])
    sampler.check(SamplingParams(logits_processors={"named": {"strength": 1}}))
    with pytest.raises(
        InvalidRequestError,
        match=r"names 'nmaed', which is not enabled here\. Did you mean \"named\"\? Enabled: named\.",
    ):
        sampler.check(SamplingParams(logits_processors={"nmaed": {}}))
    with pytest.raises(InvalidRequestError, match="takes a strength"):
        sampler.check(SamplingParams(logits_processors={"named": {"weight": 1}}))
    with pytest.raises(InvalidRequestError, match="Enabled: none"):
        StandardSampler(standard_chain("vllm")).check(SamplingParams(logits_processors={"min_p": {}}))
    with pytest.raises(InvalidRequestError, match="no processors that a request may switch on"):
        GreedySampler().check(SamplingParams(logits_processors={"named": {}}))


def test_an_unsafe_processor_refuses_drafts_of_rows_that_ask(start, context_of):
    unsafe = _Named(argmax_invariant=False)
    unsafe.speculation_safe = False
    starts = [start(0), start(1, logits_processors={"named": {}})]
    sampler = _sampler(starts, 4, (unsafe,))
    tokens = context_of(starts).tokens
    sampler.sample(torch.zeros((2, 4)), SamplingContext(rows=(0, 0), positions=(0, 1), tokens=tokens))
    with pytest.raises(ValueError, match="logits processor named is not safe with speculation"):
        sampler.sample(torch.zeros((2, 4)), SamplingContext(rows=(1, 1), positions=(0, 1), tokens=tokens))


def test_tokens_of_every_feature_depend_on_nothing_else_in_the_batch(start, context_of):
    choices = [
        {"typical_p": 0.6},
        {"epsilon_cutoff": 0.02},
        {"eta_cutoff": 0.05},
        {"top_n_sigma": 1.0},
        {"xtc_probability": 0.5},
        {"mirostat_mode": 2, "mirostat_tau": 2.0},
        {"dry_multiplier": 2.0, "dry_allowed_length": 1},
        {"no_repeat_ngram_size": 2, "bad_words_ids": ((3, 4), (1,))},
    ]
    logits = torch.randn((8, 60), generator=torch.Generator().manual_seed(4)) * 2
    starts = [start(row, [1, 2, 1], [row, 2], row_seed=row, **params) for row, params in enumerate(choices)]
    tokens = context_of(starts).tokens
    context = context_of(starts)
    together = _sampler(starts, 60, standard_chain("vllm")).sample(logits.clone(), context).token_ids.tolist()
    alone = []
    for row, one in enumerate(starts):
        sampler = _sampler([one], 60, standard_chain("vllm"))
        at = SamplingContext(rows=(row,), positions=(4,), tokens=tokens)
        alone.append(int(sampler.sample(logits[row : row + 1].clone(), at).token_ids))
    assert together == alone


# ------------------------------------------------------------------------------------------------------- drafts

_PROMPT, _OUTPUT, _DRAFTS = [1, 2, 1, 30], [5, 6, 5], [6, 5, 9]
_ALONG_DRAFTS = [
    {"repetition_penalty": 1.7, "frequency_penalty": 0.6, "presence_penalty": 0.8},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    {"no_repeat_ngram_size": 2, "bad_words_ids": ((6, 5, 4), (9, 3))},
    {"min_tokens": 5, "eos": (8,), "logit_bias": {3: 2.0}},
    {"mirostat_mode": 2, "mirostat_tau": 2.0},
    {"xtc_probability": 0.9, "xtc_threshold": 0.05},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 2.5},
]


def _verified(sampler, logits, context, choose):
    """Return the distributions that were shown, and the answer."""
    seen = []

    def chosen(distributions):
        seen.append(distributions.probabilities.clone())
        return choose(distributions)

    answer = sampler.verify(logits.clone(), context, chosen)
    (distributions,) = seen
    return distributions, answer


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("params", _ALONG_DRAFTS, ids=lambda params: next(iter(params)))
def test_distributions_along_drafts_are_those_of_one_token_after_another(params, is_static, start, context_of):
    logits = torch.randn((4, 60), generator=torch.Generator().manual_seed(2)) * 2
    begun = start(1, _PROMPT, _OUTPUT, row_seed=77, **params)
    tokens = context_of([start(1, _PROMPT, [*_OUTPUT, *_DRAFTS])]).tokens
    chosen, last = torch.tensor([*_DRAFTS, 0]), len(begun.token_ids) - 1
    samplers = [StandardSampler(standard_chain("vllm")) for _ in range(2)]
    for sampler in samplers:
        if is_static:
            sampler.use_static_shapes()
        sampler.allocate(num_rows=8, vocab_size=60, device=torch.device("cpu"))
        sampler.start_row(begun)
    context = SamplingContext(rows=(1,) * 4, positions=tuple(range(last, last + 4)), tokens=tokens)
    together, _ = _verified(samplers[0], logits, context, lambda _: chosen)
    for place in range(4):
        context = SamplingContext(rows=(1,), positions=(last + place,), tokens=tokens)
        alone, _ = _verified(samplers[1], logits[place : place + 1], context, lambda _, at=place: chosen[at : at + 1])
        assert torch.allclose(together[place], alone[0], atol=1e-7), f"draft {place}"
        assert together[place].sum() == pytest.approx(1)


def test_drafts_that_branch_have_histories_of_their_own(start, context_of):
    params = {"repetition_penalty": 1.7, "frequency_penalty": 0.6, "no_repeat_ngram_size": 2}
    branches = [[], [6], [9]]
    begun = start(1, _PROMPT, _OUTPUT, row_seed=77, **params)
    logits = torch.randn((3, 60), generator=torch.Generator().manual_seed(3)) * 2
    last = len(begun.token_ids) - 1
    tables = [context_of([start(0, _PROMPT, [*_OUTPUT, *branch])]).tokens for branch in branches]
    context = SamplingContext(
        rows=(1,) * 3, positions=(last, last + 1, last + 1), tokens=torch.cat(tables), branches=(0, 1, 2)
    )
    sampler = _sampler([begun], 60, standard_chain("vllm"))
    together, _ = _verified(sampler, logits, context, lambda distributions: distributions.probabilities.argmax(-1))
    for place, branch in enumerate(branches):
        one = start(1, _PROMPT, [*_OUTPUT, *branch], row_seed=77, **params)
        alone, _ = _verified(
            _sampler([one], 60, standard_chain("vllm")),
            logits[place : place + 1],
            context_of([one]),
            lambda distributions: distributions.probabilities.argmax(-1),
        )
        assert torch.equal(together[place], alone[0])


@pytest.mark.representatives(3, ci=3)
@pytest.mark.parametrize("order", ORDERS)
def test_distributions_are_those_that_are_drawn_from_in_the_configured_order(order, start, context_of, process):
    starts = [
        start(0, temperature=0.5, top_p=0.8, min_p=0.02),
        start(1, temperature=0.0, logit_bias={3: 1.0}),
        start(2, temperature=2.0, top_p=0.8, min_p=0.2),
    ]
    logits = torch.randn((3, 60), generator=torch.Generator().manual_seed(5)) * 2
    component = next(iter(trencadis_samplers()))
    sampler = component.factory(component.config(order=order), ComponentContext(clock=SimulatedClock(), seed=0))
    sampler.allocate(num_rows=8, vocab_size=60, device=torch.device("cpu"))
    for one in starts:
        sampler.start_row(one)
    distributions, _ = _verified(sampler, logits, context_of(starts), lambda them: them.uniforms().long())
    processed = process(standard_chain(order), logits, starts)
    assert torch.allclose(distributions[[0, 2]], processed[[0, 2]].softmax(-1))
    assert distributions[1].tolist() == torch.eye(60)[processed[1].argmax()].tolist()


def test_tokens_that_a_rule_chose_are_reported_with_the_models_logprobs(start, context_of):
    starts = [start(0, logprobs=2), start(1)]
    logits = torch.randn((2, 60), generator=torch.Generator().manual_seed(6))
    chosen = torch.tensor([17, 4])
    _, answer = _verified(_sampler(starts, 60, standard_chain("vllm")), logits, context_of(starts), lambda _: chosen)
    assert answer.token_ids.tolist() == [17, 4]
    (entry,) = answer.logprobs
    assert (entry.index, entry.token_id) == (0, 17)
    assert entry.logprob == pytest.approx(logits[0].log_softmax(-1)[17].item(), abs=1e-6)


def test_rows_without_a_possible_token_have_distributions_and_an_error(start, context_of):
    starts = [start(4, allowed_token_ids=(2,), min_tokens=5, eos=(2,)), start(5)]
    sampler = _sampler(starts, 4, standard_chain("vllm"))
    distributions, sampled = _verified(
        sampler, torch.zeros((2, 4)), context_of(starts), lambda distributions: torch.zeros(2).long()
    )
    assert distributions.sum(-1).tolist() == [1, 1]
    (error,) = sampled.row_errors
    assert error.index == 0
    assert "leave row 4 at position 0" in error.message


def test_a_sequence_takes_drafts_if_all_that_it_asks_for_does_and_branches_if_no_state_is_kept_by_position():
    unsafe = _Named(argmax_invariant=False)
    unsafe.speculation_safe = False
    sampler = StandardSampler([*standard_chain("vllm"), unsafe])
    asked = [{"top_p": 0.5, "frequency_penalty": 1.0}, {"mirostat_mode": 2}, {"logits_processors": {"named": {}}}]
    assert [
        [sampler.supports_drafts(SamplingParams(**one), branching=flag) for flag in (False, True)] for one in asked
    ] == [[True, True], [True, False], [False, False]]


def test_sequence_goes_on_behind_anothers_token_unless_a_state_would_be_missing():
    """What a grammar allows follows from the tokens; mirostat's target follows from distributions that were elsewhere."""
    sampler = StandardSampler(standard_chain("vllm"))
    everything = SamplingParams(
        temperature=0.7,
        top_p=0.5,
        frequency_penalty=1.0,
        logit_bias={1: 2.0},
        min_tokens=2,
        xtc_probability=0.5,
        no_repeat_ngram_size=3,
        structured={"kind": "json_object"},
    )
    assert sampler.is_portable(everything)
    assert not sampler.is_portable(SamplingParams(mirostat_mode=2))
    assert sampler.is_portable(SamplingParams(mirostat_mode=2, temperature=0.0)), (
        "which greedy sequences do not ask for"
    )
    stateful = _Named(argmax_invariant=False)
    stateful.has_state = True
    named = SamplingParams(logits_processors={"named": {}})
    assert not StandardSampler([stateful]).is_portable(named)
    assert StandardSampler([stateful]).is_portable(SamplingParams())
    stateful.rebuilds_state = True
    assert StandardSampler([stateful]).is_portable(named)


def test_first_token_of_another_engine_must_suit_every_processor_that_is_asked_for(start):
    picky = _Named(argmax_invariant=False)
    picky.can_start_with = lambda start, token_id: token_id != 3
    sampler = StandardSampler([*standard_chain("vllm"), picky])
    asks = start(0, logits_processors={"named": {}})
    assert [sampler.can_start_with(asks, token) for token in (2, 3)] == [True, False]
    assert sampler.can_start_with(start(0), 3)
