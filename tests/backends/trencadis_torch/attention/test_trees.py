from __future__ import annotations

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
from support.devices import DEVICE
from trencadis.errors import BackendError, StepFailedError
from trencadis.interfaces import AllocationPlan
from trencadis.records import Bucket, Drafts, Phase
from trencadis_testing.backend import ArgmaxSampler
from trencadis_torch.attention import adapter
from trencadis_torch.attention.ragged import Workspace
from trencadis_torch.attention.trees import DraftTrees
from trencadis_torch.cache.kv_cache import PagedKVCache
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
