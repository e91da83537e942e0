"""Whole engines whose drafts branch: text and log-probabilities are those of no speculation, whatever the trees are."""

from __future__ import annotations

import random

import attrs
import pytest

from support.backends import tiny_models
from support.core.invariants import broken_invariants
from support.devices import DEVICE
from trencadis.clock import SystemClock
from trencadis.records import ModelSource, Request, SamplingParams
from trencadis.text import resolve_model_path
from trencadis_plugins.acceptance.tree import Tree
from trencadis_plugins.sampling.chain import standard_chain
from trencadis_plugins.sampling.standard import StandardSampler
from trencadis_testing.doubles import Matching, ScriptedTrees
from trencadis_testing.engines import make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_torch.backend import TorchBackend
from trencadis_torch.config import TorchConfig

SHARED = tuple(tiny_models.prompt(18, seed=9))
PROMPTS = [tuple(tiny_models.prompt(length, seed=length)) for length in (1, 5, 19)]
PROMPTS += [(*SHARED, 40), (*SHARED, 41, 42)]
KINDS = {
    "greedy": {"temperature": 0.0},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "bias": {"temperature": 0.0, "logit_bias": {5: 4.0, 9: 3.0}, "bad_words_ids": ((5, 9), (9, 5), (7,))},
    "ngrams": {"temperature": 0.0, "no_repeat_ngram_size": 2, "logprobs": 3},
    "drawn": {"temperature": 1.0, "seed": 5, "min_p": 0.02, "repetition_penalty": 1.1, "logprobs": 2},
    "min tokens": {"temperature": 0.0, "min_tokens": 6, "dry_multiplier": 1.0, "dry_allowed_length": 1},
}


class Loaded(FakeExecutor):
    """A backend that stays loaded from engine to engine."""

    def __init__(self, path):
        backend = TorchBackend(TorchConfig(device=DEVICE, check_model=False), clock=SystemClock())
        super().__init__(backend)
        self.backend = backend
        sampler = StandardSampler(standard_chain("vllm"))
        facts = backend.load(ModelSource(path=str(path)), sampler=sampler)
        self.facts = attrs.evolve(facts, max_model_len=96)

    def start(self, **_):
        return self.facts

    def close(self):
        """The next engine needs it."""


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def executor(request, model_path):
    return Loaded(model_path(request.param))


def run(executor, prompts, kind, *, max_tokens=14, draft=None, num_blocks=64, acceptance=None, most=7, **options):
    """Serve all prompts; returns tokens and log-probabilities by prompt, the engine, and the number of preemptions."""
    speculator = None if draft is None else ScriptedTrees(draft, max_draft_tokens=most)
    engine = make_engine(
        executor=executor,
        speculator=speculator,
        acceptance=acceptance or Matching(),
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        **options,
    )
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **kind)
        engine.add(Request(request_id=str(index), prompt_token_ids=prompt, params=params))
    ends, logprobs = {}, {index: [] for index in range(len(prompts))}
    names = {}
    while engine.has_work:
        deltas = engine.step()
        names.update({slot: int(name) for name, slot in engine._state.slot_of.items()})
        for one in deltas.logprobs:
            logprobs[names[int(deltas.slots[one.index])]].append(one)
        ends.update({int(end.request_id): end for end in deltas.finished})
        assert broken_invariants(engine) == []
    assert engine.totals.num_failed_steps == 0, {end.error for end in ends.values()}
    texts = [tuple(ends[index].token_ids.tolist()) for index in range(len(prompts))]
    return texts, logprobs, engine, sum(end.num_preemptions for end in ends.values())


def drafter(manner, prompts, texts):
    """Trees for sequences whose true text is known: all wrong, all right with wrong ones beside them, or by chance."""

    def draft(tokens):
        known = tuple(tokens.tolist())
        index = next(
            i
            for i, p in enumerate(prompts)
            if known[: len(p)] == p and known[len(p) :] == texts[i][: len(known) - len(p)]
        )
        true = list(texts[index][len(known) - len(prompts[index]) :])
        rng = random.Random(len(known) * 7 + index)
        tree, here = [], -1
        for _ in range(7):
            right = true and {"random": rng.random() < 0.5, "oracle": len(tree) % 2 == 1, "adversarial": False}[manner]
            if right:
                tree.append((true.pop(0), here))
                here = len(tree) - 1
            else:
                wrong = 3 + ((true[0] if true else 0) + rng.randrange(1, 90)) % 120
                tree.append((wrong, here if rng.random() < 0.5 else rng.randrange(-1, len(tree))))
        if manner == "adversarial" and true:
            # The right tokens, everywhere but where they are right.
            tree = [(token + 1 if (token, parent) == (true[0], -1) else token, parent) for token, parent in tree]
        return tree

    return draft


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_that_of_no_speculation(executor, kind):
    plain, plain_logprobs, _, _ = run(executor, PROMPTS, KINDS[kind])
    for manner in ("random", "oracle", "adversarial"):
        texts, logprobs, engine, _ = run(executor, PROMPTS, KINDS[kind], draft=drafter(manner, PROMPTS, plain))
        assert texts == plain, manner
        accepted, drafted = engine.totals.num_accepted_tokens, engine.totals.num_draft_tokens
        assert drafted > 50
        assert accepted > {"random": 10, "oracle": 30, "adversarial": -1}[manner]
        assert _alike(logprobs, plain_logprobs)


@pytest.mark.representatives(2)
@pytest.mark.parametrize("manner", ["random", "oracle", "adversarial"])
def test_greedy_text_of_a_rule_that_reads_distributions_is_the_same(executor, manner):
    """Distributions of greedy sequences give everything to one token; log-probabilities are those of the tokens that were emitted."""
    kind = {**KINDS["penalties"], "logprobs": 2}
    plain, plain_logprobs, _, _ = run(executor, PROMPTS, kind)
    texts, logprobs, engine, _ = run(executor, PROMPTS, kind, draft=drafter(manner, PROMPTS, plain), acceptance=Tree())
    assert texts == plain
    assert _alike(logprobs, plain_logprobs)
    assert (engine.totals.num_accepted_tokens > 10) == (manner != "adversarial")


def _alike(found, expected):
    for index, entries in expected.items():
        assert [(one.position, one.token_id, one.rank) for one in found[index]] == [
            (one.position, one.token_id, one.rank) for one in entries
        ]
        for one, other in zip(found[index], entries, strict=True):
            assert one.top_token_ids == other.top_token_ids
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)
    return True


@pytest.mark.representatives(1)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_sequences_go_on_with_what_was_verified(executor, preemption):
    plain, _, _, _ = run(executor, PROMPTS, KINDS["greedy"], max_tokens=30)
    texts, _, _, num_preemptions = run(
        executor,
        PROMPTS,
        KINDS["greedy"],
        max_tokens=30,
        draft=drafter("random", PROMPTS, plain),
        num_blocks=24,
        preemption=preemption,
    )
    assert num_preemptions
    assert texts == plain


def test_blocks_of_tree_steps_serve_later_prompts(executor):
    """What was hashed behind accepted paths is read by prompts that go on from there."""
    plain, _, _, _ = run(executor, PROMPTS, KINDS["greedy"])
    longer = [(*prompt, *text) for prompt, text in zip(PROMPTS, plain, strict=True)]
    expected, _, _, _ = run(executor, longer, KINDS["greedy"], max_tokens=6)
    speculator = ScriptedTrees(drafter("random", PROMPTS + longer, plain + expected), max_draft_tokens=7)
    engine = make_engine(
        executor=executor, speculator=speculator, num_blocks=96, max_num_seqs=4, max_num_batched_tokens=48
    )
    found = []
    for prompts, count in ((PROMPTS, 14), (longer, 6)):
        for index, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0)
            engine.add(Request(request_id=f"{count}/{index}", prompt_token_ids=prompt, params=params))
        ends = {}
        while engine.has_work:
            ends.update({end.request_id: end for end in engine.step().finished})
        found.append([tuple(ends[f"{count}/{index}"].token_ids.tolist()) for index in range(len(prompts))])
        if count == 6:
            assert all(
                ends[f"6/{index}"].num_cached_tokens >= len(longer[index]) // 4 * 4 - 4 for index in range(len(longer))
            )
    assert found == [plain, expected]


def test_path_is_cut_at_a_stop_token_and_at_the_last_token(executor):
    plain, _, _, _ = run(executor, PROMPTS, KINDS["greedy"])
    stop = plain[2][4]
    expected = [text[: text.index(stop) + 1] if stop in text else text for text in plain]
    kind = {"temperature": 0.0, "stop_token_ids": (stop,)}
    oracle = drafter("oracle", PROMPTS, plain)
    assert run(executor, PROMPTS, kind, draft=oracle)[0] == expected
    for max_tokens in (1, 2, 3, 6):
        texts, _, _, _ = run(executor, PROMPTS, KINDS["greedy"], max_tokens=max_tokens, draft=oracle)
        assert texts == [text[:max_tokens] for text in plain]


def test_drafts_that_are_always_right_need_a_fraction_of_the_steps(executor):
    plain, _, engine, _ = run(executor, PROMPTS[:1], KINDS["greedy"], max_tokens=24)
    few = run(executor, PROMPTS[:1], KINDS["greedy"], max_tokens=24, draft=drafter("oracle", PROMPTS[:1], plain))
    assert few[0] == plain
    assert few[2].totals.num_steps * 2 < engine.totals.num_steps


@pytest.mark.nightly  # of tiny models: above
def test_greedy_text_of_the_demo_is_that_of_no_speculation():
    executor = Loaded(resolve_model_path("demo"))
    prompts = [tuple(3 + (7 * i * i + 11 * i + length) % 4000 for i in range(length)) for length in (3, 17, 40)]
    plain, _, _, _ = run(executor, prompts, KINDS["greedy"], max_tokens=24, num_blocks=96)
    for manner in ("random", "oracle", "adversarial"):
        for name in ("greedy", "penalties"):
            kind = KINDS[name]
            expected = plain if name == "greedy" else run(executor, prompts, kind, max_tokens=24, num_blocks=96)[0]
            draft = drafter(manner, prompts, expected)
            assert run(executor, prompts, kind, max_tokens=24, draft=draft, num_blocks=96)[0] == expected
