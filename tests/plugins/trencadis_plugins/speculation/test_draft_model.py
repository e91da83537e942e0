from __future__ import annotations

import itertools
import random
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from support.devices import cpu_only
from support.strategies.draft_models import (
    LIMITS,
    VOCAB_SIZE,
    context_of,
    draft_model,
    greedy,
    late,
    logits_behind,
    runs,
)
from trencadis.errors import ConfigValueError
from trencadis.interfaces import GuessBatch
from trencadis.records import Batch, Request, SamplingParams
from trencadis_plugins.speculation.draft_model import DraftModel
from trencadis_testing.speculation import SpeculationConformance, draft_view
from trencadis_torch.backend import TorchBackend


@pytest.mark.parametrize("sampling", ["greedy", pytest.param("probabilistic", marks=pytest.mark.nightly)])
class TestDraftModel(SpeculationConformance):
    @pytest.fixture(autouse=True)
    def _model(self, tiny: Path, sampling: str) -> None:
        self.made = draft_model(tiny, limits=None, sampling=sampling)

    def make(self) -> DraftModel:
        return late(DraftModel)(self.made._config, context_of())


class TestTrees(SpeculationConformance):
    @pytest.fixture(autouse=True)
    def _model(self, tiny: Path) -> None:
        self.made = draft_model(tiny, limits=None, tree="sequoia", max_draft_tokens=6)

    def make(self) -> DraftModel:
        return late(DraftModel)(self.made._config, context_of())


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def requests(params: SamplingParams, count: int) -> list[Request]:
    return [Request(request_id=str(i), prompt_token_ids=(1,), params=params) for i in range(count)]


def test_drafts_are_what_the_model_itself_would_say(tiny: Path) -> None:
    histories = [text(seed, length) for seed, length in enumerate((1, 3, 17, 40, 90))]
    found = runs(draft_model(tiny).propose(draft_view(histories, most=[4, 1, 0, 3, 4])))
    assert found == [greedy(tiny, h, n) for h, n in zip(histories, [4, 1, 0, 3, 4], strict=True)]


@pytest.mark.parametrize("in_one_call", [True, False])
def test_drafts_end_before_the_first_that_is_unlikely(tiny: Path, monkeypatch, in_one_call: bool) -> None:
    if not in_one_call:
        monkeypatch.setattr(TorchBackend, "guess", lambda *_: None)
    histories = [text(seed, length) for seed, length in enumerate((3, 17, 40, 90, 11, 25))]
    whole = [greedy(tiny, history, 4) for history in histories]
    chances = [
        [float(logits_behind(tiny, history + drafts[:k]).softmax(-1).max()) for k in range(4)]
        for history, drafts in zip(histories, whole, strict=True)
    ]
    least = sorted(itertools.chain.from_iterable(chances))[8] + 1e-4
    found = runs(draft_model(tiny, min_probability=least).propose(draft_view(histories, most=[4] * 6)))
    assert found == [
        drafts[: next((k for k, chance in enumerate(some) if chance < least), 4)]
        for drafts, some in zip(whole, chances, strict=True)
    ]
    assert len({len(drafts) for drafts in found}) > 2


@cpu_only
def test_all_drafts_of_a_step_cost_one_call_and_no_token_is_computed_twice(tiny: Path, monkeypatch) -> None:
    calls: list[list[int]] = []
    guess = TorchBackend.guess

    def counted(backend: TorchBackend, batch: GuessBatch) -> np.ndarray | None:
        calls.append(batch.query_lens.tolist())
        return guess(backend, batch)

    def refuse(backend: TorchBackend, batch: Batch) -> None:
        raise AssertionError("a batch for a single draft")

    monkeypatch.setattr(TorchBackend, "guess", counted)
    monkeypatch.setattr(TorchBackend, "submit", refuse)
    speculator, texts = draft_model(tiny), [text(1, 20), text(2, 7)]
    asked = requests(SamplingParams(), 2)

    def propose() -> list[list[int]]:
        return runs(speculator.propose(draft_view(texts, most=[4, 4], requests=asked)))

    first = propose()
    # All four stand, and a token more: the last draft was never fed. Then one stands, and another token comes after it.
    texts = [texts[0] + [*first[0], 5], texts[1] + [first[1][0], 6]]
    second = propose()
    texts = [[*tokens, 7] for tokens in texts]
    propose()
    assert calls == [[20, 7], [2, 1], [1, 1]]
    assert [len(drafts) for drafts in second] == [4, 4]


@pytest.mark.representatives(1)
@pytest.mark.parametrize("kind", ["line", "tree"])
def test_whatever_stands_falls_or_moves_the_cache_holds_the_text(tiny: Path, kind: str) -> None:
    # Accepted runs of any length, other tokens, sequences that pause, end, come back and change slots; too little room for all.
    rng = random.Random(5)
    limits = attrs.evolve(LIMITS, num_blocks=40, max_num_seqs=4, max_num_batched_tokens=24)
    options = {"tree": "static", "tree_shape": (1, 1, 1)} if kind == "tree" else {}
    speculator = draft_model(tiny, limits=limits, max_draft_tokens=3, **options)
    live = {
        slot: (text(slot, rng.randrange(1, 30)), request) for slot, request in enumerate(requests(SamplingParams(), 7))
    }
    for step in range(60):
        slots = rng.sample(sorted(live), 4)
        view = draft_view(
            [live[slot][0] for slot in slots],
            most=[rng.randrange(4) for _ in slots],
            slots=slots,
            requests=[live[slot][1] for slot in slots],
        )
        drafts = runs(speculator.propose(view))
        for slot, guessed, most in zip(slots, drafts, view.max_draft_tokens.tolist(), strict=True):
            tokens, request = live[slot]
            assert guessed == greedy(tiny, tokens, len(guessed)), (step, slot)
            assert len(guessed) == most
            tokens += guessed[: rng.randrange(len(guessed) + 1)] + text(step * 10 + slot, 1)
            if len(tokens) > 50 or rng.random() < 0.1:
                speculator.on_finished(slot=slot, token_ids=np.array(tokens, np.int32))
                fresh = attrs.evolve(request, request_id=f"{slot}/{step}")
                live[slot] = (text(step, rng.randrange(1, 30)), fresh)


def test_a_text_that_has_no_room_for_drafts_gets_none(tiny: Path) -> None:
    speculator = draft_model(tiny, limits=attrs.evolve(LIMITS, max_model_len=40))
    found = runs(speculator.propose(draft_view([text(1, 38), text(2, 40), text(3, 20)])))
    assert [len(run) for run in found] == [2, 0, 4]


@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2, "top_k": 20}])
def test_distributions_of_drawn_drafts_are_those_they_were_drawn_by(tiny: Path, cut: dict[str, float]) -> None:
    params = SamplingParams(temperature=0.8, **cut)
    histories = [text(seed, 9 + seed) for seed in range(4)]
    speculator = draft_model(tiny, sampling="probabilistic")
    drafts = speculator.propose(draft_view(histories, requests=requests(params, 4), most=[4, 2, 3, 4]))
    assert drafts.distributions is not None
    number = 0
    for history, run in zip(histories, runs(drafts), strict=True):
        for step, token in enumerate(run):
            logits = logits_behind(tiny, [*history, *run[:step]])[0].double() / 0.8
            distribution = expected_distribution(logits, params)
            found = drafts.distributions.probabilities[int(drafts.distributions.rows[number])].double()
            assert torch.allclose(found, distribution, atol=1e-5)
            assert float(found[token]) > 0
            number += 1
    assert number == len(drafts.distributions.rows)


def expected_distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Min-p, top-k and top-p, each from its definition, on what is left."""
    distribution = logits.softmax(-1)
    distribution = torch.where(distribution < params.min_p * distribution.max(), 0.0, distribution)
    if params.top_k:
        distribution = torch.where(distribution < distribution.topk(params.top_k).values[-1], 0.0, distribution)
    distribution = distribution / distribution.sum()
    order = distribution.argsort(descending=True)
    before = distribution[order].cumsum(0) - distribution[order]
    distribution[order[before >= params.top_p]] = 0.0
    return distribution / distribution.sum()


def test_greedy_requests_among_others_get_certain_drafts(tiny: Path) -> None:
    histories = [text(1, 8), text(2, 8)]
    asked = [*requests(SamplingParams(temperature=0.0), 1), *requests(SamplingParams(temperature=1.0), 1)]
    drafts = draft_model(tiny, sampling="probabilistic").propose(draft_view(histories, requests=asked, most=2))
    assert drafts.distributions is not None
    assert drafts.distributions.rows[:2].tolist() == [-1, -1]
    assert (drafts.distributions.rows[2:] >= 0).all()
    assert runs(drafts)[0] == greedy(tiny, histories[0], 2)


def test_draws_of_a_position_differ_from_step_to_step_and_repeat_with_the_seed(tiny: Path) -> None:
    history = text(1, 10)
    asked = requests(SamplingParams(temperature=50.0), 1)

    def drawn(tokens: list[int], most: int = 4) -> list[int]:
        made = draft_model(tiny, sampling="probabilistic")
        return runs(made.propose(draft_view([tokens], requests=asked, most=most)))[0]

    first = drawn(history)
    assert first == drawn(history)
    assert first[:2] == drawn(history, most=2)
    assert first[1:] != drawn([*history, first[0]])[:3]  # the same text before them, and nearly any token may be drawn


@pytest.mark.parametrize("target_size", [60, 120])
def test_a_draft_model_with_more_or_fewer_tokens_is_cut_to_the_target(tiny: Path, target_size: int) -> None:
    context = context_of(facts=attrs.evolve(context_of().model, vocab_size=target_size))
    made = draft_model(tiny, context=context, sampling="probabilistic")
    histories = [[t % 60 for t in text(1, 20)], [t % 60 for t in text(2, 20)]]
    asked = [*requests(SamplingParams(temperature=0.0), 1), *requests(SamplingParams(temperature=3.0), 1)]
    drafts = made.propose(draft_view(histories, requests=asked))
    assert runs(drafts)[0] == greedy(tiny, histories[0], 4, below=min(target_size, VOCAB_SIZE))
    assert drafts.distributions is not None
    assert drafts.distributions.probabilities.shape[1] == target_size
    assert torch.allclose(drafts.distributions.probabilities.sum(1), torch.ones(1))
    if target_size > VOCAB_SIZE:
        assert runs(made.propose(draft_view([[3, 110, 4]]))) == [[]]


# --------------------------------------------------------------------------------------------------------------- trees


def reference_tree(path: Path, history: list[int], tokens: list[int], parents: list[int], node: int) -> list[int]:
    """Return the text up to a node."""
    behind: list[int] = []
    while node >= 0:
        behind.insert(0, tokens[node])
        node = parents[node]
    return [*history, *behind]


@pytest.mark.parametrize("tree", ["top_k", "static", "sequoia"])
def test_children_are_the_most_likely_tokens_behind_their_own_path(tiny: Path, tree: str) -> None:
    made = draft_model(tiny, tree=tree, max_draft_tokens=10, tree_shape=(3, 2, 1), tree_width=3, tree_depth=4)
    histories = [text(seed, 5 + 11 * seed) for seed in range(3)]
    drafts = made.propose(draft_view(histories, most=[10, 10, 4]))
    assert drafts.parents is not None
    assert drafts.num_drafts.tolist() == [10, 10, 4]
    first = 0
    for history, tokens in zip(histories, runs(drafts), strict=True):
        parents = drafts.parents[first : first + len(tokens)].tolist()
        first += len(tokens)
        for node in range(-1, len(tokens)):
            children = [tokens[i] for i, parent in enumerate(parents) if parent == node]
            logits = logits_behind(tiny, reference_tree(tiny, history, tokens, parents, node))[0]
            assert children == logits.topk(len(children)).indices.tolist()
    assert len(set(drafts.parents[:10].tolist())) < 10, "nothing branches"


def test_the_best_nodes_of_a_tree_are_kept(tiny: Path) -> None:
    history = text(2, 14)
    drafts = draft_model(tiny, tree="top_k", max_draft_tokens=6, tree_width=4, tree_depth=3).propose(
        draft_view([history], most=6)
    )
    scores = {(): 0.0}
    for _ in range(3):  # all nodes within reach, level by level, the four best expanded
        level = max(map(len, scores))
        for path in sorted((p for p in scores if len(p) == level), key=lambda p: -scores[p])[:4]:
            best = logits_behind(tiny, [*history, *path])[0].log_softmax(-1).topk(4)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                scores[*path, token] = scores[path] + value
    del scores[()]
    best_paths = sorted(scores, key=lambda p: -scores[p])[:6]
    tokens, parents = runs(drafts)[0], (drafts.parents if drafts.parents is not None else np.empty(0)).tolist()
    found = [tuple(reference_tree(tiny, [], tokens, parents, node)) for node in range(6)]
    assert sorted(found) == sorted(best_paths)


def test_who_may_not_branch_gets_a_line(tiny: Path) -> None:
    histories = [text(1, 9), text(2, 9)]
    made = draft_model(tiny, tree="top_k", max_draft_tokens=4)
    drafts = made.propose(draft_view(histories, linear_only=True))
    assert runs(drafts) == [greedy(tiny, history, 4) for history in histories]
    assert drafts.parents is not None
    assert drafts.parents.tolist() == [-1, 0, 1, 2] * 2


def test_sequoia_learns_where_the_text_goes(tiny: Path) -> None:
    # A text that always takes the second guess: the shape must get wide at the root.
    made = draft_model(tiny, tree="sequoia", max_draft_tokens=4, tree_width=3, tree_depth=4)
    request = requests(SamplingParams(temperature=0.0), 1)
    history = text(3, 6)
    first = made.propose(draft_view([history], requests=request))
    assert first.parents is not None
    before = sum(parent < 0 for parent in first.parents.tolist())
    for _ in range(60):
        history.append(int(logits_behind(tiny, history)[0].topk(2).indices[1]))
        drafts = made.propose(draft_view([history], requests=request))
    assert drafts.parents is not None
    assert int((drafts.parents < 0).sum()) == 2 > before - 1
    assert made._trees._acceptance.rates[1] > made._trees._acceptance.rates[0]


def test_trees_need_a_backend_that_takes_them_and_certain_drafts(tiny: Path) -> None:
    with pytest.raises(ConfigValueError, match="tree_attention"):
        draft_model(tiny, tree="top_k", context=context_of(layout="padded"))
    with pytest.raises(ConfigValueError, match="probabilistic"):
        draft_model(tiny, tree="top_k", sampling="probabilistic", limits=None)
