"""Whole engines whose drafts branch: text and log-probabilities are those of no speculation, whatever the trees are."""

from __future__ import annotations

import random
from typing import ClassVar

import attrs
import numpy as np
import pytest
import torch
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backends import tiny_models
from support.backends.passes import ints, make_pass
from support.core.invariants import broken_invariants
from support.devices import DEVICE
from trencadis.clock import SystemClock
from trencadis.errors import BackendError, StepFailedError
from trencadis.interfaces import AllocationPlan
from trencadis.records import Bucket, Drafts, ModelSource, Phase, Request, SamplingParams
from trencadis.text import resolve_model_path
from trencadis_plugins.acceptance.tree import Tree
from trencadis_plugins.sampling.chain import standard_chain
from trencadis_plugins.sampling.standard import StandardSampler
from trencadis_testing.backend import ArgmaxSampler
from trencadis_testing.doubles import Matching, ScriptedTrees
from trencadis_testing.engines import make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_torch.attention import adapter
from trencadis_torch.attention.ragged import Workspace
from trencadis_torch.attention.trees import DraftTrees
from trencadis_torch.backend import TorchBackend
from trencadis_torch.cache.kv_cache import PagedKVCache
from trencadis_torch.config import TorchConfig
from trencadis_torch.loading.inspection import attention_layers
from trencadis_torch.rows import Rows
from trencadis_torch.runner import PassRunner
from trencadis_torch.verify import MatchingPrefix

NUM_ROWS = 3
PLAN = AllocationPlan(num_blocks=60, block_size=4, num_rows=NUM_ROWS, max_model_len=64, max_num_batched_tokens=64)
#            9 ─ 20 ─ 21 ─ 22
#                  └ 23
#              └ 24
TREE = ([20, 21, 24, 22, 23], [-1, 0, -1, 1, 0])


def decode(starts, trees, *, rows=None):
    """A pass that verifies a tree behind each start, and its drafts."""
    counts = [len(tokens) for tokens, _ in trees]
    lengths = [1 + count for count in counts]
    bucket = Bucket(len(starts), max(lengths), 60, Phase.DECODE)
    drafts = Drafts(
        num_drafts=ints(*counts),
        token_ids=ints(*(token for tokens, _ in trees for token in tokens)),
        parents=ints(*(parent for _, parents in trees for parent in parents)),
    )
    return make_pass(bucket, rows or range(len(starts)), starts, lengths, lengths), drafts


class World:
    """A tiny model with rows whose contexts are computed."""

    models: ClassVar = {}

    def __init__(self, kind, contexts):
        if kind not in self.models:
            adapter.register()
            model = tiny_models.make_model(kind).to(DEVICE)
            layers = attention_layers(model)
            adapter.switch(model, adapter.PAGED)
            self.models[kind] = model, layers
        model, layers = self.models[kind]
        device = torch.device(DEVICE)
        self.contexts = contexts
        self.rows = Rows(PLAN, device)
        for row, context in enumerate(contexts):
            tokens = tiny_models.prompt(context + 1, seed=row)
            self.rows.tokens[row, : context + 1] = torch.tensor(tokens).int()
        order = torch.randperm(60, generator=torch.Generator().manual_seed(3))
        self.rows.tables[:, :16] = order[:48].view(3, 16).int()
        self.cache = PagedKVCache(layers, num_blocks=60, block_size=4, device=device)
        self.runner = PassRunner(model, rows=self.rows, cache=self.cache, layout="ragged", workspace=Workspace())
        for row, context in enumerate(contexts):
            self.linear(row, 0, self.rows.tokens[row, :context].tolist())

    @torch.inference_mode()
    def linear(self, row, start, tokens):
        """Run tokens behind each other; returns the logits of all."""
        count = len(tokens)
        self.rows.tokens[row, start : start + count] = torch.tensor(tokens).int()
        one = make_pass(Bucket(1, count, 60), [row], [start], [count])
        return self.runner.forward(self.runner.inputs(one), np.arange(count)).clone()

    @torch.inference_mode()
    def tree(self, trees):
        """Run trees behind all rows' newest tokens; returns the logits of all nodes, row after row."""
        one, drafts = decode(self.contexts, trees)
        for row, (tokens, _) in enumerate(trees):
            start = self.contexts[row] + 1
            self.rows.tokens[row, start : start + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        found = DraftTrees.of(one, drafts)
        inputs = self.runner.inputs(one, found)
        return self.runner.forward(inputs, np.arange(int(one.query_lens.sum()))).split(one.query_lens.tolist())


def paths(parents):
    """The nodes on the way to each node, itself included; -1 first, for the newest token."""
    found = {-1: [-1]}
    for node, parent in enumerate(parents):
        found[node] = [*found[parent], node]
    return found


@st.composite
def trees(draw):
    size = draw(st.integers(0, 11))
    return draw(st.lists(st.integers(3, 120), min_size=size, max_size=size)), [
        draw(st.integers(-1, node - 1)) for node in range(size)
    ]


@pytest.mark.slow
@settings(max_examples=8, phases=(Stage.explicit, Stage.generate))
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3", "gpt_oss", "gpt2"])
@given(data=st.data())
def test_every_node_gets_the_logits_of_its_path_run_alone(kind, data):
    """Grouped heads, windows, softcaps, sinks, learnt positions; trees of all sizes beside each other."""
    contexts = data.draw(st.tuples(*[st.sampled_from([1, 5, 8, 14, 30])] * NUM_ROWS))
    drawn = data.draw(st.tuples(*[trees()] * NUM_ROWS).filter(lambda all_: any(_branches(one) for one in all_)))
    world = World(kind, contexts)
    found = world.tree(drawn)
    for row, (tokens, parents) in enumerate(drawn):
        newest = int(world.rows.tokens[row, contexts[row]])
        for node, path in paths(parents).items():
            run = [newest, *(tokens[before] for before in path[1:])]
            expected = world.linear(row, contexts[row], run)[-1]
            torch.testing.assert_close(found[row][node + 1], expected, atol=5e-5 * float(expected.abs().max()), rtol=0)


def _branches(tree):
    return tree[1] != list(range(-1, len(tree[1]) - 1))


# ----------------------------------------------------------------------------------------------------- host side


def test_linear_drafts_are_no_tree():
    linear = ([5, 6, 7], [-1, 0, 1])
    assert DraftTrees.of(*decode((4,), (linear,))) is None
    one, drafts = decode((4,), (linear,))
    assert DraftTrees.of(one, None) is None
    assert DraftTrees.of(one, Drafts(num_drafts=drafts.num_drafts, token_ids=drafts.token_ids)) is None


def test_nodes_know_their_ancestors_depths_and_roots_and_positions_follow_depths():
    found = DraftTrees.of(*decode((9, 4, 7), (TREE, ([5, 6], [-1, 0]), ([], []))))
    assert found.branches.tolist() == [True, False, False]
    assert found.roots.tolist() == [9, 4, 7]
    assert found.parents.tolist() == [[0, 0, 1, 0, 2, 1], [0, 0, 1, 0, 0, 0], [0] * 6]
    assert found.depths.tolist() == [[0, 1, 2, 1, 3, 2], [0, 1, 2, 0, 0, 0], [0] * 6]
    assert found.max_depth == 3
    seen = [np.flatnonzero(row).tolist() for row in found.ancestors[0]]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 3], [0, 1, 2, 4], [0, 1, 5]]
    linear = np.array([9, 10, 11, 12, 13, 14, 4, 5, 6, 7])
    assert found.positions(linear, np.array([0, 6, 9])).tolist() == [9, 10, 11, 10, 12, 11, 4, 5, 6, 7]


def test_tree_behind_more_than_one_token_is_refused():
    one, drafts = decode((4,), (TREE,))
    longer = attrs.evolve(one, query_lens=one.query_lens + 1)
    with pytest.raises(StepFailedError, match="it must be 1"):
        DraftTrees.of(longer, drafts)


@pytest.mark.parametrize("parents", [[-1, 1, -1], [-1, 0, 2], [-2, 0, 0]])
def test_draft_before_its_parent_is_refused(parents):
    with pytest.raises(StepFailedError, match="comes before its parent"):
        DraftTrees.of(*decode((4,), (([5, 6, 7], parents),)))


def test_padded_pass_refuses_a_tree():
    world = World("llama", (4, 4, 4))
    model, _ = World.models["llama"]
    runner = PassRunner(model, rows=world.rows, cache=world.cache, layout="padded", workspace=Workspace())
    one, drafts = decode((4,), (TREE,))
    with pytest.raises(BackendError, match=r"backend\.tree_attention"):
        runner.run(one, drafts=drafts, sampler=ArgmaxSampler(), acceptance=MatchingPrefix())


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
