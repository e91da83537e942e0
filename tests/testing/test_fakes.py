"""The fake backend: its shadow of the KV cache under drafts that are accepted, rejected, preempted and aborted at random."""

from __future__ import annotations

import random

import numpy as np
import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import StepFailedError
from trencadis.interfaces import AllocationPlan
from trencadis.records import ModelSource
from trencadis_testing.doubles import ScriptedTrees
from trencadis_testing.driver import BackendDriver, Work
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend, fake_text
from trencadis_testing.workloads import arrivals, serve, wrong_texts

PROMPT = tuple(range(2, 13))


def random_tree(tokens, *, most=6):
    """A tree that holds some of the true text at a random depth, with wrong drafts around it; depends on the tokens alone."""
    rng = random.Random(len(tokens) * 1009 + int(tokens[-1]))
    true = fake_text([int(token) for token in tokens], rng.randrange(4), eos=-1)
    tree, here = [], -1
    while len(tree) < rng.randrange(most + 1):
        if true and rng.random() < 0.6:
            tree.append((true.pop(0), here))
            here = len(tree) - 1
        else:
            tree.append((rng.randrange(97), rng.randrange(-1, len(tree))))
    return tree


def test_blocks_become_findable_with_verified_tokens_alone():
    """After every step the chain of each registered block is that of tokens that stand."""
    clock = SimulatedClock()
    backend = FakeBackend(eos=-1)
    engine = make_engine(backend=backend, clock=clock, speculator=ScriptedTrees(random_tree), warmup=False)
    todo = arrivals(7, num_requests=12)
    state = engine._state
    num_checked = 0

    def check():
        nonlocal num_checked
        for slot in state.running.tolist():
            sequence = state.table.sequence(slot)
            full = int(state.table.num_hashed_blocks[slot])
            tokens = state.known_tokens(sequence)
            assert full * 4 <= min(len(tokens), int(state.table.num_computed_tokens[slot]))
            expected = []
            state.hasher.extend(expected, tokens, num_blocks=full, salt="")
            assert sequence.block_hashes[:full] == expected
            slots = (state.blocks_of(sequence)[:full, None] * 4 + np.arange(4)).ravel()
            assert backend.kv_cache()[1][slots].tolist() == tokens[: full * 4].tolist()
            num_checked += full

    assert wrong_texts(serve(engine, clock, todo, after_step=check), todo, eos=-1) == []
    assert num_checked > 100


# --------------------------------------------------------------------------------------------- the backend alone


def driven(**options):
    backend = FakeBackend(eos=-1, **options)
    backend.load(ModelSource(path="fake"), sampler=None)
    plan = AllocationPlan(num_blocks=30, block_size=4, num_rows=2, max_model_len=60, max_num_batched_tokens=64)
    backend.allocate(plan)
    driver = BackendDriver(backend, plan)
    driver.start(0, PROMPT)
    driver.step([Work(0)])
    return backend, driver


def test_accepted_path_of_a_tree_moves_behind_the_newest_token():
    _, driver = driven()
    true = fake_text(PROMPT, 8, eos=-1)
    wrong = [(token + 1) % 97 for token in true]
    work = Work(0, 0, (wrong[1], true[1], wrong[2], true[2], true[3]), (-1, -1, 0, 1, 2))
    assert driver.step([work]).num_emitted.tolist() == [3]
    for _ in range(4):
        driver.step([Work(0)])
    assert driver.output(0) == true


def test_entry_that_a_rejected_draft_left_is_noticed_when_it_is_read(monkeypatch):
    """Without the move the cache holds the right tokens at wrong places, or wrong ones at right places."""
    monkeypatch.setattr(FakeBackend, "_close_up", lambda self, row, root, path: None)
    _, driver = driven()
    true = fake_text(PROMPT, 8, eos=-1)
    driver.step([Work(0, 0, ((true[1] + 1) % 97, true[1]), (-1, -1))])
    with pytest.raises(StepFailedError, match=f"the KV entry of position {len(PROMPT) + 1} is not its own"):
        driver.step([Work(0)])


def test_entry_with_the_right_token_behind_other_ones_is_noticed():
    backend, driver = driven()
    states, _, _ = backend.kv_cache()
    states[driver.blocks(0)[1] * 4] += np.uint64(1)
    with pytest.raises(StepFailedError, match="the KV entry of position 4 is not its own"):
        driver.step([Work(0)])


def test_tree_is_refused_where_it_is_not_provided_and_where_it_is_none():
    assert "backend.tree_attention" in FakeBackend().capabilities.provides
    assert "backend.tree_attention" not in FakeBackend(layout="padded").capabilities.provides
    _, driver = driven(layout="padded")
    with pytest.raises(StepFailedError, match=r"backend\.tree_attention"):
        driver.step([Work(0, 0, (1, 2), (-1, -1))])
    _, driver = driven()
    with pytest.raises(StepFailedError, match="draft 0 comes before its parent"):
        driver.step([Work(0, 0, (1, 2), (1, -1))])
